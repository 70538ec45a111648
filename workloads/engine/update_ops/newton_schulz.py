"""Newton-Schulz iterations, which turn a matrix U S V^T into nearly U V^T with matrix products alone.

Coefficients and number of iterations are those of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/),
which `torch.optim.Muon` and arXiv:2502.16982 use too. Torch's own function computes in bf16 whatever it is given; this
one computes in the dtype of its argument, so that layouts can be compared in float64.
"""

from __future__ import annotations

from torch import Tensor, addmm, baddbmm, linalg, matmul

from workloads.costs.shape.matrix_parts import NEWTON_SCHULZ_STEPS, computes_three_quarters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of  X <- a X + (b X X^T + c (X X^T)^2) X.  They are chosen for speed: singular values end between about 0.7
and 1.2 rather than at 1."""
LEAST_NORM = 1e-7
"""Smallest norm by which a matrix is divided."""


def newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalise ``x`` [N, M], or every matrix of ``x`` [B, N, M]; it is overwritten. Holds two tensors of its size
    at a time, and one of each matrix's smaller side squared. A batch launches as many kernels as one matrix."""
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    add_product = addmm if x.dim() == 2 else baddbmm
    in_part = computes_three_quarters(*x.shape[-2:])
    # The spectral norm is at most the Frobenius norm.
    x.div_(linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM))
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = _gram(x) if in_part else x @ x.mT
        polynomial = _polynomial(gram) if in_part else add_product(gram, gram, gram, beta=b, alpha=c)
        del gram
        x = add_product(x, polynomial, x, beta=a)
        del polynomial
    return x.mT if is_tall else x


def _gram(x: Tensor) -> Tensor:
    """X X^T of [..., N, M], of which the upper right quarter is the transposed lower left one."""
    rows = x.shape[-2]
    half, gram = rows // 2, x.new_empty(*x.shape[:-1], rows)
    matmul(x[..., :half, :], x[..., :half, :].mT, out=gram[..., :half, :half])
    matmul(x[..., half:, :], x.mT, out=gram[..., half:, :])
    return _mirrored(gram, half)


def _polynomial(gram: Tensor) -> Tensor:
    """b G + c G G of a symmetric G [..., N, N], likewise."""
    _, b, c = COEFFICIENTS
    add_product = addmm if gram.dim() == 2 else baddbmm
    half, result = gram.shape[-1] // 2, gram.new_empty(gram.shape)
    above, below = gram[..., :half, :], gram[..., half:, :]
    corner = above[..., :half]
    add_product(corner, above, above.mT, beta=b, alpha=c, out=result[..., :half, :half])
    add_product(below, below, gram, beta=b, alpha=c, out=result[..., half:, :])
    return _mirrored(result, half)


def _mirrored(x: Tensor, half: int) -> Tensor:
    x[..., :half, half:] = x[..., half:, :half].mT
    return x
