#!/usr/bin/env bash
# optax 0.2.8, jax 0.10.2, CPU. Muon of optax takes a scanned model's norms for matrices, and its matrices for none.
#
# Expected: whether layers are written one after another or stacked for `jax.lax.scan`, as large models are for the sake of the
# compiler, changes no training: `optax.contrib.muon` orthogonalizes the updates of weight matrices, and Adam has the rest.
# Behaviour: what is a matrix is told by the number of dimensions. The stack of all layers' matrices has three and goes to Adam; the
# stack of their norms (or biases) has two, is taken for one matrix of layers by width, and is orthogonalized across the layers.
# So of a whole model only embedding and head, which Muon is not meant for, and the norms are under Muon. At a learning rate of
# Muon the matrices take Adam's steps: 13 times as long as Muon's at width 64, and growing as the root of the width. AdamW does
# the same in both. Nothing is reported. `muon_weight_dimension_numbers` with the axes of each weight gives the stack the updates
# of its layers. Transformations that compare a weight with its gradient (LARS, adaptive clipping) mix the layers of a stack, too:
# they are led by the layer with the largest gradients, and one with a hundredth of them takes a sixtieth of its own step.
# Who meets it: a scanned model of flax or equinox whose AdamW is replaced by Muon, and a comparison of the two that follows.
#
# Output of 2026-11-30 (8 layers of width 64, whose gradients fall from 1 to 0.01. Lengths: of the first update of the stack over
# that of the same layers one by one, in the first and the last layer. Spread: largest over smallest singular value of the update
# of the first matrix, which Muon makes small):
#   adamw: lengths of matrix 1 1, lengths of norm 1 1, spread of matrix 2.3e+02
#   muon: lengths of matrix 13 14, lengths of norm 0.19 0.27, spread of matrix 2.3e+02
#   muon told the axes: lengths of matrix 1 1, lengths of norm 1 1, spread of matrix 3.4
#   lars: lengths of matrix 1.7 0.017, lengths of norm 1.7 0.016, spread of matrix 3.3e+02
#   sgd, adaptive_grad_clip: lengths of matrix 1.5 0.023, lengths of norm 1.6 0.024, spread of matrix 1.9e+02
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 numpy==2.2.6 2>/dev/null
cat >"$folder/scanned.py" <<'PYTHON'
import jax
import jax.numpy as jnp
import optax

LAYERS, WIDTH = 8, 64
AXES = {"matrix": optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2), "norm": None}
OPTIMIZERS = {
    "adamw": optax.adamw(0.002),
    "muon": optax.contrib.muon(0.02),
    "muon told the axes": optax.contrib.muon(0.02, muon_weight_dimension_numbers=AXES),
    "lars": optax.lars(0.02),
    "sgd, adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.02)),
}


def normal(seed, *shape):
    return jax.random.normal(jax.random.PRNGKey(seed), shape)


def apart(stack):
    return [jax.tree.map(lambda leaf: leaf[at], stack) for at in range(LAYERS)]


def length(leaf):
    return float(jnp.linalg.norm(leaf))


def spread(matrix):
    """Largest over smallest singular value."""
    values = jnp.linalg.svd(matrix, compute_uv=False)
    return float(values[0] / values[-1])


stack = {"matrix": normal(2, LAYERS, WIDTH, WIDTH) / WIDTH**0.5, "norm": jnp.ones((LAYERS, WIDTH))}
sizes = jnp.linspace(1.0, 0.01, LAYERS)
gradients = {"matrix": normal(3, LAYERS, WIDTH, WIDTH) * sizes[:, None, None], "norm": normal(4, LAYERS, WIDTH) * sizes[:, None]}
for name, optimizer in OPTIMIZERS.items():
    update = optimizer.update(gradients, optimizer.init(stack), stack)[0]
    single = OPTIMIZERS["muon"] if name == "muon told the axes" else optimizer
    each = [single.update(g, single.init(w), w)[0] for g, w in zip(apart(gradients), apart(stack))]
    lengths = [[length(apart(update)[at][leaf]) / length(each[at][leaf]) for at in (0, -1)] for leaf in stack]
    texts = [f"lengths of {leaf} {first:.2g} {last:.2g}" for leaf, (first, last) in zip(stack, lengths)]
    print(f"{name}: {', '.join(texts)}, spread of matrix {spread(apart(update)[0]['matrix']):.2g}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/scanned.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
adamw: lengths of matrix 1 1, lengths of norm 1 1, spread of matrix 2.3e+02
muon: lengths of matrix 13 14, lengths of norm 0.19 0.27, spread of matrix 2.3e+02
muon told the axes: lengths of matrix 1 1, lengths of norm 1 1, spread of matrix 3.4
lars: lengths of matrix 1.7 0.017, lengths of norm 1.7 0.016, spread of matrix 3.3e+02
sgd, adaptive_grad_clip: lengths of matrix 1.5 0.023, lengths of norm 1.6 0.024, spread of matrix 1.9e+02
EXPECTED
