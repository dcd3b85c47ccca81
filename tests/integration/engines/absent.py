"""Stand-ins for packages that an engine imports and that no CPU machine needs: kernels, image decoding.

Importing one of them, or anything within it, succeeds; *using* anything of it raises, with its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__all__ = ["absent_module", "stand_in_for"]


class _Absent:
    """Whatever an absent module is asked for: may be named, subclassed and passed on, not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is absent here: a stand-in lets engines import it, not use it")

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def absent_module(name: str) -> ModuleType:
    """A stand-in for one module, to be put into `sys.modules`."""
    return _Module(name)


def stand_in_for(*roots: str) -> None:
    """From now on these top-level packages, and all within them, can be imported."""
    sys.meta_path.insert(0, _Finder(roots))
