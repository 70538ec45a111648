"""Stands in for what an engine imports and its configuration does not need: data sets, tokenizers, kernels."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType


class Anything:
    """Can be called and subclassed, beside classes of any kind."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type:
        return cls


class HasEveryName(type):
    """A class that has every name."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return HasEveryName(name, (Anything,), {})


class AnyModule(ModuleType):
    """A module that has every name."""

    make: type[type] = type
    """Kind of its classes."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.make(name, (Anything,), {})


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of these names can be imported and hold anything; with a ``version``, that is their ``__version__``, and
    their classes have every name, too."""

    def __init__(self, *names: str, version: str | None = None) -> None:
        self.names, self.version = names, version

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = AnyModule(spec.name)
        module.__path__ = []
        if self.version is not None:
            module.__version__, module.make = self.version, HasEveryName
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*names: str) -> None:
    sys.meta_path.insert(0, StandIn(*names))
