"""Marks tests by the folder they lie in, and skips what this machine cannot run, with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

_TESTS = Path(__file__).parent
# No test fails for being slow, and CI tries the same examples each time.
settings.register_profile("weightbridge", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("weightbridge")

_MARKED_FOLDERS = ("integration", "gpu", "multiprocess")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs_gpu = []
    for item in items:
        try:
            folder = item.path.relative_to(_TESTS).parts[0]
        except ValueError:
            continue
        if folder in _MARKED_FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("gpu") is not None:
            needs_gpu.append(item)
    if needs_gpu and not _has_gpu():
        skip = pytest.mark.skip(reason="no CUDA device: torch.cuda.is_available() is False here")
        for item in needs_gpu:
            item.add_marker(skip)


def _has_gpu() -> bool:
    # torch is imported only when a GPU test was collected: the lower layers' tests run without it.
    import torch

    return torch.cuda.is_available()
