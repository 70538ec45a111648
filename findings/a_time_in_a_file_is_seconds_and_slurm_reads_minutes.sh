#!/usr/bin/env bash
# omegaconf 2.3.1, hydra-core 1.3.8, submitit 1.5.4. A time limit of ten hours in a configuration file is 25 days for Slurm.
#
# Expected: `time: 10:00:00` in a file is what `time=10:00:00` is on the command line: the text that Slurm reads as ten hours.
# Behaviour: OmegaConf keeps YAML 1.1's numbers to the base of 60, so in a file (and in its own dot list) the text is the
# integer 36000, in seconds, while Hydra's command line keeps the text. submitit writes either down as `#SBATCH --time`, and a
# plain number is minutes there: 25 days, which a partition with a limit refuses, and one without one starts only when nodes are
# free for so long. It depends on the first digit: `01:30:00` stays text and `1:30:00` is 5400 minutes; `30:00` is 1800 minutes
# in place of thirty; `0120` is octal, 80. Quotes keep the text.
# Who meets it: launchers' configurations that move from flags to a file.
#
# Output of 2026-11-29 (limits as Slurm reads them; command line, file, dot list):
#   10:00:00: 10:00:00; 25 days, 0:00:00; 25 days, 0:00:00
#   1:30:00: 1:30:00; 3 days, 18:00:00; 3 days, 18:00:00
#   01:30:00: 1:30:00; 1:30:00; 1:30:00
#   30:00: 0:30:00; 1 day, 6:00:00; 1 day, 6:00:00
#   0120: 2:00:00; 1:20:00; 1:20:00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet omegaconf==2.3.1 hydra-core==1.3.8 submitit==1.5.4 2>/dev/null
cat >"$folder/limits.py" <<'PYTHON'
import re
import sys
from datetime import timedelta
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from submitit.slurm.slurm import _make_sbatch_string


def limit(value):
    """Of a batch script with this value, by the forms that sbatch's manual gives for --time."""
    script = _make_sbatch_string("true", sys.argv[1], time=value)
    text = re.search(r"^#SBATCH --time=(\S+)$", script, re.MULTILINE).group(1)
    parts = [int(part) for part in text.split(":")]
    units = ("minutes",) if len(parts) == 1 else ("minutes", "seconds") if len(parts) == 2 else ("hours", "minutes", "seconds")
    return timedelta(**dict(zip(units, parts)))


for text in ("10:00:00", "1:30:00", "01:30:00", "30:00", "0120"):
    Path(sys.argv[1], "job.yaml").write_text(f"time: {text}\n")
    with initialize_config_dir(sys.argv[1], version_base=None):
        line = compose("job", overrides=[f"time={text}"]).time
        file = compose("job").time
    dots = OmegaConf.from_dotlist([f"time={text}"]).time
    print(f"{text}: {limit(line)}; {limit(file)}; {limit(dots)}")
PYTHON
"$folder/venv/bin/python" "$folder/limits.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
10:00:00: 10:00:00; 25 days, 0:00:00; 25 days, 0:00:00
1:30:00: 1:30:00; 3 days, 18:00:00; 3 days, 18:00:00
01:30:00: 1:30:00; 1:30:00; 1:30:00
30:00: 0:30:00; 1 day, 6:00:00; 1 day, 6:00:00
0120: 2:00:00; 1:20:00; 1:20:00
EXPECTED
