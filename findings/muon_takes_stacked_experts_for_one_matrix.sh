#!/usr/bin/env bash
# pytorch_optimizer 4.1.0, heavyball 3.2.1, muon-optimizer 0.1.0, torch 2.13.0. Muon of experts in one tensor: one matrix, or many.
#
# Expected: a mixture that keeps the experts of a layer in one tensor, experts x out x in (torchtitan, transformers 5), is the same
# model as one with a module for each expert, and has the same updates under Muon: those of each expert's matrix.
# Behaviour: it depends on the package. muon-optimizer orthogonalizes each expert. torch's refuses the tensor.
# pytorch_optimizer and heavyball flatten all dimensions but the first, as for convolutions: experts are the rows of one matrix and
# their updates are made orthogonal to one another. An expert's step is then shorter by about the root of its smaller dimension (5.6
# times at 32, 28 at 768), and it is its gradient almost as it was: the directions in which the gradient is small, which Muon
# exists to raise, stay small. Nothing is reported. Splitting the tensor into one parameter an expert is right everywhere.
# Who meets it: training or fine-tuning a mixture of experts by one of the packages' Muon, where the experts'
# learning rate is a fraction of the one that the dense weights have.
#
# Output of 2026-11-30 (matrices of 32 x 64, first step. Length: of an expert's step in the stack beside that of its matrix alone;
# share: of the step's four largest directions of 32 in its square, which is 0.8 in the gradient and 0.1 where all are alike):
#   8 experts, muon-optimizer: length the same, share 0.2, alone 0.2
#   8 experts, torch: ValueError, Muon only supports 2D parameters
#   8 experts, pytorch_optimizer: length under a quarter, share 0.8, alone 0.2
#   8 experts, heavyball: length under a quarter, share 0.8, alone 0.2
#   64 experts, muon-optimizer: length the same, share 0.2, alone 0.2
#   64 experts, torch: ValueError, Muon only supports 2D parameters
#   64 experts, pytorch_optimizer: length under a quarter, share 0.8, alone 0.2
#   64 experts, heavyball: length under a quarter, share 0.8, alone 0.2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages=(torch==2.13.0 numpy==2.4.6 pytorch_optimizer==4.1.0 heavyball==3.2.1 muon-optimizer==0.1.0)
"$folder/venv/bin/pip" install --quiet "${packages[@]}" 2>/dev/null
cat >"$folder/experts.py" <<'PYTHON'
import heavyball
import muon
import pytorch_optimizer
import torch

OUT, IN = 32, 64
OPTIMIZERS = {
    "muon-optimizer": lambda weights: muon.SingleDeviceMuon(weights, lr=0.02),
    "torch": lambda weights: torch.optim.Muon(weights, lr=0.02, weight_decay=0.0),
    "pytorch_optimizer": lambda weights: pytorch_optimizer.Muon([{"params": weights, "use_muon": True}], lr=0.02),
    "heavyball": lambda weights: heavyball.Muon(weights, lr=0.02),
}


def steps(made, gradients):
    weights = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    optimizer = made(weights)
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient.clone()
    optimizer.step()
    return [weight.detach() for weight in weights]


def share(matrix):
    """The share of the squares of the four largest singular values in all of them."""
    squares = torch.linalg.svdvals(matrix) ** 2
    return f"{squares[:4].sum() / squares.sum():.1f}"


def gradient(seed):
    """A matrix whose singular values fall from 1 to 1/1000."""
    torch.manual_seed(seed)
    left, _, right = torch.linalg.svd(torch.randn(OUT, IN), full_matrices=False)
    return left @ torch.diag(torch.logspace(0, -3, OUT)) @ right


for experts in (8, 64):
    gradients = torch.stack([gradient(seed) for seed in range(experts)])
    for name, made in OPTIMIZERS.items():
        alone = steps(made, [gradients[0]])[0]
        try:
            stacked = steps(made, [gradients])[0][0]
        except ValueError as error:
            print(f"{experts} experts, {name}: ValueError, {str(error).split(' whereas')[0]}", flush=True)
            continue
        ratio = stacked.norm() / alone.norm()
        length = "the same" if abs(ratio - 1) < 0.01 else "under a quarter" if ratio < 0.25 else f"{ratio:.2f} of it"
        print(f"{experts} experts, {name}: length {length}, share {share(stacked)}, alone {share(alone)}", flush=True)
PYTHON
TORCHDYNAMO_DISABLE=1 "$folder/venv/bin/python" "$folder/experts.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
8 experts, muon-optimizer: length the same, share 0.2, alone 0.2
8 experts, torch: ValueError, Muon only supports 2D parameters
8 experts, pytorch_optimizer: length under a quarter, share 0.8, alone 0.2
8 experts, heavyball: length under a quarter, share 0.8, alone 0.2
64 experts, muon-optimizer: length the same, share 0.2, alone 0.2
64 experts, torch: ValueError, Muon only supports 2D parameters
64 experts, pytorch_optimizer: length under a quarter, share 0.8, alone 0.2
64 experts, heavyball: length under a quarter, share 0.8, alone 0.2
EXPECTED
