"""Seconds of one micro-batch in one layer of any kind on one rank: compute and exposed communication.

Products, messages and memory passes are those that the kind says (`workloads.spec.layer_kinds`,
`workloads.costs.memory.kind_tensors`). What a mixer computes beyond its products runs at the rate of attention, that of
recurrent mixers too, as much as their kernels of chunks compute; with ``recurrence=fla`` also what these read and write
(`workloads.costs.time.recurrent_times`), on GPUs without it the many operations of torch
(`workloads.costs.time.recurrent_operations`). `workloads.costs.time.timeline` states the other assumptions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workloads.costs.memory.activations import rank_tokens
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.costs.shape import fp8
from workloads.costs.shape.params import COMPUTE_BYTES, MASTER_BYTES, counted_tokens, latent_up
from workloads.costs.shape.peer_memory import shares_memory
from workloads.costs.time.attention_rates import forward_part, kernel_relative, sink_passes
from workloads.costs.time.expert_times import NO_EXPERTS, ExpertTimes
from workloads.costs.time.rank_times import LayerTimes, Rates
from workloads.costs.time.recurrent_operations import TorchPasses, torch_passes
from workloads.costs.time.recurrent_times import Passes, exchange_copies, kernel_passes, slowed
from workloads.costs.traffic.collectives import Collective, collective_time_s, contention_of, together_s
from workloads.costs.traffic.context_parallel import context_messages_of
from workloads.spec.cluster import ClusterSpec
from workloads.spec.documents.kernels import gathers_documents
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.layer_kinds.weight import ROW_PARALLEL, Weight
from workloads.spec.mesh import stride
from workloads.spec.recurrent_kernels import Batch, Kernels

ATTENTION_RELATIVE_EFFICIENCY = 0.74
"""Rate of attention in `Rates` over the rate of matmuls: cuDNN forward and backward reach 510 TFLOP/s, the matrix
products of a Llama-3.1-8B layer 690, with four sequences of 4096 tokens on H200 with torch 2.11. Every kernel has its
own share of it (`workloads.costs.time.attention_rates`)."""

ATTENTION_BACKWARD = 2.5
"""Backward over forward FLOPs of flash attention: five matrix products (scores are recomputed) instead of two
(FlashAttention-2, arXiv:2307.08691)."""

COPIES_SLOW = 0.27
"""Seconds by which a second of copies between devices slows the products beside them: of the four products of a layer
of Llama 8B, two H200 at their power limit (results/recorded/h200x2_shared_memory/NOTE.md)."""


def rates_of(e: Experiment, cluster: ClusterSpec) -> Rates | None:
    device, share = cluster.device, cluster.matmul_efficiency
    peak = device.peak_of(e.precision)
    head = device.peak_of("bf16" if fp8.is_low(e) else e.precision)
    if peak is None or head is None or share is None or device.memory_bandwidth is None:
        return None
    return Rates(
        matmul=peak * share,
        head=head * share,
        attention=head * share * ATTENTION_RELATIVE_EFFICIENCY,
        memory=device.memory_bandwidth,
    )


def _last_product(kind: Layer, hidden: int) -> int:
    """Elements of the weight of a layer's last product."""
    if isinstance(kind.mlp, DenseMLP):
        return kind.mlp.width * hidden
    weights = kind.mixer.weights(hidden) if kind.mixer is not None else ()
    return sum(one.outputs * one.inputs * one.copies for one in weights if one.name in ROW_PARALLEL)


def layer_times(e: Experiment, cluster: ClusterSpec, rates: Rates, kind: Layer) -> LayerTimes:
    """Compute and exposed communication of one layer, in seconds. ``rates``: FLOP/s and bytes per second.

    Matmuls: 2 FLOPs per parameter and token forward, 4 backward; attention: those of the scores that a query sees
    (PaLM, arXiv:2204.02311, appendix B, counts all), with packed documents on the slowest rank. Forward memory passes:
    norms (read, write), residual sums (2 reads, 1 write each), RoPE and norms of queries and keys (read, write each),
    SwiGLU (2 reads, 1 write); twice that backward. In fp8 also casts (`workloads.costs.shape.fp8`).
    """
    c, hidden, streams = COMPUTE_BYTES[e.precision], e.model.hidden_size, e.model.streams
    tokens, stream = rank_tokens(e)
    products, mixing = _products(kind, hidden), kind.mixing(counted_tokens(e.model, e.slowest_length))
    per_number = 2.0 / rates.matmul
    matmul = per_number * (tokens * products.split / e.tp + stream * (products.whole + _mixed_streams(hidden, streams)))
    trained = mixing.trained
    if isinstance(kind.mixer, Recurrent):
        trained = kind.mixer.kernel_flops()
    rate, part = rates.attention * kernel_relative(e, kind), forward_part(e, kind)
    products_s = tokens * trained / e.tp / rate
    attention, attention_back = part * products_s, (1 + ATTENTION_BACKWARD - part) * products_s
    scores = tokens * mixing.untrained / e.tp / rate
    experts = ExpertTimes.of(e, cluster, rates, kind.mlp) if isinstance(kind.mlp, RoutedMLP) else NO_EXPERTS
    tensors = kind_tensors(kind, Sizes.of(e, c), streams).all()
    parts = (kind.mixer is not None) + (kind.mlp is not None)
    kernels = _kernels(e, kind)
    passes = sum(one.moved for one in tensors) + c * parts * (2 * streams + 1) * stream * hidden - kernels.replaced
    memory = passes / rates.memory + experts.activation_s + experts.biases_s + experts.permute_s
    in_fp8 = fp8.product_times(e, rates.matmul / rates.head)
    casts = fp8.cast_traffic(e, tokens, products.weights // e.tp, *_columns(kind, hidden, e.tp))
    # The head's forward computes its gradients too.
    of_head = 6.0 * tokens * e.model.vocab_size * hidden / e.tp / rates.head if kind.ahead else 0.0
    forward = matmul * in_fp8[0] + experts.forward_s + attention + scores + memory + casts[0] / rates.memory + of_head
    backward = matmul * (in_fp8[1] + in_fp8[2]) + attention_back
    backward += 2 * (passes / rates.memory + experts.permute_s) + experts.activation_back_s + experts.biases_back_s
    sinks = sink_passes(e, kind, c)
    forward, backward = forward + sinks[0] / rates.memory, backward + sinks[1] / rates.memory
    copied_s = exchange_copies(e, kind.mixer, c) / rates.memory
    forward, backward = forward + copied_s, backward + copied_s
    if kernels.passes is not None:
        forward += kernels.passes.forward / rates.memory
        backward += kernels.passes.backward / rates.memory + attention  # the forward runs again
    in_torch = _in_torch(e, kind, cluster, rates)
    forward, backward = forward + in_torch.forward_s, backward + in_torch.backward_s
    backward += attention if gathers_documents(e) else 0.0  # its forward runs again
    backward += experts.inputs_s + experts.weights_s + casts[1] / rates.memory

    if shares_memory(e):
        tp = _tp_copied(e, cluster, kind, c, per_number * tokens / e.tp)
    else:
        tp = _tp_exposed(e, cluster, kind, c, matmul + experts.forward_s, products)
    cp_forward, cp_backward = (_cp_exposed_s(e, cluster, kind, attention, backward=turn) for turn in (False, True))
    recompute_s, recompute_exposed_s, named = 0.0, 0.0, e.recomputed_operations
    if e.recompute == "full":
        recompute_s, recompute_exposed_s = forward - of_head, tp.forward_s + experts.dispatch_s + cp_forward
        if kind.norms_outputs or kind.ahead:  # outputs of experts are inputs of a norm
            recompute_exposed_s += experts.combine_s
        if kind.ends_in_product:
            recompute_s -= per_number * tokens * _last_product(kind, hidden) / e.tp
            recompute_exposed_s -= tp.last_sum_s
    elif e.recompute == "selective" and e.compiles(routed=kind.routed, recomputed=True):
        recompute_s = memory
        if e.sequence_parallel and e.tp > 1:
            recompute_exposed_s = tp.gathers_s  # the outputs of reduce-scatters were saved
    elif named:
        recompute_s = sum(one.moved for one in tensors if one.dropped_by in named) / rates.memory
        if "experts" in named:  # all products but the last; no rows are exchanged for it
            recompute_s += 2.0 / 3.0 * experts.forward_s + experts.activation_s + experts.biases_s
        elif "swiglu" in named:
            recompute_s += experts.activation_s
        if "mla_up" in named:
            again = sum(weight.active for weight in _matrices(kind, hidden) if weight.name in latent_up(kind))
            recompute_s += per_number * tokens * again / e.tp
            recompute_exposed_s = tp.latents_s
    others = experts.dispatch_s + experts.combine_s
    if kind.ahead:  # its parts of the look-up and of the head
        op: Collective = "all_gather" if e.sequence_parallel else "all_reduce"
        others += 2 * collective_time_s(op, float(c * tokens * hidden), e.tp, 1, cluster)
    exposed = tp.forward_s + others + cp_forward, tp.backward_s + others + cp_backward
    weight_s = matmul * in_fp8[2] + experts.weights_s
    return LayerTimes(forward, backward, weight_s, *exposed, recompute_s, recompute_exposed_s)


class _Kernels(NamedTuple):
    """What the kernels of a recurrence move."""

    passes: Passes | None
    """As `slowed`; None for other layers, and where torch computes recurrences."""
    replaced: int
    """Bytes of `kind_tensors` that are part of ``passes``."""


def _kernels(e: Experiment, kind: Layer) -> _Kernels:
    if e.recurrence != "fla" or not isinstance(kind.mixer, Kernels):
        return _Kernels(None, 0)
    of_mixer = kind_tensors(kind, Sizes.of(e, COMPUTE_BYTES[e.precision])).mixer
    moved = sum(one.moved for one in of_mixer)
    passes = kernel_passes(kind.mixer, Batch(e.micro_batch_size, e.seq_len), e.tp * e.cp)
    return _Kernels(slowed(passes, kind.mixer, e.engine_version), moved)


def _in_torch(e: Experiment, kind: Layer, cluster: ClusterSpec, rates: Rates) -> TorchPasses:
    """What a recurrence in torch operations adds on a GPU."""
    if e.recurrence != "torch" or cluster.backend == "cpu" or not isinstance(kind.mixer, Kernels):
        return TorchPasses(0.0, 0.0)
    captured = e.cuda_graph != "none" and e.engine == ENGINE
    batch = Batch(e.micro_batch_size, e.seq_len)
    return torch_passes(kind.mixer, batch, e.tp * e.cp, rates.memory, captured=captured)


def _mixed_streams(hidden: int, streams: int) -> int:
    """Numbers by which a token is multiplied to mix the streams of hyper-connections around both parts."""
    mixes = streams * streams + 2 * streams
    return 2 * (mixes * streams * hidden + mixes * hidden) if streams > 1 else 0


class _Products(NamedTuple):
    """Weights of a layer that a token meets in products, without routed experts."""

    split: int
    """Those whose work tensor-parallel ranks divide, with a router's."""
    whole: int
    """Those that each rank's own tokens meet."""
    into_share: float
    """Part of the weights that are divided over ranks whose inputs are gathered."""

    @property
    def weights(self) -> int:
        return self.split + self.whole


@lru_cache(maxsize=4096)
def _matrices(kind: Layer, hidden: int) -> tuple[Weight, ...]:
    return tuple(one for one in kind.weights(hidden) if one.use == "matrix" and one.held != "experts")


@lru_cache(maxsize=4096)
def _products(kind: Layer, hidden: int) -> _Products:
    matrices = _matrices(kind, hidden)
    split = sum(one.active for one in matrices if one.held == "split")
    rows = sum(one.active for one in matrices if one.name in ROW_PARALLEL)
    router = sum(one.active for one in matrices if one.name == "router")
    whole = sum(one.active for one in matrices if one.held == "whole")
    return _Products(split + router, whole - router, (split - rows) / split if split else 0.0)


@lru_cache(maxsize=4096)
def _columns(kind: Layer, hidden: int, tp: int) -> tuple[int, int]:
    """(inputs, outputs): columns of a layer's matrix products on one rank, without routed experts and routers. Products
    with one input are one product, except those of own tokens beside those of all."""
    matrices = [one for one in _matrices(kind, hidden) if one.name != "router"]
    rows = [one for one in matrices if one.name in ROW_PARALLEL]
    whole = [one for one in matrices if one.held == "whole"]
    into = [one for one in matrices if one.held == "split" and one.name not in ROW_PARALLEL]
    inputs = sum(one.inputs for one in rows) // tp + (hidden if whole else 0)
    inputs += sum(kind.mixer.tensor_parallel(hidden).gathered) if kind.mixer is not None else 0
    inputs += hidden if any(one.name in ("up", "shared up") for one in into) else 0
    outputs = sum(one.outputs for one in into) // tp + sum(one.outputs for one in [*rows, *whole])
    return inputs, outputs


class _TensorParallel(NamedTuple):
    """Exposed tensor-parallel communication of one layer, in seconds."""

    forward_s: float
    backward_s: float
    gathers_s: float
    """All-gathers of the forward, with sequence parallelism."""
    latents_s: float
    """Part of ``gathers_s`` for latents, which ``mla_up`` gathers again."""
    last_sum_s: float
    """Sum after the last product of the forward."""


def _tp_exposed(
    e: Experiment, cluster: ClusterSpec, kind: Layer, c: int, matmul_s: float, products: _Products
) -> _TensorParallel:
    """Exposed tensor-parallel communication of one layer (sequence parallelism as in arXiv:2205.05198, section 4.2).

    A column-parallel product's share of the layer's matmul time is also the time of each of its two backward products,
    which hide communication. Nothing hides that of what heads share. A layer with experts counts as one with a dense
    MLP.
    """
    if e.tp == 1:
        return _TensorParallel(0.0, 0.0, 0.0, 0.0, 0.0)

    def time_of(op: Collective, numbers: int) -> float:
        return collective_time_s(op, float(c * rank_tokens(e)[0] * numbers), e.tp, 1, cluster)

    hidden, inputs, shared = e.model.hidden_size, list[int](), 0
    if kind.mixer is not None:
        along = kind.mixer.tensor_parallel(hidden)
        inputs, shared = [*along.gathered], along.shared
    inputs += [hidden] if kind.mlp is not None else []
    sums = (kind.mixer is not None) + (kind.mlp is not None)
    if not inputs:
        return _TensorParallel(0.0, 0.0, 0.0, 0.0, 0.0)
    norms_s = _norms_s(e, cluster, kind)
    overlapping_s, contention = matmul_s * products.into_share / len(inputs), contention_of(e.tp, 1, cluster)

    def longer_s(op: Collective, numbers: int) -> float:
        """Seconds by which a collective delays the product that hides it."""
        return float(together_s(overlapping_s, time_of(op, numbers), contention=contention) - overlapping_s)

    if not e.sequence_parallel:
        reduce = time_of("all_reduce", hidden)
        backward = sum(longer_s("all_reduce", width) for width in inputs)
        backward += time_of("all_reduce", shared) if shared else 0.0
        return _TensorParallel(sums * reduce + norms_s, backward + norms_s, 0.0, 0.0, reduce)
    gather, scatter = time_of("all_gather", hidden), time_of("reduce_scatter", hidden)
    latents = sum(time_of("all_gather", width) for width in inputs if width != hidden)
    gathers = sum(time_of("all_gather", width) for width in inputs)
    backward = sums * gather + sum(longer_s("all_gather", w) + longer_s("reduce_scatter", w) for w in inputs)
    if shared:
        gathers += time_of("all_gather", shared)
        backward += time_of("reduce_scatter", shared)
    return _TensorParallel(gathers + sums * scatter + norms_s, backward + norms_s, gathers, latents, scatter)


def _norms_s(e: Experiment, cluster: ClusterSpec, kind: Layer) -> float:
    """Seconds of the sums of norms over all heads in the forward of one layer, and as many in its backward. Nothing
    overlaps with them."""
    sums = kind.mixer.tensor_parallel(e.model.hidden_size).normed if kind.mixer is not None else 0
    size = float(MASTER_BYTES[e.precision] * rank_tokens(e)[0] * sums)
    return collective_time_s("all_reduce", size, e.tp, 1, cluster) if sums else 0.0


class _Exchanged(NamedTuple):
    """Products of one part of a layer, the mixer or the MLP, whose tokens tensor-parallel ranks exchange."""

    inputs: tuple[int, ...]
    """Widths of the gathered inputs."""
    into: int
    """Numbers of the weights that these enter."""
    rows: int
    """Numbers of the row-parallel weights."""


@lru_cache(maxsize=4096)
def _exchanged(kind: Layer, hidden: int) -> tuple[_Exchanged, ...]:
    parts = []
    for part in (kind.mixer, kind.mlp):
        if part is None:
            continue
        inputs = kind.mixer.tensor_parallel(hidden).gathered if part is kind.mixer and kind.mixer else (hidden,)
        split = [one for one in part.weights(hidden) if one.use == "matrix" and one.held == "split"]
        rows = sum(one.active for one in split if one.name in ROW_PARALLEL)
        if rows:
            parts.append(_Exchanged(inputs, sum(one.active for one in split) - rows, rows))
    return tuple(parts)


def _tp_copied(e: Experiment, cluster: ClusterSpec, kind: Layer, c: int, per_number_s: float) -> _TensorParallel:
    """As `_tp_exposed`, where ranks share memory: each exchange overlaps with its own product, part by part
    (`workloads.engine.collectives.peer_memory`). ``per_number_s``: time of a product for one number of a weight.

    What heads share, and the tokens of experts with ``etp > 1``, are exchanged by collectives.
    """
    hidden, tokens = e.model.hidden_size, rank_tokens(e)[0]

    def time_of(op: Collective, width: int) -> float:
        return collective_time_s(op, float(c * tokens * width), e.tp, 1, cluster)

    gather, scatter = time_of("all_gather", hidden), time_of("reduce_scatter", hidden)
    gathers, latents, sums, backward, last_sum = 0.0, 0.0, 0.0, 0.0, 0.0
    for part in _exchanged(kind, hidden):
        product, rows = per_number_s * part.into / len(part.inputs), per_number_s * part.rows
        for width in part.inputs:
            waits = _waits_s(product, time_of("all_gather", width), e.tp)
            gathers += waits
            latents += waits if width != hidden else 0.0
            # The input is gathered again, and its gradient is summed, beside two products.
            again = time_of("all_gather", width) + time_of("reduce_scatter", width)
            backward += _waits_s(2 * product, again, e.tp)
        last_sum = _waits_s(rows, scatter, e.tp)
        sums += last_sum
        backward += _waits_s(rows, gather, e.tp)
    shared = kind.mixer.tensor_parallel(hidden).shared if kind.mixer is not None else 0
    if shared:
        gathers += time_of("all_gather", shared)
        backward += time_of("reduce_scatter", shared)
    if kind.routed and e.etp > 1:
        gathers, sums, backward = gathers + gather, sums + scatter, backward + gather + scatter
    norms_s = _norms_s(e, cluster, kind)
    return _TensorParallel(gathers + sums + norms_s, backward + norms_s, gathers, latents, last_sum)


def _waits_s(product_s: float, exchange_s: float, ranks: int) -> float:
    """Seconds by which an exchange in ``ranks - 1`` parts delays its product in ``ranks``: one part overlaps with
    one of the other, and either may be the slower one."""
    part_s = product_s / ranks
    late = max(0.0, exchange_s / (ranks - 1) - part_s, exchange_s - (ranks - 1) * part_s)
    return late + COPIES_SLOW * (exchange_s - late)


def _cp_exposed_s(e: Experiment, cluster: ClusterSpec, kind: Layer, attention_s: float, *, backward: bool) -> float:
    """Exposed context-parallel communication of one layer. ``attention_s``: its mixing's forward."""
    total, hidden_by = 0.0, 0.0
    for message in context_messages_of(
        e, kind, COMPUTE_BYTES[e.precision], MASTER_BYTES[e.precision], backward=backward
    ):
        op: Collective = "p2p" if message.op == "send" else message.op
        # Collectives are given the whole buffer, including this rank's own part.
        whole = message.bytes_each if op == "p2p" else message.bytes_each * e.cp / (e.cp - 1)
        total += message.calls * collective_time_s(op, whole, e.cp, stride(e, "cp"), cluster)
        hidden_by = attention_s if op == "p2p" else 0.0
    return max(0.0, total - (ATTENTION_BACKWARD if backward else 1.0) * hidden_by)
