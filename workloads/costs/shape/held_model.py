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


def copies_of_heads(experiment: Experiment) -> int:
    """Number of tensor-parallel ranks that hold the same key and value head, where every rank holds one; else 1."""
    e = experiment
    return _copies(e.model, e.tp)


def _copies(model: ModelSpec, tp: int) -> int:
    heads = model.num_kv_heads
    copied = tp > heads and tp % heads == 0 and model.num_heads % tp == 0 and model.mla is None and model.layers is None
    return tp // heads if copied else 1


@lru_cache(maxsize=1024)
def _held_model(model: ModelSpec, tp: int, pad_vocab_to: int | None) -> ModelSpec:
    rows, heads = _padded_vocabulary(model, tp, pad_vocab_to), model.num_kv_heads * _copies(model, tp)
    if (rows, heads) == (model.vocab_size, model.num_kv_heads):
        return model
    return dataclasses.replace(model, vocab_size=rows, num_kv_heads=heads)
