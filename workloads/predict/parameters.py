"""Parameters of the time model that differ from code base to code base and from cluster to cluster.

Each is positive and has a default value with a spread (standard deviation of its logarithm): a fit starts from the
default and is penalized for leaving it.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.predict.profiles import Profile


class Parameter(NamedTuple):
    value: float
    spread: float
    """Standard deviation of the logarithm."""
    meaning: str


TIME: dict[str, Parameter] = {
    "matmul": Parameter(0.73, 0.12, "share of peak that matrix products reach at large sizes"),
    "tokens": Parameter(250.0, 0.7, "tokens at which short products take twice as long"),
    "width": Parameter(80.0, 0.7, "hidden size over tp at which narrow products take twice as long"),
    "attention": Parameter(0.58, 0.25, "share of peak that causal attention reaches at head size 128, long sequences"),
    "short": Parameter(700.0, 0.5, "tokens of a sequence at which attention takes twice as long"),
    "head_size": Parameter(0.35, 0.4, "exponent: attention slows as (128 / head size) to this power"),
    "odd_head": Parameter(1.15, 0.1, "attention's time with heads whose size is no power of two"),
    "memory": Parameter(0.75, 0.3, "share of memory bandwidth of norms, RoPE, SwiGLU, residuals and the loss"),
    "loss": Parameter(22.0, 0.5, "bytes moved for a logit by the loss, forward and backward"),
    "accumulate": Parameter(1.0, 0.5, "gradient accumulation over its bytes at full memory bandwidth"),
    "optimizer": Parameter(1.5, 0.4, "optimizer over its bytes at full memory bandwidth"),
    "rest": Parameter(0.1, 0.5, "exponent: products take the share of a step in which a stage works to this power"),
    "step_fixed": Parameter(0.012, 0.7, "seconds a step, whatever its size; none if steps in 16 bits are CUDA graphs"),
    "micro_fixed": Parameter(0.0015, 1.0, "seconds a micro-batch and stage; none if steps in 16 bits are CUDA graphs"),
    "gap": Parameter(0.00012, 1.0, "seconds a layer and micro-batch between kernels; none as above"),
    "host": Parameter(0.00205, 0.4, "host's seconds to launch a layer, forward and backward"),
    "host_tp": Parameter(0.0014, 0.5, "more with tensor parallelism"),
    "host_zero3": Parameter(0.00195, 0.5, "more with ZeRO 3"),
    "host_cp": Parameter(0.0015, 0.5, "more with context parallelism, once or for each turn of a ring"),
    "host_selective": Parameter(0.0009, 0.5, "more with selective recomputation"),
    "host_full": Parameter(0.00155, 0.5, "more with full recomputation"),
    "host_step": Parameter(0.0001, 1.0, "seconds a layer, once a step, for gradients and the optimizer"),
    "host_fp8": Parameter(0.7, 0.5, "share more of ``host`` with fp8, whose casts are kernels of their own"),
    "host_experts": Parameter(0.8, 0.5, "share more with routed experts"),
    "host_fp8_experts": Parameter(1.0, 0.5, "share more with fp8 experts, whose products each need casts and scales"),
    "host_latents": Parameter(1.0, 0.5, "share more with latent attention"),
    "host_waits": Parameter(0.003, 0.7, "more where the host waits for the device's routing counts, layer by layer"),
    "host_launch": Parameter(2.0, 0.3, "exponent: how the host's time grows with the time of one launch"),
    "slow_host": Parameter(0.007, 0.5, "seconds a layer and micro-batch with tp 2 in a slow host regime"),
    "slow_growth": Parameter(0.9, 0.4, "exponent of the doublings of tp in ``slow_host``"),
    "slow_between": Parameter(0.8, 0.4, "exponent of the nodes that tp spans in ``slow_host``"),
    "sharded": Parameter(1.0, 0.4, "traffic of sharded gradients and weights over its bytes"),
    "gather_exposed": Parameter(0.6, 0.5, "share of weight gathering that is exposed"),
    "nvlink": Parameter(0.88, 0.15, "share of a node's links that gathers and scatters reach"),
    "network": Parameter(0.9, 0.3, "share of the links between nodes that gathers and scatters reach"),
    "network_measured": Parameter(
        1.0,
        0.3,
        "exponent: weight of a job's measured all-reduce, against the links' nominal rate, for the rate between nodes",
    ),
    "tp_start": Parameter(0.00003, 0.7, "seconds to start a tensor-parallel collective, a hop of a ring"),
    "tp_between": Parameter(0.0001, 1.0, "seconds a collective more for each further node that it spans"),
    "tp_exposed": Parameter(0.75, 0.3, "share of tensor-parallel traffic that is exposed"),
    "dp_exposed": Parameter(0.25, 0.6, "share of gradient traffic that is exposed although a backward could hide it"),
    "dp_start": Parameter(0.0003, 1.0, "seconds a layer and doubling of the ranks to start a gradient reduction"),
    "ring_start": Parameter(
        0.00003,
        1.0,
        "seconds a collective and hop of a ring that shards gradients or gathers weights",
    ),
    "slow_down": Parameter(0.08, 0.7, "seconds of compute lost per second of overlapping traffic"),
    "hidable": Parameter(0.6, 0.4, "share of the last backward that gradient traffic can hide behind"),
    "message": Parameter(0.0005, 1.0, "seconds of a pipeline message, without its bytes"),
    "slow_message": Parameter(0.02, 1.0, "same between nodes, in versions whose profile lists them as slow"),
    "p2p": Parameter(0.8, 0.5, "share of a link that pipeline messages reach"),
    "fp16": Parameter(1.0, 0.03, "rate of products in fp16 over bf16"),
    "fp8": Parameter(0.85, 0.2, "rate of fp8 products over that expected from 16-bit products"),
    "fp8_scales": Parameter(0.78, 0.15, "factor on ``fp8`` with a scale for each row or block"),
    "block_formats": Parameter(0.9, 0.4, "factor on ``fp8`` of mxfp8 and nvfp4, whose scales tensor cores apply"),
    "context": Parameter(0.5, 0.6, "share of context-parallel traffic that is exposed"),
}
"""Defaults and spreads before any row is seen; a code base's profile may override the values."""


OF_ENGINES: dict[str, Parameter] = {
    "passes": Parameter(1.5, 0.25, "bytes that the small operations of an eager layer move, over those of fused ones"),
    "compiled_passes": Parameter(1.0, 0.2, "same for a compiled layer"),
    "compiled_loss": Parameter(0.5, 0.3, "bytes moved for a logit if the loss is compiled, over ``loss``"),
    "compiled_host": Parameter(0.6, 0.4, "host's seconds to launch a compiled layer, over those of an eager one"),
    "fp8_sharded": Parameter(
        0.002, 0.7, "seconds a layer and micro-batch, of host and device, to scale and cast sharded fp8 weights"
    ),
    "cast": Parameter(12.0, 0.3, "bytes a parameter and micro-batch to cast fp32 weights and their gradients"),
}
"""Parameters of the profiles of other engines, in addition to `TIME`."""


SAME_KERNELS = 0.5
"""Factor on the spreads of `TIME` for other engines: they launch kernels of torch, whose rates are known from rows of
this project's engine."""
OF_HOSTS = tuple(name for name in TIME if name.startswith("host") and name != "host_launch")
"""Parameters of `TIME` for the host work of a code base, which is the same on every cluster."""
NO_HOST = dict.fromkeys((*OF_HOSTS, "slow_host"), 0.0)
"""Values of `TIME` for hosts that launch in no time."""


def time_parameters(profile: Profile) -> dict[str, Parameter]:
    """`TIME` with the values of a profile, and its factor on the spreads of host work; with `OF_ENGINES` for another
    engine than this project's."""
    doubt = dict.fromkeys(OF_HOSTS, profile.host_spread)
    known = SAME_KERNELS if profile.engine else 1.0
    return {
        name: one._replace(
            value=profile.time.get(name, one.value),
            spread=one.spread * doubt.get(name, 1.0) * (known if name in TIME else 1.0),
        )
        for name, one in (TIME | OF_ENGINES if profile.engine else TIME).items()
    }
