"""Layers with matrix products in fp8, mxfp8 or nvfp4: bytes that a backward saves and needs, and how long they take.

Symbols are those of `workloads.costs.memory.kind_tensors`.

Saved tensors differ from those of a bf16 layer as follows: normed inputs and the SwiGLU product are in fp8 if a rank
has whole rows of them (with tp > 1 column-parallel layers save the local rows that they gather again, in bf16). The
attention output stays in bf16, because attention's backward saves it. So does a tensor that another product saves in
bf16: the input of routers, and the input of a down projection of latent attention if queries have no latent. Weight
gradients in bf16 (rowwise, and of routed experts in every kind of fp8) need their inputs in bf16, so nothing changes
there. mxfp8 and nvfp4 are as fp8 with a scale for each block, but all weight gradients are in the format, and weights
are gathered in bf16, as Transformer Engine 2 does unless told otherwise.
"""

from __future__ import annotations

from workloads.spec.experiment import Experiment


def is_low(experiment: Experiment) -> bool:
    """Whether the blocks' matrix products are in a format below 16 bits."""
    return experiment.precision.startswith("fp8") or experiment.precision in ("mxfp8", "nvfp4")


def gathered_bytes(experiment: Experiment, c: int, *, of_experts: bool = False) -> int:
    """Bytes per element of a block's gathered matrices: 1 if a matrix has a single scale, as those of experts have in
    every kind of fp8, else ``c``."""
    of_fp8 = experiment.precision.startswith("fp8")
    return 1 if experiment.precision == "fp8_tensorwise" or (of_experts and of_fp8) else c


def keeps_low(experiment: Experiment) -> bool:
    """Whether backward saves inputs of matrix products in their format."""
    return experiment.precision in ("fp8_tensorwise", "fp8_blockwise", "mxfp8", "nvfp4")


def cast_bytes(experiment: Experiment, elements: int) -> int:
    """Bytes of ``elements`` activations in the format of the products. Scales: 4 bytes for 128 elements of
    fp8_blockwise, one byte for 32 of mxfp8 and for 16 of nvfp4."""
    if experiment.precision == "nvfp4":
        return elements // 2 + elements // 16
    return elements + (elements // 32 if experiment.precision in ("fp8_blockwise", "mxfp8") else 0)


def working_bytes(
    experiment: Experiment,
    stream: int,
    tokens: int,
    columns: int,
    up: int,
    c: int,
    *,
    recomputes_product: bool,
    w: int,
    first_half: bool = False,
) -> int:
    """Bytes that a dense layer's backward needs in addition to its saved tensors: the largest of five moments in its
    second half.

    ``stream``: bytes of its input; ``columns``: of the feed-forward layer on one rank (F / tp); ``up``: of the product
    before its activation, 2 F / tp with a gate; ``recomputes_product``: whether the activation's output is recomputed;
    ``w``: bytes of an element of a weight's gradient. The stream's gradient exists throughout, the down weight's after
    the first two moments, and also

    1. the down layer's output gradient in fp8 in both layouts, its transposed weight, and the product's gradient;
    2. the product's gradient, one fp8 copy of the output's, and the down weight's;
    3. the gradients of product and of gate_up, when the saved product is free;
    4. the gradient of gate_up in bf16, in the place of gate_up, and twice in fp8, the transposed weight, the gradient
       of the input;
    5. as 4, with one fp8 copy and the weight's gradient instead of the second copy and the weight.

    ``first_half``: in the input-gradient pass of a split backward. No weight gets a gradient in it; for the other pass
    the product stays, in 16 bits if it is recomputed, and one fp8 copy of the output's gradient.
    """
    e, h = experiment, experiment.model.hidden_size
    copies = 2 if keeps_low(e) else 1
    product, output, down, of_up = tokens * columns, tokens * h, h * columns, h * up
    gathered = c * output if e.tp > 1 else 0
    kept = 0 if recomputes_product else cast_bytes(e, product) if copies == 2 else c * product
    recomputed_product = c * product + (cast_bytes(e, product) if copies == 2 else 0) if recomputes_product else 0
    transposed = cast_bytes(e, output) if copies == 2 and e.tp > 1 else 0
    of_down, of_weight, waiting = w * down, w * of_up, -kept
    if first_half:
        of_down = of_weight = 0
        waiting = (copies - 1) * cast_bytes(e, output) + (c * product if recomputes_product else 0)
    entering = of_down + c * output + gathered + waiting
    return stream + max(
        gathered + copies * cast_bytes(e, output) + down + c * product,
        gathered + (copies - 1) * cast_bytes(e, output) + c * product + of_down + recomputed_product,
        of_down + c * (product + tokens * up) + waiting,
        entering + copies * cast_bytes(e, tokens * up) + of_up,
        entering + (copies - 1) * cast_bytes(e, tokens * up) + transposed + of_weight,
    )


_OF_TENSORWISE = {"fp8_rowwise": (0.92, 0.92), "fp8_blockwise": (0.82, 0.63)}
"""Relative rates of products (forward and input gradient, weight gradient), compared with one scale per tensor: means
over the products of a Llama-3.1-8B layer of 8,192 tokens, measured on H200 with torch 2.11."""


def grouped_rate(width: int) -> float:
    """Relative rate of the experts' products, compared with products with one scale per tensor. ``width``: columns of
    an expert's product on one rank.

    Within 0.015 of what was measured on H200 with torch 2.11 and 16,384 tokens: Qwen3-30B-A3B (width 768) 0.63,
    DeepSeek-V2-Lite (1,408) 0.73, Mixtral (14,336) 0.86.
    """
    return 1 / (1.12 + 360 / width)


def product_times(experiment: Experiment, of_bf16: float) -> tuple[float, float, float]:
    """Relative durations of a layer's three products (forward, input gradient, weight gradient), in units of a product
    at the device's rate in the format. ``of_bf16``: relative duration of a bf16 product, as rowwise weight gradients
    are."""
    if experiment.precision not in _OF_TENSORWISE:
        return 1.0, 1.0, 1.0
    rows, weight = _OF_TENSORWISE[experiment.precision]
    return 1 / rows, 1 / rows, of_bf16 if experiment.precision == "fp8_rowwise" else 1 / weight


def cast_traffic(experiment: Experiment, tokens: int, weights: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Bytes that casts of one layer read and write: (forward, backward). ``inputs``, ``outputs``: columns of all
    products' activations on one rank; ``weights``: elements.

    A cast reads 2 bytes per element and writes one, or two for both layouts. One scale per tensor or column needs
    another pass before it, unless the kernel that produced the tensor has computed the scale (normed inputs, the SwiGLU
    product and its gradient: assumed for three quarters). Weights gathered in fp8 are cast once a step, and then only
    transposed; other weights are cast in every forward and every backward.
    """
    kind = experiment.precision
    if kind == "fp8_tensorwise":
        return 4.5 * tokens * inputs, 4.5 * tokens * outputs + 2.0 * weights
    if kind == "fp8_rowwise":
        return 3.0 * (tokens * inputs + weights), 3.0 * tokens * outputs + 5.0 * weights
    if kind == "fp8_blockwise" or kind == "mxfp8":
        return 4.0 * tokens * inputs + 3.0 * weights, 4.0 * tokens * outputs + 3.0 * weights
    if kind == "nvfp4":
        return 3.0 * tokens * inputs + 2.5 * weights, 3.0 * tokens * outputs + 2.5 * weights
    return 0.0, 0.0


def grouped_cast_traffic(weights: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Bytes that casts of a layer's routed experts read and write: (forward, backward). ``weights``: elements;
    ``inputs``, ``outputs``: elements of their products' activations. Weights are cast before they are gathered, and
    transposed in every backward."""
    return 3.0 * inputs, 3.0 * outputs + 2.0 * weights
