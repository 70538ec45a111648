"""Faults of layers that differ by kind: reach, sinks, gates, positions, and parameters that are no matrices."""

from __future__ import annotations

from tests.planted.faults import ENGINE, TWO, faults_of
from tests.planted.plant import Fault

_SPAN, _WINDOW = ENGINE + "kind_ops.span_attention:", ENGINE + "kind_ops.window_attention:"
_LAYER = ENGINE + "layers.kind_attention:"
_SLIDING, _CHUNKED, _SINKS = ({"layers": name, **TWO} for name in ("sliding", "chunked_unevenly", "sinks"))
_GATES, _POSITIONS = {"layers": "gate_of_elements", **TWO}, {"layers": "positions", **TWO}
_HEADS = {"layers": "gate_of_heads", "tp": 2, "micro_batch_size": 4}
_WINDOW_RING = {"layers": "sliding", "cp": 2, "cp_kind": "ring", "micro_batch_size": 4, "seq_len": 20}
_SINK_RING = {**_WINDOW_RING, "layers": "sinks"}
_BIASES = {"layers": "biases", "tp": 2, "micro_batch_size": 4}

KINDS: list[Fault] = faults_of(
    "kinds",
    (
        "window_too_long",
        "a window has one token too many",
        _WINDOW + "_scores",
        "key <= query - window",
        "key < query - window",
        _SLIDING,
    ),
    (
        "window_in_every_layer",
        "the window of the first kind is that of all",
        ENGINE + "layers.block:_attention",
        "kind.mixer, 0 if",
        "model.layers.kinds[0].mixer, 0 if",
        _SLIDING,
    ),
    (
        "chunks_not_cut",
        "a query sees the chunk before its own",
        _SPAN + "Reach.within",
        "(self.window, self.chunk)",
        "(self.window, 2 * self.chunk if self.chunk else None)",
        _CHUNKED,
    ),
    (
        "sink_left_out",
        "the sum of the softmax has no sink",
        _SPAN + "add_sinks",
        "total = torch.logaddexp(lse_BNS, sinks_N.to(lse_BNS.dtype).unsqueeze(1))",
        "total = lse_BNS",
        _SINKS,
    ),
    (
        "sink_not_in_backward",
        "the backward takes the sum without the sink",
        _SPAN + "_SpanAttention.forward",
        "lse = add_sinks(o, lse, sinks)",
        "add_sinks(o, lse, sinks)",
        _SINKS,
    ),
    (
        "sink_gradient_sign",
        "sinks go the other way",
        _SPAN + "gradient_of_sinks",
        "-(shares_BNS * row_sums_BNS)",
        "(shares_BNS * row_sums_BNS)",
        _SINKS,
    ),
    (
        "sinks_of_first_heads",
        "every rank of Ulysses takes the first sinks",
        _LAYER + "KindAttention._attend",
        "unflatten(0, (axis.size, -1))[axis.rank]",
        "unflatten(0, (axis.size, -1))[0]",
        {"layers": "sinks", "cp": 2, "cp_kind": "ulysses", "micro_batch_size": 4},
    ),
    (
        "window_of_the_last_rank",
        "the last rank reads before its second part what the ring brings",
        ENGINE + "collectives.window_exchange:_Tails.forward",
        "if cp.rank == cp.size - 1:",
        "if False:",
        _WINDOW_RING,
    ),
    (
        "window_gradients_not_returned",
        "gradients of keys that other ranks see do not come home",
        ENGINE + "collectives.window_exchange:_Tails.backward",
        "return d_first, d_second, None",
        "return torch.zeros_like(d_first), d_second, None",
        _WINDOW_RING,
    ),
    (
        "ring_sinks_before_other_keys",
        "the sink's gradient is of this rank's first keys alone",
        ENGINE + "collectives.context_parallel:_Ring.backward",
        "gradient_of_sinks(grad, o, lse, sinks)",
        "gradient_of_sinks(grad[:, :, :1], o[:, :, :1], lse[:, :, :1], sinks)",
        _SINK_RING,
    ),
    (
        "gate_on_the_wrong_side",
        "gate and output change places",
        _LAYER + "KindAttention.forward",
        "o_BSNV = gated_output(o_BSNV, gate_BSNG)",
        "o_BSNV = gated_output(gate_BSNG, o_BSNV)",
        _GATES,
    ),
    (
        "gate_slope",
        "the derivative of the gate is forgotten in part",
        ENGINE + "kind_ops.gated_output:_GatedOutput.backward",
        "sigmoid * (1 - sigmoid)",
        "sigmoid",
        _HEADS,
    ),
    (
        "rotated_columns_moved",
        "the rotated columns change places with the others",
        _LAYER + "KindAttention._norm_and_rotate",
        "torch.cat([first_q, rest_q], -1)",
        "torch.cat([rest_q, first_q], -1)",
        _GATES,
    ),
    (
        "one_table_for_all",
        "every layer rotates by the tables of the first",
        ENGINE + "layers.transformer:_table",
        "known.index(found)",
        "next(at for at, one in enumerate(known) if one[1] == found[1])",
        {"layers": "sandwich", **TWO},
    ),
    (
        "rotated_without_positions",
        "layers without positions are rotated",
        ENGINE + "layers.block:_attention",
        "0 if found is None else found[1]",
        "8 if found is None else found[1]",
        _POSITIONS,
    ),
    (
        "bias_added_twice",
        "the output's bias is added twice",
        _LAYER + "KindAttention.forward",
        "y_TD + self.out_bias.weight",
        "y_TD + 2 * self.out_bias.weight",
        _BIASES,
    ),
    (
        "capped_without_slope",
        "the backward forgets the cap of the scores",
        _WINDOW + "_blocks_backward",
        "dz = dz if slope is None else dz * slope",
        "pass",
        {"layers": "soft_cap", **TWO},
    ),
    (
        "scale_not_in_backward",
        "gradients forget the scale of the values",
        _SPAN + "_SpanAttention.backward",
        "grad, o = grad * ctx.reach.value_scale, o / ctx.reach.value_scale",
        "pass",
        {"layers": "heads_by_kind", **TWO},
    ),
    (
        "relu_not_squared",
        "the derivative of the squared ReLU lacks its factor",
        ENGINE + "kind_ops.activations:_ReLU2.backward",
        ".mul_(2)",
        "",
        {"layers": "squared_relu", **TWO},
    ),
    (
        "sum_normed",
        "the stream is normed with the output that is added to it",
        ENGINE + "layers.block:Block.forward",
        "x_TD + self.attention_out_norm(self.attention(self.attention_norm(x_TD), cos_SH, sin_SH, seen))",
        "self.attention_out_norm(x_TD + self.attention(self.attention_norm(x_TD), cos_SH, sin_SH, seen))",
        {"layers": "sandwich", **TWO},
    ),
    (
        "shared_gate_by_tanh",
        "the gate of shared experts is a tanh",
        ENGINE + "layers.kind_feed_forward:GatedShared.forward",
        "torch.sigmoid(",
        "torch.tanh(",
        {"layers": "gate_of_shared_experts", **TWO},
    ),
    (
        "weights_on_outputs",
        "outputs of experts are weighted instead of inputs",
        ENGINE + "layers.experts:Experts.forward",
        "if self.weights_inputs:",
        "if False:",
        {"layers": "weighted_inputs", **TWO},
    ),
    (
        "gradient_of_weights_lost",
        "the router gets no gradient from weighted inputs",
        ENGINE + "kind_ops.weighted_rows:_WeightedRows.backward",
        "(dy * x).sum(1, dtype=accumulation_dtype(x.dtype)).to(weights.dtype)",
        "torch.zeros_like(weights)",
        {"layers": "weighted_inputs", **TWO},
    ),
)
