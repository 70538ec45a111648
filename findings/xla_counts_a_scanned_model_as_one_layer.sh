#!/usr/bin/env bash
# jax 0.10.2, CPU. `cost_analysis()` counts a loop's body once: a scanned model has the FLOPs of one layer, whatever its depth.
#
# Expected: the FLOPs of a compiled step are those that it computes. How layers are written (one after another, or by
# `jax.lax.scan` over stacked weights, as large models are for the sake of the compiler) is a matter of compile time; so is a loop
# over micro-batches.
# Behaviour: the body of a loop is counted once, though its number of turns is a constant of the program. A scanned stack of 32
# layers has the count of one layer's backward and forward, 1/32 of what the unrolled stack has, and 16 accumulated micro-batches
# have the count of one. The two multiply. Before compilation the program of all devices is counted, after it that of one, under
# the same key; with several devices the two differ by their number and neither says which it is. Bytes have it, too.
# Who meets it: MFU and roofline figures of JAX training that ask the compiler for the FLOPs of a step. (Reported and open:
# jax-ml/jax#18672.)
#
# Output of 2026-11-30 (in products of 64 x 512 by 512 x 512; the rest is tanh and sums):
#   gradient of 2 layers, unrolled: computed 5, lowered 5, compiled 5
#   gradient of 2 layers, scanned: computed 5, lowered 3, compiled 3
#   gradient of 8 layers, unrolled: computed 23, lowered 23, compiled 23
#   gradient of 8 layers, scanned: computed 23, lowered 3, compiled 3
#   gradient of 32 layers, unrolled: computed 95, lowered 103, compiled 103
#   gradient of 32 layers, scanned: computed 95, lowered 3, compiled 3
#   4 layers, 1 micro-batches: computed 11, lowered 11, compiled 11
#   4 layers, 16 micro-batches: computed 176, lowered 11, compiled 11
#   4 layers, rows over 4 devices: computed 11 on all devices, lowered 11, compiled 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.2.6 2>/dev/null
cat >"$folder/count.py" <<'PYTHON'
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ROWS, WIDTH = 64, 512


def layer(hidden, weight):
    return jnp.tanh(hidden @ weight), None


def unrolled(weights, hidden):
    for weight in weights:
        hidden, _ = layer(hidden, weight)
    return hidden.sum()


def scanned(weights, hidden):
    return jax.lax.scan(layer, hidden, weights)[0].sum()


def accumulated(weights, batches):
    """Gradients of micro-batches, added up in a loop as train steps do it."""

    def add(total, batch):
        return total + jax.grad(unrolled)(weights, batch), None

    return jax.lax.scan(add, jnp.zeros_like(weights), batches)[0]


def told(what, function, products, *arguments):
    """Counted products of ROWS x WIDTH by WIDTH x WIDTH, before and after compilation, beside those that are computed."""
    lowered = jax.jit(function).lower(*arguments)
    counted = [each.cost_analysis()["flops"] / (2 * ROWS * WIDTH * WIDTH) for each in (lowered, lowered.compile())]
    print(f"{what}: computed {products}, lowered {counted[0]:.0f}, compiled {counted[1]:.0f}", flush=True)


def weights(layers):
    return jnp.ones((layers, WIDTH, WIDTH))


hidden = jnp.ones((ROWS, WIDTH))
for layers in (2, 8, 32):
    told(f"gradient of {layers} layers, unrolled", jax.grad(unrolled), 3 * layers - 1, weights(layers), hidden)
    told(f"gradient of {layers} layers, scanned", jax.grad(scanned), 3 * layers - 1, weights(layers), hidden)
for micro_batches in (1, 16):
    batches = jnp.ones((micro_batches, ROWS, WIDTH))
    told(f"4 layers, {micro_batches} micro-batches", accumulated, 11 * micro_batches, weights(4), batches)
mesh = Mesh(jax.devices(), ("data",))
whole = jax.device_put(weights(4), NamedSharding(mesh, PartitionSpec()))
rows = jax.device_put(hidden, NamedSharding(mesh, PartitionSpec("data")))
told("4 layers, rows over 4 devices", jax.grad(unrolled), "11 on all devices", whole, rows)
PYTHON
"$folder/venv/bin/python" "$folder/count.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
gradient of 2 layers, unrolled: computed 5, lowered 5, compiled 5
gradient of 2 layers, scanned: computed 5, lowered 3, compiled 3
gradient of 8 layers, unrolled: computed 23, lowered 23, compiled 23
gradient of 8 layers, scanned: computed 23, lowered 3, compiled 3
gradient of 32 layers, unrolled: computed 95, lowered 103, compiled 103
gradient of 32 layers, scanned: computed 95, lowered 3, compiled 3
4 layers, 1 micro-batches: computed 11, lowered 11, compiled 11
4 layers, 16 micro-batches: computed 176, lowered 11, compiled 11
4 layers, rows over 4 devices: computed 11 on all devices, lowered 11, compiled 3
EXPECTED
