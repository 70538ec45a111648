"""Which values are hidden, and that nothing else is."""

from __future__ import annotations

import pytest

from results.tables.provenance import command_line
from results.text.secrets import hide_in_arguments, hide_in_environment, is_secret


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
    ],
)
def test_nothing_else_is_hidden(argument: str) -> None:
    assert hide_in_arguments([argument]) == [argument]
