"""Which values are hidden, and that nothing else is."""

from __future__ import annotations

import pytest

from results.tables.provenance import command_line
from results.text.secrets import hide_in_arguments, hide_in_environment, holds_secret, is_secret


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("PGPASSWORD", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", True),
        ("my_token", True),
        ("X_TOKEN_2", True),
        ("APIKEY", True),
        ("GITHUB_PAT", True),
        ("DB_PASS", True),
        ("BASIC_AUTH", True),
        ("SLURM_JWT", True),
        ("DB_PWD", True),
        ("PWD", False),
        ("OLDPWD", False),
        ("SSH_AUTH_SOCK", False),
        ("NCCL_COMPAT", False),
        ("NCCL_DEBUG", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("PATH", False),
    ],
)
def test_a_variable_is_secret_by_its_name(name: str, secret: bool) -> None:
    assert is_secret(name) is secret
    assert hide_in_environment({name: "hunter2"}) == {name: "***" if secret else "hunter2"}


@pytest.mark.parametrize(
    "argument",
    [
        "+launcher.environment.HF_TOKEN=hunter2",
        "++launcher.environment.hf_token=hunter2",
        "+launcher.environment.WANDB_API_KEY='hunter2 and more'",
        "+launcher.environment.X_SECRET=a,hunter2",
        "launcher.environment={NCCL_DEBUG: INFO, HF_TOKEN: hunter2}",
        "launcher.environment={hf_token: 'hunter2', NCCL_DEBUG: INFO}",
        'launcher.setup=["module load cuda","export HF_TOKEN=hunter2"]',
        "launcher.setup=export PGPASSWORD='hunter2 hunter2'",
        "launcher.setup=export PGPASSWORD=x{y,hunter2'hunter2' A=INFO",
    ],
)
def test_the_command_line_hides_them(argument: str) -> None:
    [hidden] = hide_in_arguments([argument])
    assert "hunter2" not in hidden and "***" in hidden
    assert hidden.partition("=")[0] == argument.partition("=")[0]
    assert ("INFO" in hidden) is ("INFO" in argument)
    assert "hunter2" not in command_line(["python", "-m", "sweep", "run", argument])


@pytest.mark.parametrize(
    "argument",
    [
        "+grid=tiny",
        "model.experts_per_token=8",
        "model={experts_per_token: 8}",
        "--where",
        "seq_len * global_batch_size == 4096",
        "launcher.environment.NCCL_DEBUG=WARN",
        "+launcher.environment.TOKENIZERS_PARALLELISM=false",
        "name=my_key=study",
        "launcher.srun_args=['--container-image=docker://registry.example:5000/torch:2.11']",
        "launcher.srun_args=['--container-image=docker://torch:2.11@sha256:0123abcd']",
        "launcher.srun_args=['--container-image=torch:2.11@sha256:0123abcd','--mail-user=me@example.org']",
        "launcher.srun_args=['--container-image=docker://user@nvcr.io#nvidia/pytorch:24.05']",
        "launcher.setup=['pip install --user numpy','export http_proxy=http://proxy.example:8080']",
        "--max-tokens 100 --key-file ~/.key --sort-key name",
    ],
)
def test_nothing_else_is_hidden(argument: str) -> None:
    assert hide_in_arguments([argument]) == [argument]


@pytest.mark.parametrize(
    "line",
    [
        "export HTTPS_PROXY=http://me:hunter2@proxy.example:8080",
        "export https_proxy=me:hunter2@proxy.example:8080",
        "git clone https://me:hunter2@example.org/x.git",
        "huggingface-cli login --token hunter2",
        "tool --api-key=hunter2 --verbose",
        "apptainer exec --docker-password 'hunter2' image",
        "curl -u me:hunter2 https://example.org",
        "curl -H 'Authorization: Bearer hunter2' https://example.org",
        "wandb login " + "hunter2" * 5,
        "login hf_" + "hunter2" * 3,
        "--container-image=docker://me:hunter2@registry.example/torch:2.11",
        "--container-image=me:hunter2@registry.example#torch:2.11",
        "--export=ALL,GITHUB_PAT=hunter2",
        "export DB_PASS='$hunter2'",
    ],
)
def test_secrets_are_known_by_their_form(line: str) -> None:
    [hidden] = hide_in_arguments([f"launcher.setup=['{line}']"])
    assert "hunter2" not in hidden and "***" in hidden
    assert holds_secret(line)


def test_the_password_of_a_proxy_is_hidden_in_an_environment() -> None:
    hidden = hide_in_environment({"HTTPS_PROXY": "http://me:hunter2@proxy.example:8080", "http_proxy": "me:hunter2@p"})
    assert hidden == {"HTTPS_PROXY": "http://***@proxy.example:8080", "http_proxy": "***@p"}


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=$(cat ~/.token)",
        'export HF_TOKEN="$MY_TOKEN"',
        "export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json",
        "tool --token $HF_TOKEN",
        "source ~/.secrets",
    ],
)
def test_a_variable_or_a_file_with_the_secret_is_no_secret(line: str) -> None:
    assert not holds_secret(line)
