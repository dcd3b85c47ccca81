"""Resident memory of this process, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["forget_peak", "peak_bytes", "resident_bytes"]


def resident_bytes() -> int:
    return _read("VmRSS")


def peak_bytes() -> int:
    """Highest resident size since the start or the last `forget_peak`."""
    return _read("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _read(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {key}")
