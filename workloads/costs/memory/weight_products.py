"""Products of a weight-gradient pass, in their order: each makes a gradient and frees what it has read."""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.kind_layer import KindLayer, bytes_of
from workloads.costs.memory.kind_tensors import LATENT_SUM
from workloads.costs.shape import fp8
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP


class Product(NamedTuple):
    """A product that makes the gradient of a weight, or several in a row."""

    elements: int
    """Of the weight on one rank."""
    frees: int
    """Bytes of its two factors, which nothing else holds; 0 if that is not known."""
    gathers: int
    """Bytes of a factor that tensor-parallel ranks gather for it."""


def products_of(one: KindLayer, block: int) -> tuple[Product, ...]:
    """Those of a layer in the order of its backward. What follows the output projection of a mixer counts as one, and
    so do all of a layer with factors in fp8, or with routed experts, of which only the projection out of a latent comes
    before the experts'. ``block``: elements of the layer on one rank, without routed experts; norms and biases count
    with the last product."""
    s, kind, products = one.s, one.kind, []
    if isinstance(kind.mlp, RoutedMLP) and kind.mlp.latent and not fp8.is_low(one.e):
        (latent,) = (tensor for tensor in one.t.mlp if tensor.name == LATENT_SUM)
        of_output = s.own(s.hidden) if s.tp > 1 or kind.mlp.shared is None else 0  # else the stream's, which stays
        out = kind.mlp.latent * s.hidden
        return Product(out, latent.bytes + of_output, 0), Product(block - out, 0, one.gathered)
    if fp8.is_low(one.e) or isinstance(kind.mlp, RoutedMLP):
        return (Product(block, 0, one.gathered),)
    of_output = s.c * s.tokens * s.hidden  # the gradient of a row-parallel product's output
    if isinstance(kind.mlp, DenseMLP):
        down = kind.mlp.width // s.tp * s.hidden
        gate_up, product = one.t.mlp
        products += [
            Product(down, product.bytes + of_output, 0),
            Product((2 if kind.mlp.gated else 1) * down, gate_up.bytes + s.own(s.hidden), one.gathered),
        ]
    if kind.mixer is not None:
        outputs = sum(w.parameters for w in kind.mixer.weights(s.hidden) if w.name in ("o", "out")) // s.tp
        feeds = bytes_of([tensor for tensor in one.t.mixer if tensor.feeds][-1:])
        products.append(Product(outputs, feeds + of_output, 0))
        products.append(Product(0, 0, one.gathered))
    rest = block - sum(product.elements for product in products)
    last = products[-1]
    return (*products[:-1], last._replace(elements=last.elements + rest))


def highest_of(products: tuple[Product, ...], w: int) -> int:
    """Bytes in addition to all factors at the highest moment of these products. ``w``: bytes of a gradient's element;
    0 where products add to sums that exist."""
    made = freed = most = 0
    for product in products:
        made += w * product.elements
        most = max(most, made - freed + product.gathers)
        freed += product.frees
    return most
