"""A node of the lab on real GPUs has only its own devices, since Slurm counts those of every node from 0."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.lab.lab import why_not

SCRIPT = Path(__file__).with_name("lab") / "own_gpus.sh"
DEV_OF_FOUR = """
mount -t tmpfs none /dev && mknod /dev/null c 1 3 || exit 1
for name in nvidia0 nvidia1 nvidia2 nvidia3 nvidia10 nvidiactl nvidia-uvm; do mknod /dev/$name c 1 3; done
mkdir /dev/shm && touch /dev/shm/kept && ln -s null /dev/link
. "$1" && own_gpus "$2" 2 3 || exit 1
echo gone >/dev/null && echo gone >/dev/nvidia2 && ls -R /dev
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_node_sees_its_own_devices_alone(tmp_path: Path) -> None:
    words = ["unshare", "--mount", "bash", "-c", DEV_OF_FOUR, "bash", str(SCRIPT), str(tmp_path / "new")]
    seen = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    assert {"nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null", "link", "kept"} <= set(seen)
    assert not {"nvidia0", "nvidia1", "nvidia10"} & set(seen)
