"""Faults of what is on the host: read before its copy came, overwritten while it is needed, or never back."""

from __future__ import annotations

from tests.planted.faults import CLIPPED, DP, ENGINE, faults_of

_HOST = ENGINE + "training.streamed_moments:"
_UPDATE = _HOST + "StreamedAdamW.launch"
_STORE = ENGINE + "training.activation_offload:"
_AWAY = {**DP, "zero_stage": 3, "activation_offload": "all"}
_HALF = {**DP, "zero_stage": 1, "optimizer_offload": 0.5}
HOSTS = [
    *faults_of(
        "host",
        (
            "moments_not_copied_back",
            "moments never go back to the host",
            _UPDATE,
            "self.down.launch(self._on_host(number), self._room(number))",
            "pass",
            _HALF,
        ),
        (
            "host_counts_twice",
            "the streamed part counts its updates twice",
            _UPDATE,
            "count_step([self._step], skip)",
            "count_step([self._step, self._step], skip)",
            _HALF,
        ),
        (
            "streamed_gradient_elsewhere",
            "the streamed part gets gradients of other elements",
            _UPDATE,
            "flat[run.shard][of_shard]",
            "flat[run.shard][: run.size]",
            _HALF,
        ),
        steps=3,
    ),
    *faults_of(
        "host",
        (
            "streamed_is_not_clipped",
            "gradients of the streamed part are not clipped",
            _UPDATE,
            "self._step, factor, skip, numbers",
            "self._step, torch.ones_like(factor), skip, numbers",
            {**CLIPPED, "optimizer_offload": 1.0},
        ),
        scale=1000.0,
        steps=2,
    ),
    *faults_of(
        "copies",
        (
            "moments_before_their_copy",
            "moments are read before their copy",
            _UPDATE,
            "self.up.join(number)",
            "pass",
            _HALF,
        ),
        (
            "room_before_it_is_free",
            "moments come where others have not left yet",
            _UPDATE,
            "self.up.follow(self.down)",
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
