"""Hides the values of secret variables wherever a configuration or a command line is stored or printed.

A variable is secret by its name: one of its parts between underscores ends in TOKEN, KEY, SECRET, PASSWORD or
CREDENTIAL, such as HF_TOKEN, WANDB_API_KEY or AWS_SECRET_ACCESS_KEY. Only the config of a pilot holds the value
(`launchers.state.pilot_config`), because its ranks need it; that file is readable by its user alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
_WORDS = r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?"
_NAME = re.compile(rf"(?:.*_)?[A-Z0-9]*{_WORDS}(?:_.*)?")
_VALUE = r"""(?![{\[])(?:"[^"]*"?|'[^']*'?|,(?=[^\s"'])|[^\s,}\]"'])+"""
_ASSIGNED = re.compile(rf"\b([A-Za-z_][A-Za-z0-9_]*)(['\"]?\s*[=:]\s*)({_VALUE})")
"""A name with its value, as the command line, a shell or YAML writes it: ``NAME=value``, ``{NAME: value}``."""
_ENVIRONMENT = re.compile(r"[+~]*(?:.*\.)?environment(?:\.[^.]*)?")
"""Path of an override that sets environment variables."""


def is_secret(name: str) -> bool:
    """Whether an environment variable is secret, by its name."""
    return _NAME.fullmatch(name.upper()) is not None


def hide_in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with secret values replaced by `HIDDEN`."""
    return {name: HIDDEN if is_secret(name) else value for name, value in environment.items()}


def hide_in_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secret values: ``+launcher.environment.HF_TOKEN=***``.

    Names in lower case count only below ``environment``, since options of a model or a grid have such names
    (``experts_per_token``).
    """
    return [_hide_in_argument(argument) for argument in arguments]


def _hide_in_argument(argument: str) -> str:
    path, equals, value = argument.partition("=")
    of_environment = bool(equals) and _ENVIRONMENT.fullmatch(path) is not None
    if of_environment and value[:1] != "{" and is_secret(path.rpartition(".")[2]):
        return f"{path}={HIDDEN}"

    def hide(match: re.Match[str]) -> str:
        name = match[1]
        secret = is_secret(name) and (of_environment or name == name.upper())
        return match[1] + match[2] + HIDDEN if secret else match[0]

    return _ASSIGNED.sub(hide, argument)
