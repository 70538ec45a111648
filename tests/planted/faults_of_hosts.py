"""Faults of what is on the host: read before its copy came, overwritten while it is needed, or never back."""

from __future__ import annotations

from tests.planted.faults import CLIPPED, DP, ENGINE, faults_of

_HOST = ENGINE + "training.host_optimizer:"
_UPDATE = _HOST + "HostAdamW.update"
_STORE = ENGINE + "training.activation_offload:"
_AWAY = {**DP, "zero_stage": 3, "activation_offload": "all"}
_HALF = {**DP, "zero_stage": 1, "optimizer_offload": 0.5}
HOSTS = [
    *faults_of(
        "host",
        (
            "weight_not_copied_back",
            "weights of the host never come back",
            _UPDATE,
            "self.up.launch(piece.weight, self._weights[piece.at])",
            "pass",
            _HALF,
        ),
        (
            "host_counts_twice",
            "the host counts its updates twice",
            _UPDATE,
            "self._step.add_(1.0 - skip)",
            "self._step.add_(2.0 - skip)",
            _HALF,
        ),
        (
            "host_gradient_elsewhere",
            "the host gets gradients of other elements",
            _HOST + "HostAdamW.start_copies",
            "[piece.first : piece.first + piece.weight.numel()]",
            "[: piece.weight.numel()]",
            _HALF,
        ),
    ),
    *faults_of(
        "host",
        (
            "host_does_not_clip",
            "the host does not clip gradients",
            _HOST + "update_on_host",
            "gradient.mul_(factor)",
            "pass",
            {**CLIPPED, "optimizer_offload": 1.0},
        ),
        scale=1000.0,
        steps=2,
    ),
    *faults_of(
        "copies",
        (
            "gradient_before_its_copy",
            "a gradient is read before its copy",
            _UPDATE,
            "self.down.wait(number)",
            "pass",
            _HALF,
        ),
        (
            "factor_before_its_copy",
            "the factor is read before its copy",
            _UPDATE,
            "self.control.wait(self._last)",
            "pass",
            _HALF,
        ),
        (
            "weights_before_their_copy",
            "weights are used before their copy",
            _UPDATE,
            "self.up.join()",
            "pass",
            _HALF,
        ),
        check="late_copies",
    ),
    *faults_of(
        "copies",
        (
            "half_of_the_share",
            "the host gets half of what was given to it",
            _HOST + "kept_elements",
            "int(share * elements)",
            "int(0.5 * share * elements)",
            _HALF,
        ),
        check="share_of_host",
    ),
    *faults_of(
        "copies",
        (
            "activation_before_its_copy",
            "an activation is read before it is back from the host",
            _STORE + "ActivationStore.join",
            "self.up.join()",
            "pass",
            _AWAY,
        ),
        (
            "activation_gone_before_its_copy",
            "nobody waits for copies of activations to the host",
            _STORE + "ActivationStore.finish",
            "self.down.join()",
            "pass",
            _AWAY,
        ),
        check="late_activations",
    ),
    *faults_of(
        "host",
        (
            "buffer_still_needed",
            "a buffer of activations is overwritten while another tensor needs it",
            _STORE + "ActivationStore._take",
            "return free.pop()",
            "return free[0]",
            _AWAY,
        ),
        (
            "other_part_of_an_activation",
            "views of activations from the host begin at their storage's first element",
            _STORE + "_Handle.move",
            "tensor.storage_offset()",
            "0",
            _AWAY,
        ),
    ),
]
