"""Builds one rank's engine, with the same steps in the same order for every model and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workloads.costs.shape.partition import experiment_layers, recompute_by_layer
from workloads.costs.shape.schedule import SPLIT_BACKWARD
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import ParameterSpec, initialise
from workloads.engine.collectives.peer_memory import PeerMemory, open_peer_memory
from workloads.engine.kind_ops import linear_kernels
from workloads.engine.layers.ahead import AheadBlock
from workloads.engine.layers.recompute import apply_recompute
from workloads.engine.layers.transformer import Chunk, replace_blocks, routers
from workloads.engine.ops import flash4
from workloads.engine.ops.attention import choose_flash4
from workloads.engine.training.activation_offload import ActivationStore, OffloadedBlock
from workloads.engine.training.clock import Clock
from workloads.engine.training.data import Source
from workloads.engine.training.data_parallel import apply_data_parallel, fp8_scaling, master_dtype, update_dtype
from workloads.engine.training.optimizer import ShardedOptimizer
from workloads.engine.training.pipeline import Pipeline
from workloads.spec.activations.offload import last_layer_stays, offloaded_words
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.recurrent_kernels import keys_with_one_decay
from workloads.spec.weights import routed


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank's part of a training run."""

    experiment: Experiment
    groups: Groups
    chunks: list[Chunk]
    """This rank's model chunks, in the order of their stages: one, or ``virtual_stages`` of them."""
    optimizer: ShardedOptimizer
    pipeline: Pipeline
    clock: Clock
    source: Source | None = None
    """Source of the training sequences; None for synthetic tokens."""
    peers: PeerMemory | None = None
    """Memory that tensor-parallel ranks share."""

    @property
    def store(self) -> ActivationStore | None:
        """Where activations wait on the host; None without ``activation_offload``."""
        return self.chunks[0].store

    def host_tensors(self) -> list[Tensor]:
        """Every tensor on the host: states of the optimizer, and buffers of activations."""
        return [*self.optimizer.host_tensors(), *(self.store.tensors() if self.store is not None else [])]


def shape_chunks(experiment: Experiment, groups: Groups) -> list[Chunk]:
    """Build this rank's sharded chunks on the meta device: pipeline split → TP, CP → recompute → compile → data
    parallel."""
    store = ActivationStore(groups.device) if experiment.activation_offload != "none" else None
    return [_shape(experiment, groups, groups.stage_of(chunk), store) for chunk in range(experiment.virtual_stages)]


def _shape(experiment: Experiment, groups: Groups, stage: int, store: ActivationStore | None) -> Chunk:
    with torch.device("meta"):
        chunk = Chunk(experiment, groups, stage).to(update_dtype(experiment))
        for parameter in chunk.parameters():  # not of buffers: those that routers keep are updated in small steps, too
            parameter.data = parameter.data.to(master_dtype(experiment))
        if experiment.precision != "fp64":
            chunk.round_tables(torch.float32)
    if (scaling := fp8_scaling(experiment)) is not None:
        chunk.use_fp8(scaling)
    blocks: list[nn.Module] = []
    words = recompute_by_layer(experiment)
    for layer, block in zip(experiment_layers(experiment)[stage], chunk.blocks, strict=True):
        recompute = words[layer]
        compiled = experiment.compiles(routed=routed(experiment.model, layer), recomputed=recompute != "none")
        compiled = compiled and not isinstance(block, AheadBlock)
        splits = experiment.pp_schedule in SPLIT_BACKWARD
        blocks.append(apply_recompute(block, recompute, compiled=compiled, splits=splits))
        if compiled:
            blocks[-1].compile()
    if store is not None:
        of_blocks = [words[layer] for layer in experiment_layers(experiment)[stage]]
        blocks = _offloaded(experiment, chunk, blocks, of_blocks, store)
    replace_blocks(chunk, blocks)
    apply_data_parallel(chunk, groups)
    return chunk


def _offloaded(
    experiment: Experiment, chunk: Chunk, blocks: list[nn.Module], recompute: list[str], store: ActivationStore
) -> list[nn.Module]:
    """``recompute``: the word of each block."""
    chunk.store = store
    found: list[nn.Module] = []
    for place, (block, word) in enumerate(zip(blocks, recompute, strict=True)):
        stays = chunk.is_last and place == len(blocks) - 1 and last_layer_stays(experiment.pp_schedule)
        words = () if stays else offloaded_words(experiment.activation_offload, word)
        input_stays = place == 0 and not chunk.is_first
        found.append(OffloadedBlock(block, store, words, is_first=place == 0, input_stays=input_stays))
    return found


def build(
    experiment: Experiment,
    groups: Groups,
    learning_rate: Callable[[int], float] | None = None,
    source: Source | None = None,
) -> Engine:
    """Build the sharded chunks, allocate them on the device and fill them with the seed's weights.

    ``learning_rate``: the rate of each update, counted from 0; None for the one small rate of a sweep's runs.
    ``source``: the training sequences; None for synthetic tokens.
    """
    chunks = shape_chunks(experiment, groups)

    def place(spec: ParameterSpec) -> tuple[int, int]:
        group = groups.mesh_of(spec.placement).get_group("shard")
        return group.size(), group.rank()

    for chunk in chunks:
        chunk.to_empty(device=groups.device)
        chunk.fill_buffers()
        initialise(chunk, experiment.seed, groups.axes, place)
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()  # initialisation used more than training reserves
    engine = assemble(experiment, groups, chunks, learning_rate, source)
    if groups.device.type == "cuda" and experiment.pp > 1 and not groups.is_rehearsal:
        engine.pipeline.prepare()
    return engine


def assemble(
    experiment: Experiment,
    groups: Groups,
    chunks: list[Chunk],
    learning_rate: Callable[[int], float] | None = None,
    source: Source | None = None,
) -> Engine:
    """Make the engine from chunks that are already built; see `build`."""
    clock = Clock(groups.device)
    for chunk in chunks[1:]:  # the tables of places are equal: one copy is enough
        for name, table in chunks[0].named_buffers(recurse=False):
            setattr(chunk, name, table)
    peers = open_peer_memory(experiment, groups.axes["tp"], groups.device)
    if peers is not None and peers.is_open:
        for chunk in chunks:
            chunk.exchange_through(peers)
    optimizer = ShardedOptimizer(chunks, groups, learning_rate)
    if optimizer.loss_scale is not None:
        for chunk in chunks:
            if chunk.head is not None:
                chunk.head.loss_scale = optimizer.loss_scale.value
            for router in routers(chunk):
                router.loss_scale = optimizer.loss_scale.value
    return Engine(experiment, groups, chunks, optimizer, Pipeline(chunks, groups, clock), clock, source, peers)


def choose_attention(experiment: Experiment) -> None:
    """Set the kernels of attention of this process: torch's back ends, or FlashAttention-4; and those of recurrences.

    ``auto`` uses cuDNN on Hopper and newer GPUs in the 16-bit precisions and for the sizes of heads that it has kernels
    for (multiples of 8 up to 256), otherwise torch's default order. Raises `UnsupportedByEngine` if FlashAttention-4 is
    chosen and cannot run here.
    """
    backends = {
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "flash": torch.backends.cuda.enable_flash_sdp,
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    chosen: str = experiment.attention
    if chosen == "auto":
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        mla = experiment.model.mla
        sizes = (mla.qk_head_dim, mla.v_head_dim) if mla is not None else (experiment.model.head_dim,)
        fits = all(size % 8 == 0 and size <= 256 for size in sizes)
        chosen = "cudnn" if hopper and fits and experiment.precision not in ("fp32", "fp64") else "all"
    runs_flash4 = chosen == "flash4" and torch.cuda.is_available()  # a CPU rehearses it with a kernel of torch
    if runs_flash4 and (reason := flash4.unusable()) is not None:
        raise UnsupportedByEngine(f"attention=flash4: {reason}; or use attention=auto")
    choose_flash4(chosen=runs_flash4)
    for name, enable in backends.items():
        enable(chosen in (name, "all", "flash4"))
    _choose_recurrence(experiment)


def _choose_recurrence(experiment: Experiment) -> None:
    """Set what computes recurrent layers in this process. Raises `UnsupportedByEngine` for kernels that cannot run."""
    chosen = experiment.recurrence == "fla"  # without a GPU their memory is traced, or the plain formulas run
    if chosen and torch.cuda.is_available():
        reason = linear_kernels.unusable(keys_with_one_decay(experiment.model))
        if reason is not None:
            raise UnsupportedByEngine(f"recurrence=fla: {reason}; or use recurrence=torch")
    linear_kernels.choose_kernels(chosen=chosen)
