"""Composes the sorted overrides with Hydra into the whole configuration as plain data."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from sweep.composing.conffiles import GROUPS, ConfFolders
from sweep.composing.overrides import Overrides
from sweep.grids.axes import AXES
from workloads.spec.checks import did_you_mean, suggest
from workloads.spec.errors import InvalidSweep
from workloads.spec.other_names import inside, same_here


def compose(overrides: Overrides, groups: Mapping[str, str], folders: ConfFolders) -> dict[str, Any]:
    """The whole configuration as plain data.

    ``overrides``: sorted overrides of the command line. ``groups``: the option of each group (cluster, launcher,
    measure). Raises `InvalidSweep` with one line if Hydra reports an error. What is composed of shipped files alone is
    remembered: Hydra takes two tenths of a second.
    """
    chosen = overrides.grids, tuple(groups.items()), overrides.hydra
    if folders.own or any("${" in override for override in overrides.hydra):  # files and variables that may change
        return _composed(*chosen, folders)
    return copy.deepcopy(_of_shipped_files(*chosen))


@lru_cache(maxsize=128)
def _of_shipped_files(
    grids: tuple[str, ...], groups: tuple[tuple[str, str], ...], hydra: tuple[str, ...]
) -> dict[str, Any]:
    return _composed(grids, groups, hydra, ConfFolders())


def _composed(
    grids: tuple[str, ...], groups: tuple[tuple[str, str], ...], hydra: tuple[str, ...], folders: ConfFolders
) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf

    base = [f"+grid@grids.{name}={name}" for name in grids] + [f"{group}={name}" for group, name in groups]
    if folders.own:
        base.append(f"hydra.searchpath=[{','.join(quoted(f'file://{folder.resolve()}') for folder in folders.own)}]")
    with _one_line_errors(folders), initialize_config_module("sweep.conf", version_base="1.3"):
        try:
            composed = hydra_compose("config", overrides=[*base, *hydra])
        except ConfigCompositionException as error:
            known = OmegaConf.to_container(hydra_compose("config", overrides=base), resolve=False)
            raise _unknown_keys(hydra, known, folders) or error from None
        data = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def quoted(text: str) -> str:
    """``text`` as a quoted string of Hydra's grammar, in which a backslash is special only before a quote."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


@contextmanager
def _one_line_errors(folders: ConfFolders) -> Iterator[None]:
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        hint = suggest(name, folders.names(group)) if group in GROUPS else ""
        raise InvalidSweep(f"no {group or 'file'} called {name!r}{hint}") from None
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidSweep(f"the configuration cannot be composed: {first.strip()}") from None


def _unknown_keys(overrides: Sequence[str], known: Any, folders: ConfFolders) -> InvalidSweep | None:
    """The error for all overrides of options that do not exist; None if every option exists."""
    messages = [text for override in overrides if (text := _unknown_key(override, known, folders)) is not None]
    return InvalidSweep(*messages) if messages else None


def _unknown_key(override: str, known: Any, folders: ConfFolders) -> str | None:
    if override.startswith("+"):
        return None
    key, _, value = override.removeprefix("~").partition("=")
    node, walked = known, ""
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return f"{override}: {walked} is a single value, it has no {part!r}"
        if part not in node:
            if walked == "launcher" and (others := _launchers_with(part, folders)):
                return (
                    f"{override}: {part} is an option of launcher={' and launcher='.join(others)}; this sweep has "
                    f"launcher={node['launcher']}"
                )
            if walked == "launcher" and (place := inside(part, node)) is not None:
                return f"{override}: no option {part!r} in launcher; write {place}={value}"
            if not walked:
                return f"{override}: {unknown_section(key, known, folders, value)}"
            return f"{override}: no option {part!r} in {walked}{suggest(part, _options(node, walked))}"
        node, walked = node[part], f"{walked}.{part}".lstrip(".")
    return None


def unknown_section(key: str, known: Mapping[str, Any], folders: ConfFolders, value: str = "...") -> str:
    """The message for an option that does not exist at the top level; it says where the option is, if anywhere.

    ``known``: the composed configuration, or its sections.
    """
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    message, sections = f"no option {first!r} at the top level", _options(known, "")
    if not did_you_mean(first, sections) and (place := _place_of(last, known, folders)) is not None:
        return f"{message}; write {place}={value}"
    return f"{message}{suggest(first, sections)}"


def _place_of(name: str, known: Mapping[str, Any], folders: ConfFolders) -> str | None:
    """The full name of an option that a user gave without its section."""
    if name in AXES or (name not in known and (same := same_here(name, AXES)) is not None):
        return f"grid.axes.{name if name in AXES else same}"
    for section, options in known.items():
        if section != "grids" and isinstance(options, Mapping) and name in options:
            return f"{section}.{name}"
    return f"launcher.{name}" if _launchers_with(name, folders) else None


def _launchers_with(option: str, folders: ConfFolders) -> list[str]:
    """Launchers that have an option of this name; a file that cannot be read is not asked."""
    having = []
    for name in folders.names("launcher"):
        with suppress(InvalidSweep):
            having += [name] if option in folders.read("launcher", name) else []
    return having


def _options(node: Mapping[str, Any], walked: str) -> list[str]:
    names = [str(key) for key in node if key not in ("grids", walked)]  # launcher.launcher cannot be set
    return names if walked else [*names, "grid", "model"]
