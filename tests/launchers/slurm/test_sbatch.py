"""sbatch is run by submitit, whose public names alone are used, and the job's files have submitit's names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import submitit

from launchers.slurm import sbatch
from launchers.slurm.batch_file import submission_text
from launchers.slurm.options import SlurmOptions
from launchers.slurm.srun_log import log_path
from launchers.state.sweep_dir import SweepDir
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.test_batch_file import TOKEN, job

ROOT = Path(__file__).parents[3]


def test_what_is_submitted_is_what_a_dry_run_shows_and_submitit_finds_it(fake: FakeSlurm, tmp_path: Path) -> None:
    made = job(tmp_path / "it's a sweep", cluster="blue")
    number = sbatch.submit(made, SlurmOptions(partition="gpu"))
    handle = submitit.SlurmJob(made.log_dir, f"{number}_2")
    assert handle.paths.submission_file.read_text() == submission_text(made, SlurmOptions(partition="gpu"))
    assert [file.name for file in made.log_dir.iterdir()] == [f"{number}_submission.sh"]
    assert handle.paths.stdout == log_path(SweepDir(made.sweep_dir), TOKEN, handle.job_id)
    assert {one["cluster"] for one in fake.jobs} == {"blue"}


def test_an_id_is_kept_when_the_file_cannot_be_renamed(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    assert sbatch.submit(made, SlurmOptions()) == str(fake.jobs[0]["id"])
    assert [file.name for file in made.log_dir.iterdir()] == [f"{TOKEN}.sh"]


@pytest.mark.parametrize("mode", ["latin", "two numbers"])
def test_an_answer_that_cannot_be_read_does_not_prove_that_there_is_no_job(
    mode: str, fake: FakeSlurm, tmp_path: Path
) -> None:
    fake.mode("sbatch", mode)
    with pytest.raises(sbatch.SubmissionUncertain) as error:
        sbatch.submit(job(tmp_path), SlurmOptions())
    assert fake.jobs and "\n" not in str(error.value)


def test_user_code_in_a_job_may_ask_submitit_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert "export SUBMITIT_EXECUTOR=slurm\n" in submission_text(job(), SlurmOptions())
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[01-02]")
    assert submitit.slurm.slurm.SlurmJobEnvironment().activated()
    assert submitit.slurm.slurm.SlurmJobEnvironment().hostnames == ["node01", "node02"]


def private_names(path: Path) -> list[str]:
    """Names with a leading underscore that a file takes from submitit: in imports, and of what it has imported, made
    from it or derived from it. In a class derived from one of submitit's, also names that it defines or overrides."""
    tree = ast.parse(path.read_text())
    from_submitit: set[str] = set()
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias for alias in node.names if alias.name.split(".")[0] == "submitit"]
            from_submitit |= {alias.asname or "submitit" for alias in modules}
            found += [alias.name for alias in modules if "._" in alias.name]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "submitit":
            from_submitit |= {alias.asname or alias.name for alias in node.names}
            found += [f"{node.module}.{a.name}" for a in node.names if "._" in f"{node.module}.{a.name}"]

    def is_submitits(node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in from_submitit for part in ast.walk(node))

    before = -1
    while len(from_submitit) > before:  # until no assignment and no class adds a name
        before = len(from_submitit)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(map(is_submitits, node.bases)):
                from_submitit |= {node.name, "self", "cls"}
            elif (
                isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value and is_submitits(node.value)
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                from_submitit |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            elif isinstance(node, ast.withitem) and node.optional_vars and is_submitits(node.context_expr):
                from_submitit |= {n.id for n in ast.walk(node.optional_vars) if isinstance(n, ast.Name)}
            elif isinstance(node, ast.arg) and node.annotation and is_submitits(node.annotation):
                from_submitit.add(node.arg)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and is_submitits(node.value):
            found.append(node.attr)
        elif isinstance(node, ast.Call) and is_getattr(node) and is_submitits(node.args[0]):
            found += [a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and is_private(str(a.value))]
        elif isinstance(node, ast.ClassDef) and any(map(is_submitits, node.bases)):
            found += [item.name for item in node.body if isinstance(item, ast.FunctionDef) and is_private(item.name)]
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_getattr(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("getattr", "setattr", "hasattr")


def test_no_private_name_of_submitit_is_used() -> None:
    files = [path for path in (ROOT / "launchers").rglob("*.py") if "submitit" in path.read_text()]
    assert len(files) >= 2
    assert {path.name: names for path in files if (names := private_names(path))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import submitit.core._submit",
        "from submitit.slurm.slurm import _make_sbatch_string",
        "import submitit\nsubmitit.SlurmExecutor('.')._submit_command('x')",
        "import submitit as s\nexecutor = s.SlurmExecutor('.')\njob = executor.submit(print)\njob._interrupt()",
        "from submitit import SlurmExecutor\nclass Mine(SlurmExecutor):\n    def _num_tasks(self): return 1",
        "from submitit import SlurmExecutor\nclass Mine(SlurmExecutor):\n    def name(self): return self._throttle()",
        "from submitit import SlurmJob\ndef f(job: SlurmJob): return getattr(job, '_tasks')",
    ],
)
def test_private_names_of_submitit_are_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(code)
    assert private_names(tmp_path / "code.py")
