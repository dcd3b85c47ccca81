"""The Triton kernels in Triton's interpreter, for tests that run them on memory of the CPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

_NAMES = ("weightbridge.kernels.triton_moves", "weightbridge.kernels.triton_kernels")


@contextmanager
def interpreted_triton() -> Iterator[ModuleType]:
    """The kernels' modules once more, made with TRITON_INTERPRET=1, which decides when a function is decorated.

    Under the names of the real ones meanwhile, and gone after: other tests get theirs as they are.
    """
    before = {name: sys.modules.pop(name, None) for name in _NAMES}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            for name in _NAMES:
                spec = importlib.util.find_spec(name)
                assert spec is not None
                assert spec.loader is not None
                module = sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            assert module.INTERPRETED
            yield module
    finally:
        for name, old in before.items():
            sys.modules.pop(name, None)
            if old is not None:
                sys.modules[name] = old
