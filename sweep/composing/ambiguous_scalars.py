"""Refuses values that YAML 1.1 reads as another number or word than a person sees: ``0042`` as 34, ``16:00`` as 960.

Only values and names without quotes are concerned: octal, binary and hexadecimal numbers, base 60, digits with ``_``,
leading zeros, and yes, no, on and off. Hydra's grammar for overrides reads most of these as text; it shares only ``_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from workloads.spec.checks import shown
from workloads.spec.errors import InvalidSweep

_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(
    r"[-+]?(0|[1-9][0-9]*|(?=\.[0-9]))(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_OCTAL = re.compile(r"0+[1-9][0-9]*")
_WITH_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
"""Floats of OmegaConf that are texts in YAML 1.1."""
_GROUPED = re.compile(r"(?<![\w.'\"-])[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?(?![\w.])")
_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")


def refuse_ambiguous_scalars(label: str, document: str) -> None:
    """Check the plain scalars of one YAML document.

    Raises `InvalidSweep` with one message per value: the line, how the value would be read, and what to write.
    """
    import yaml

    messages = []
    for node in _scalars(yaml.compose(document, Loader=yaml.SafeLoader)):
        if (meaning := _other_meaning(node)) is not None:
            written = shown(node.value)
            plain = node.value.lstrip("0") if _OCTAL.fullmatch(node.value) else meaning
            messages.append(
                f"{label}, line {node.start_mark.line + 1}: {written[1:-1]} would be read as {meaning}; "
                f"write {plain}, or {written} in quotes for text"
            )
    if messages:
        raise InvalidSweep(*messages)


def refuse_ambiguous_override(text: str) -> None:
    """Raises `InvalidSweep` for a number with ``_`` in an override: as a number and as text it means two things."""
    _, equals, value = text.partition("=")
    if equals and (match := _GROUPED.search(_QUOTED.sub("", value))):
        number = match[0].replace("_", "")
        raise InvalidSweep(
            f"{text}: {match[0]} would be read as {number}; write {number}, or \"'{match[0]}'\" for text"
        )


def _scalars(root: Any) -> Iterator[Any]:
    """Every scalar of a document once, in the order of the text. A node may contain itself."""
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            yield node
        elif isinstance(node, yaml.MappingNode):
            waiting += [part for pair in reversed(node.value) for part in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)


def _other_meaning(node: Any) -> str | None:
    """How a plain scalar is read, if that is another number or word than its spelling; None if it is clear."""
    from yaml import SafeLoader
    from yaml.constructor import SafeConstructor

    if node.style is not None:
        return None
    text, kind = node.value, node.tag.rpartition(":")[2]
    try:
        if kind == "bool" and text.lower() not in ("true", "false"):
            return str(SafeConstructor.bool_values[text.lower()]).lower()
        if kind == "int" and not _WHOLE.fullmatch(text):
            return str(SafeLoader("").construct_yaml_int(node))
        if kind == "float" and not _DECIMAL.fullmatch(text):
            return str(SafeLoader("").construct_yaml_float(node))
        if kind == "str" and _WITH_EXPONENT.fullmatch(text) and not _DECIMAL.fullmatch(text):
            return str(float(text.replace("_", "")))
    except ValueError:  # thousands of digits; refused with its reason when the file is read
        return None
    return None
