"""Activation recomputation of one block.

none       every saved activation is kept
selective  what is cheap to make again is: norms' outputs, rotated queries and keys, the SwiGLU product. Outputs of
           matmuls, attention and collectives are kept, and none of these runs twice
full       only the block's input is kept

Selective works on autograd's saved tensors: a tensor with a recipe is not saved, its recipe is. Torch's own selective
checkpointing does it by dispatching every operation through Python twice, which leaves a small eager block bound by the
host, and keeps matmul outputs that no backward needs (each row-parallel layer's partial sum). Under `torch.compile`,
where neither matters, it is the one that is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


def apply_recompute(block: nn.Module, recompute: str, *, compiled: bool) -> nn.Module:
    """The block, wrapped as ``recompute`` asks; ``compiled``: it is going to be compiled."""
    if recompute == "none":
        return block
    if recompute == "selective" and not compiled:
        return SelectiveBlock(block)
    return CheckpointedBlock(block, selective=recompute == "selective")


class CheckpointedBlock(nn.Module):
    """A block that runs its forward again in its backward."""

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        super().__init__()
        self.block = block
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if selective:
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_expensive)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        return checkpoint(self.block, x_TD, cos_SH, sin_SH, **self.options)


def _keep_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveBlock(nn.Module):
    """A block whose cheap activations are made again when its backward asks for them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.recipes = Recipes()
        for module in block.modules():
            if hasattr(module, "recipes"):
                setattr(module, "recipes", self.recipes)  # noqa: B010 - nn.Module's own attributes are typed as tensors

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.recipes.pack, self.recipes.unpack):
            out: Tensor = self.block(x_TD, cos_SH, sin_SH)
        return out


@dataclass
class _Recipe:
    make: Callable[[], tuple[Tensor, ...]]
    made: dict[int, Tensor] = field(default_factory=dict)
    """Results not taken yet: one call makes all of them, backward asks for them one by one."""

    def take(self, index: int) -> Tensor:
        if index not in self.made:
            with torch.no_grad():
                self.made = dict(enumerate(self.make()))
        return self.made.pop(index)


@dataclass(frozen=True, slots=True)
class _Ingredient:
    """Saved in the place of a tensor: how to make it, and which view of it was saved."""

    recipe: _Recipe
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Recipes:
    """Tensors that can be made again, by the storage they live in, for as long as they live."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[_Recipe, int]] = {}

    def note(self, made: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]) -> None:
        """``make`` gives tensors equal to ``made``, from tensors that backward needs in any case."""
        recipe = _Recipe(make)
        for index, tensor in enumerate(made):
            key = tensor.untyped_storage()._cdata
            self._by_storage[key] = (recipe, index)
            # Once the tensor is gone, its address may be another's.
            weakref.finalize(tensor, self._by_storage.pop, key, None)

    def pack(self, tensor: Tensor) -> Tensor | _Ingredient:
        found = self._by_storage.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        return _Ingredient(*found, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    @staticmethod
    def unpack(saved: Tensor | _Ingredient) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return saved.recipe.take(saved.index).as_strided(saved.size, saved.stride, saved.offset)
