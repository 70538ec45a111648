"""The model whose parts the ranks of a layout hold: with padded rows of the vocabulary and copied heads.

``pad_vocab_to`` adds rows to embedding and head. With more tensor-parallel ranks than key and value heads every rank
holds one such head, so that tp / num_kv_heads ranks in a row hold copies of one. In both cases the ranks hold, compute
and send what those of a model with such sizes do; only the sums of the copies' gradients are more
(`workloads.costs.traffic.sent`).
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention, BlockSparseAttention
from workloads.spec.layer_kinds.layer_list import LayerList
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.model_spec import ModelSpec


def as_held(experiment: Experiment) -> Experiment:
    """The experiment with the model that its ranks hold; itself if nothing is padded or copied."""
    e = experiment
    if e.pad_vocab_to is None and e.tp <= e.model.num_kv_heads:
        return e
    model = _held_model(e.model, e.tp, e.pad_vocab_to)
    return e if model is e.model else dataclasses.replace(e, model=model)


def padded_rows(experiment: Experiment) -> int:
    """Number of rows of embedding and head that stand for no token."""
    e = experiment
    return _padded_vocabulary(e.model, e.tp, e.pad_vocab_to) - e.model.vocab_size


def _padded_vocabulary(model: ModelSpec, tp: int, pad_vocab_to: int | None) -> int:
    """Rows of the embedding: the next multiple of ``pad_vocab_to`` times tp, as Megatron-LM pads."""
    multiple = 1 if pad_vocab_to is None else pad_vocab_to * tp
    return -(-model.vocab_size // multiple) * multiple


def copies_of_heads(experiment: Experiment) -> list[int]:
    """Numbers of tensor-parallel ranks that hold the same key and value head, above 1: one of a model that numbers
    describe, one of every kind of layers that has copies; in ascending order."""
    model, tp = experiment.model, experiment.tp
    if model.layers is None:
        found = {_copies(model, tp)}
    elif copies_in_layers(model, tp):
        attentions = [one for layer in model.layers.kinds if (one := grouped_attention(layer)) is not None]
        found = {copies_of(one.heads, one.kv_heads, tp) for one in attentions}
    else:
        found = set()
    return sorted(found - {1})


def kv_heads_fit(model: ModelSpec, tp: int) -> bool:
    """Whether tp divides the key and value heads of every layer, or each rank can have a copy of one."""
    return model.num_kv_heads % tp == 0 or _copies(model, tp) > 1 or copies_in_layers(model, tp)


def _copies(model: ModelSpec, tp: int) -> int:
    if model.layers is not None or model.mla is not None:
        return 1
    return copies_of(model.num_heads, model.num_kv_heads, tp)


def copies_of(heads: int, kv_heads: int, tp: int) -> int:
    """Copies of each key and value head over the ranks, where every rank holds one; else 1."""
    return tp // kv_heads if tp > kv_heads and tp % kv_heads == 0 and heads % tp == 0 else 1


@lru_cache(maxsize=1024)
def copies_in_layers(model: ModelSpec, tp: int) -> bool:
    """Whether a model with a list of layers has key and value heads of which ranks hold copies, in some kinds, while tp
    divides those of the others."""
    if model.layers is None:
        return False
    held = _held_layers(model.layers, tp)
    attentions = [one for layer in held.kinds if (one := grouped_attention(layer)) is not None]
    return held != model.layers and all(one.kv_heads % tp == 0 for one in attentions)


def _held_layers(layers: LayerList, tp: int) -> LayerList:
    return dataclasses.replace(layers, kinds=tuple(_held_layer(layer, tp) for layer in layers.kinds))


def _held_layer(layer: Layer, tp: int) -> Layer:
    one = grouped_attention(layer)
    if one is None:
        return layer
    held = dataclasses.replace(one, kv_heads=one.kv_heads * copies_of(one.heads, one.kv_heads, tp))
    mixer = layer.mixer
    if isinstance(mixer, BlockSparseAttention):
        return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, attention=held))
    return dataclasses.replace(layer, mixer=held)


def grouped_attention(layer: Layer) -> Attention | None:
    """The grouped-query attention of a layer, if it has one."""
    mixer = layer.mixer.attention if isinstance(layer.mixer, BlockSparseAttention) else layer.mixer
    return mixer if isinstance(mixer, Attention) else None


@lru_cache(maxsize=1024)
def _held_model(model: ModelSpec, tp: int, pad_vocab_to: int | None) -> ModelSpec:
    rows, heads = _padded_vocabulary(model, tp, pad_vocab_to), model.num_kv_heads * _copies(model, tp)
    if model.layers is not None and copies_in_layers(model, tp):
        layers = _held_layers(model.layers, tp)
        return dataclasses.replace(model, vocab_size=rows, num_kv_heads=tp, layers=layers)
    if (rows, heads) == (model.vocab_size, model.num_kv_heads):
        return model
    return dataclasses.replace(model, vocab_size=rows, num_kv_heads=heads)
