"""Pack and assemble kernels: strided copies and casts over descriptor tables.

`reference` (NumPy) is the specification, `native` (C) the one to use on a CPU, `triton_kernels` the one for a GPU.
`choose_kernels` picks, and `Kernels.on` gives those for where the weights lie. `differences` is the probe's reader of coded
memory; its specification is in `probe/`.
"""

from __future__ import annotations

import warnings

from weightbridge.errors import UsageError
from weightbridge.kernels.base import Buffer, DoneTicket, Kernels, Ticket
from weightbridge.kernels.by_device import KernelsByDevice, triton_module
from weightbridge.kernels.native import NativeKernels, load_native
from weightbridge.kernels.reference import ReferenceKernels
from weightbridge.kernels.writes import copy_writes

__all__ = [
    "Buffer", "DoneTicket", "Kernels", "NativeKernels", "ReferenceKernels", "Ticket", "choose_kernels", "copy_writes",
]  # fmt: skip

_warned = False


def choose_kernels(name: str | None = None) -> Kernels:
    """The kernels called `name`; with None the fastest for wherever the weights lie, which `on` is asked for.

    "triton" does as None, once it has made sure that Triton and a CUDA device are there; in Triton's interpreter it is Triton
    on memory of the CPU. Falls back from native to reference with one warning per process. Raises UsageError on an unknown
    name, or when the kernels asked for by name cannot work here.
    """
    if name == "native":
        return NativeKernels()
    if name == "reference":
        return ReferenceKernels()
    if name not in ("triton", None):
        raise UsageError(f"kernels {name!r} are not known; known are 'native', 'reference' and 'triton'")
    if name == "triton":
        module = triton_module("choose the kernels 'native'")
        if module.INTERPRETED:
            kernels: Kernels = module.TritonKernels()
            return kernels
        module.require_device()
    return KernelsByDevice(_host_kernels())


def _host_kernels() -> Kernels:
    if load_native() is not None:
        return NativeKernels()
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "the native kernels were not built, so packing and assembling run in NumPy and are slow; "
            "install a C compiler and reinstall weightbridge-rl",
            RuntimeWarning,
            stacklevel=3,
        )
    return ReferenceKernels()
