"""Hides secret values wherever a configuration or a command line is stored or printed.

A variable is secret by its name: one of its parts between underscores ends in TOKEN, KEY, SECRET, PASSWORD or
CREDENTIAL, such as HF_TOKEN, WANDB_API_KEY or AWS_SECRET_ACCESS_KEY, or its last part is PAT, PASS, AUTH or the like.
Other texts are secret by their form: the password in a URL, the value of an option such as ``--token``, and tokens with
a known beginning. Only the config of a pilot holds the value (`launchers.state.pilot_config`), because its ranks need
it; that file is readable by its user alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

HIDDEN = "***"
_WORDS = r"(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?"
_LAST_WORDS = r"(?:PAT|PASS|AUTH|JWT|CREDS?|BEARER|COOKIE)"
_NAME = re.compile(rf"(?:.*_)?[A-Z0-9]*{_WORDS}(?:_.*)?|(?:.*_)?{_LAST_WORDS}(?:_[0-9]+)?|.+_PWD")
_ASSIGNED = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)['\"]?\s*[=:]\s*")
"""A name before its value, as the command line, a shell or YAML writes it: ``NAME=value``, ``{NAME: value}``."""
_VALUE = re.compile(r"""(?![{\[])(?:"[^"]*"?|'[^']*'?|,(?=[^\s"'])|[^\s,}\]"'])+""")
_ENVIRONMENT = re.compile(r"[+~]*(?:.*\.)?environment(?:\.[^.]*)?")
"""Path of an override that sets environment variables."""
_WORD = r"""(?:"[^"]*"?|'[^']*'?|[^\s"',\]])+"""
_FORMS = tuple(
    re.compile(form)
    for form in (
        # The user and the password of a URL; a digest after the tag of an image is no host.
        r"""(?<=://)(?P<secret>[^/\s'"@]*:[^/\s'"]*)@(?!sha256:)""",
        # The same without a scheme, as pyxis writes an image.
        r"""=["']?(?P<secret>[^\s/:=@"']+:[^\s/@"']+)@(?!sha256:)""",
        rf"""(?<![\w-])--?(?:[a-z0-9]+-)*(?:token|password|passwd|passphrase|secret)(?:=|\s+)(?P<secret>{_WORD})""",
        rf"""(?<![\w-])--?(?:[a-z0-9]+-)*(?:api|access|secret|private)-?key(?:=|\s+)(?P<secret>{_WORD})""",
        r"""(?<![\w-])(?:-u|--user)(?:=|\s+)["']?[^\s:"'=]+:(?P<secret>[^\s"']+)""",
        r"""(?i:authorization:\s*(?:bearer|basic|token))\s+(?P<secret>[^\s"']+)""",
        r"""\bwandb login\s+(?:--\S+\s+)*(?P<secret>[0-9A-Za-z]{20,})""",
        r"""\b(?P<secret>(?:hf_|gh[pousr]_|github_pat_|glpat-|nvapi-|sk-|xox[abprs]-)[A-Za-z0-9_-]{16,})""",
        r"""\b(?P<secret>AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)""",
    )
)
"""Texts that are secret wherever they stand."""
_PROXY = re.compile(r"""(?i:\b[a-z_]*proxy)['"]?\s*[=:]\s*['"]?(?P<secret>[^\s/'"@]+:[^\s/'"]+)@""")
"""A proxy without a scheme."""
_REFERENCE = re.compile(r"""["]?(?:\$[A-Za-z_{(]|`).*|["']?(?:~|/)[^\s]*""", re.DOTALL)
"""A value that a shell replaces by another one, or the path of a file."""


def is_secret(name: str) -> bool:
    """Whether an environment variable is secret, by its name."""
    return _NAME.fullmatch(name.upper()) is not None


def hide_in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with secret values replaced by `HIDDEN`, and secret parts of other values too, such as the
    password of a proxy."""
    return {name: HIDDEN if is_secret(name) else _hide_proxy(name, value) for name, value in environment.items()}


def hide_in_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secret values: ``+launcher.environment.HF_TOKEN=***``.

    Names in lower case count only below ``environment``, since options of a model or a grid have such names
    (``experts_per_token``).
    """
    return [_hide_in_argument(argument) for argument in arguments]


def hide_in_text(text: str) -> str:
    """The text, such as a line of a shell, without secret values."""
    return _replaced(text, _spans(text))


def holds_secret(text: str) -> bool:
    """Whether the text holds the value of a secret, and not only a variable or a file that holds it."""
    return any(not _REFERENCE.fullmatch(text[start:end]) for start, end in _spans(text))


def _hide_in_argument(argument: str) -> str:
    path, equals, value = argument.partition("=")
    of_environment = bool(equals) and _ENVIRONMENT.fullmatch(path) is not None
    if of_environment and value[:1] != "{" and is_secret(path.rpartition(".")[2]):
        return f"{path}={HIDDEN}"
    return _replaced(argument, _spans(argument, any_case=of_environment))


def _hide_proxy(name: str, value: str) -> str:
    """The value of a variable that is not secret itself."""
    return hide_in_text(f"{name}={value}").partition("=")[2]


def _spans(text: str, *, any_case: bool = False) -> Iterator[tuple[int, int]]:
    """Start and end of every secret value. ``any_case``: names in lower case count too."""
    for match in _ASSIGNED.finditer(text):
        name = match[1]
        if is_secret(name) and (any_case or name == name.upper()) and (value := _VALUE.match(text, match.end())):
            yield value.span()
    for form in (*_FORMS, _PROXY):
        for match in form.finditer(text):
            yield match.span("secret")


def _replaced(text: str, spans: Iterator[tuple[int, int]]) -> str:
    end = 0
    parts: list[str] = []
    for first, last in sorted(spans):
        if first >= end:
            parts += [text[end:first], HIDDEN]
        end = max(end, last)
    return "".join([*parts, text[end:]])
