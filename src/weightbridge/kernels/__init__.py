"""Pack and assemble kernels: strided copies and casts over descriptor tables.

`reference` (NumPy) is the specification, `native` (C) the one to use on a CPU, `triton_kernels` the one for a GPU.
`choose_kernels` picks. `differences` is the probe's reader of coded memory; its specification is in `probe/`.
"""

from __future__ import annotations

import importlib
import warnings

from weightbridge.errors import UsageError
from weightbridge.kernels.base import Buffer, DoneTicket, Kernels, Ticket
from weightbridge.kernels.native import NativeKernels, load_native
from weightbridge.kernels.reference import ReferenceKernels
from weightbridge.kernels.writes import copy_writes

__all__ = [
    "Buffer", "DoneTicket", "Kernels", "NativeKernels", "ReferenceKernels", "Ticket", "choose_kernels", "copy_writes",
]  # fmt: skip

_warned = False


def choose_kernels(name: str | None = None) -> Kernels:
    """The kernels called `name`; with None the fastest that work here on memory of the CPU.

    Falls back from native to reference with one warning per process. Raises UsageError on an unknown name, or when the
    kernels asked for by name cannot work here.
    """
    if name == "native":
        return NativeKernels()
    if name == "reference":
        return ReferenceKernels()
    if name == "triton":
        return _triton_kernels()
    if name is not None:
        raise UsageError(f"kernels {name!r} are not known; known are 'native', 'reference' and 'triton'")
    if load_native() is not None:
        return NativeKernels()
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "the native kernels were not built, so packing and assembling run in NumPy and are slow; "
            "install a C compiler and reinstall weightbridge-rl",
            RuntimeWarning,
            stacklevel=2,
        )
    return ReferenceKernels()


def _triton_kernels() -> Kernels:
    try:
        module = importlib.import_module("weightbridge.kernels.triton_kernels")
    except ImportError as error:
        raise UsageError(
            f"the Triton kernels cannot be used: {error}; install weightbridge-rl[gpu], or choose the kernels 'native'"
        ) from error
    kernels: Kernels = module.TritonKernels()
    return kernels
