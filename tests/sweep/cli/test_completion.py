"""Completion in a shell: what bash offers, asked of bash itself."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from sweep.__main__ import main
from sweep.cli.commands import COMMANDS

pytest.importorskip("shtab")


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["--print-completion", shell]) == 0
    return capsys.readouterr().out


def offered(completion: str, *words: str) -> list[str]:
    """What bash offers for the last of the words after ``ultrasweep``."""
    line = " ".join(f"'{word}'" for word in ("ultrasweep", *words))
    ask = f"COMP_WORDS=({line})\nCOMP_CWORD={len(words)}\nCOMPREPLY=()\n"
    ask += '$(complete -p ultrasweep | sed "s/.*-F \\([^ ]*\\).*/\\1/")\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "-c", completion + ask], capture_output=True, text=True, check=True)
    return [word.strip() for word in done.stdout.splitlines() if word.strip()]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_offers_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    completion = script("bash", capsys)
    assert set(COMMANDS) <= set(offered(completion, ""))
    assert set(offered(completion, "p")) == {name for name in COMMANDS if name.startswith("p")}
    assert {"--top", "--sort", "--show", "--json", "--where"} <= set(offered(completion, "plan", "--"))
    assert "--replay" not in offered(completion, "plan", "--")
    assert set(offered(completion, "export", "x", "--to", "m")) == {"megatron"}


def test_zsh_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    completion = script("zsh", capsys)
    assert completion.startswith("#compdef ultrasweep")
    assert all(f"    {name}:'" in completion for name in COMMANDS)


@pytest.mark.parametrize("words", [["--print-completion"], ["--print-completion", "fish"]])
def test_another_shell_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and "not one of bash, zsh" in told.err and len(told.err.splitlines()) == 1
