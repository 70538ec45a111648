"""Recomputes activations of one block in its backward.

none       every saved activation is kept
selective  cheap activations are recomputed: norms' outputs, rotated queries and keys, the SwiGLU product. Outputs of
           matmuls, attention and collectives are kept, so none of these runs twice
full       only the block's input is kept

A list of cheap operations, such as ``norm+swiglu``, recomputes only their outputs; selective means all of them.
``mla_up``, alone or in a list, recomputes the heads of latent attention from their latents: queries, and the projection
that keys and values are made of. ``experts`` recomputes the tensors of routed experts between dispatch and combine:
from the received copies, which are kept, both inputs of their SwiGLU and its weighted product. The router does not run
again, and nothing is sent again. No backward needs the output of the down projections.

Attention itself is not on the list (Megatron-LM recomputes it as ``core_attn``). That freed the scores and the
probabilities, S by S for each head, when they were stored. Fused kernels store one number a row instead and recompute
the scores in their own backward. The output of attention is also needed for the gradient of the output projection, so
running the most expensive kernel of a block again would free next to nothing.

Selective recomputation works on autograd's saved tensors: instead of a cheap tensor it saves a reference to a function
that computes the tensor again. Torch's own selective checkpointing dispatches every operation through Python twice,
which makes a small eager block host-bound, and it keeps matmul outputs that no backward needs (the partial sum of each
row-parallel layer). Neither matters under `torch.compile`, so compiled blocks use torch's. It compiles no part of a
checkpoint that has a graph break: blocks that recompute are not compiled if they have ring or all-gather attention or a
router (`Experiment.compiles`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from workloads.engine.kind_ops.document_attention import Seen
from workloads.engine.layers.checkpoint import checkpointed
from workloads.engine.layers.saved_tensors import MaybeElsewhere, back, kept
from workloads.engine.ops.fp8_linear import Fp8Products
from workloads.spec.recomputation import operations_of

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
}


def apply_recompute(block: nn.Module, recompute: str, *, compiled: bool, splits: bool = False) -> nn.Module:
    """Wrap the block for this kind of recomputation. ``compiled``: the caller is going to compile the result.
    ``splits``: its backward is split, and what a product recomputes waits for the weight-gradient pass."""
    if recompute == "none":
        return block
    if compiled:
        return CheckpointedBlock(block, recompute)
    if recompute == "full":
        return FullBlock(block)
    return SelectiveBlock(block, operations_of(recompute), shares=splits)


class FullBlock(nn.Module):
    """A block that runs its forward again in its backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, *seen: Seen) -> Tensor:
        return checkpointed(self.block, x_TD, cos_SH, sin_SH, _recomputing, *seen)


class CheckpointedBlock(nn.Module):
    """A block, about to be compiled, that runs its forward again in its backward: all of it, or only its cheap
    operations."""

    def __init__(self, block: nn.Module, recompute: str) -> None:
        super().__init__()
        self.block = block
        policy = _keep_expensive if recompute == "selective" else _keep_nothing
        self.contexts = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            self.block, x_TD, cos_SH, sin_SH, use_reentrant=False, preserve_rng_state=False, context_fn=self.contexts
        )
        return out


_is_recomputing = ContextVar("is_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether this forward is a recomputation: anything that it would count or record has been counted already."""
    return _is_recomputing.get()


@contextmanager
def _recomputing() -> Iterator[None]:
    token = _is_recomputing.set(True)
    try:
        yield
    finally:
        _is_recomputing.reset(token)


def _keep_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Torch 2.11 would otherwise keep tensors that a compiled block computes from gathered inputs."""
    return CheckpointPolicy.MUST_RECOMPUTE


class SelectiveBlock(nn.Module):
    """A block that recomputes cheap activations when its backward needs them: the outputs of ``operations``, which its
    modules name in ``recomputes``. ``shares``: of `RecomputeRegistry`."""

    def __init__(self, block: nn.Module, operations: Collection[str], *, shares: bool = False) -> None:
        super().__init__()
        self.block = block
        self.recomputations = RecomputeRegistry(shares=shares)
        for module in block.modules():
            known = getattr(module, "recomputes", ())
            if isinstance(known, tuple):
                getattr(module, "recomputations", {}).update(
                    {name: self.recomputations for name in known if name in operations}
                )
            elif known in operations:
                setattr(module, "recomputations", self.recomputations)  # noqa: B010 - nn.Module's own attributes are typed as tensors
            fp8 = getattr(module, "fp8", None)
            if isinstance(fp8, Fp8Products) and getattr(module, "input_of", None) in operations:
                fp8.keeps_input = True  # the input is recomputed instead

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor, *seen: Seen) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.recomputations.pack, self.recomputations.unpack):
            out: Tensor = self.block(x_TD, cos_SH, sin_SH, *seen)
        return out


@dataclass
class Recomputation:
    """A function that computes some outputs again, and those of its results that backward has not asked for yet."""

    recompute: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[MaybeElsewhere, ...] = ()
    """Its arguments."""
    shares: bool = False
    """Whether a result stays until everybody who saved it has asked for it. Otherwise it is forgotten when it is handed
    out, and computed again for the next one."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """Results by index, which one call computes all."""
    saved: Counter[int] = field(default_factory=Counter)
    """How many have saved a result, by index, and not asked for it yet."""

    def tensor(self, index: int) -> Tensor:
        """Returns result ``index``."""
        if index not in self.outputs:
            with torch.no_grad():
                self.outputs = dict(enumerate(self.recompute(*map(back, self.inputs))))
        self.saved[index] -= 1
        return self.outputs[index] if self.shares and self.saved[index] > 0 else self.outputs.pop(index)


@dataclass(frozen=True, slots=True)
class RecomputedRef:
    """Saved instead of a tensor: its recomputation, the index of the result, and which view of the result it was."""

    recomputation: Recomputation
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class RecomputeRegistry:
    """Recomputations of the live tensors that can be computed again, by storage. Its `pack` and `unpack` are
    saved-tensor hooks.

    ``shares``: those who save a tensor get the same result, as they should if each keeps its own: in a split backward
    the products of one input all hold it until the weight-gradient pass.
    """

    def __init__(self, *, shares: bool = False) -> None:
        self._shares = shares
        self._by_storage: dict[int, tuple[Recomputation, int]] = {}

    def register(
        self, outputs: tuple[Tensor, ...], recompute: Callable[..., tuple[Tensor, ...]], *inputs: Tensor
    ) -> Callable[[int, Tensor], None]:
        """Register ``recompute``, which computes ``outputs`` again and may only use tensors that backward keeps anyway.
        Those that may wait elsewhere until then are its arguments, ``inputs``.

        ``recompute`` may also return tensors that do not exist yet: register each later by calling the returned
        function with its index and the tensor.
        """
        held = tuple(kept(tensor.detach()) for tensor in inputs)
        add = partial(self._add, Recomputation(recompute, held, self._shares))
        for index, tensor in enumerate(outputs):
            add(index, tensor)
        return add

    def _add(self, recomputation: Recomputation, index: int, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        self._by_storage[key] = (recomputation, index)
        # Once the tensor is freed, another one may have its address.
        weakref.finalize(tensor, self._by_storage.pop, key, None)

    def pack(self, tensor: Tensor) -> MaybeElsewhere | RecomputedRef:
        """Returns a reference for a registered tensor or a view of one; any other tensor is saved as it is, or by the
        layer's keeper."""
        entry = self._by_storage.get(tensor.untyped_storage()._cdata)
        if entry is None:
            return kept(tensor)
        recomputation, index = entry
        recomputation.saved[index] += 1
        return RecomputedRef(*entry, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(saved: MaybeElsewhere | RecomputedRef) -> Tensor:
        """Returns the saved tensor, or recomputes it: the same view of the result."""
        if not isinstance(saved, RecomputedRef):
            return back(saved)
        return saved.recomputation.tensor(saved.index).as_strided(saved.size, saved.stride, saved.offset)
