"""Memory that other processes of the machine can map: a sealed memfd."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from weightbridge.errors import RegistrationError, UsageError
from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import Memory

__all__ = ["SharedMemory"]

# Names that the standard library's modules have only from later versions on (linux/fcntl.h).
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


class SharedMemory:
    """`nbytes` of zeros in a memfd, mapped here.

    The descriptor can be handed to other processes, which `attach` to it. The size is sealed: nobody who holds the
    descriptor can truncate it and so kill the readers with SIGBUS. Close transports and kernels that use the memory first.
    Raises RegistrationError when the machine has no such memory to give.
    """

    def __init__(self, nbytes: int, *, prefault: bool = False) -> None:
        """prefault: touch every page now (takes some 0.3 s a GiB) instead of at its first use."""
        if nbytes < 0:
            raise UsageError(f"nbytes is {nbytes}, expected 0 or more")
        self._nbytes = nbytes
        length = _mapped_length(nbytes)
        try:
            self._fd = os.memfd_create("weightbridge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise RegistrationError(f"no memfd for {nbytes} bytes: {error}") from error
        try:
            os.ftruncate(self._fd, length)
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
            if prefault:
                os.posix_fallocate(self._fd, 0, length)
            self._map(length, prefault=prefault)
        except OSError as error:
            os.close(self._fd)
            raise RegistrationError(
                f"cannot set up {nbytes} bytes of shared memory: {error}; free some memory"
            ) from error

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> SharedMemory:
        """Map memory that another process made. Takes ownership of `fd` (closes it on failure too).

        Raises RegistrationError when the descriptor is no sealed memory of at least `nbytes`.
        """
        self = cls.__new__(cls)
        self._fd, self._nbytes = fd, nbytes
        try:
            size = os.fstat(fd).st_size
            if nbytes < 0 or size < nbytes:
                raise RegistrationError(f"shared memory has {size} bytes, its owner announced {nbytes}")
            if not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
                raise RegistrationError("shared memory is not sealed against shrinking; make it with SharedMemory")
            self._map(_mapped_length(nbytes))
        except OSError as error:
            os.close(fd)
            raise RegistrationError(f"cannot map {nbytes} bytes of a peer's memory: {error}") from error
        except RegistrationError:
            os.close(fd)
            raise
        return self

    def _map(self, length: int, *, prefault: bool = False) -> None:
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if prefault else 0)
        self._mmap = mmap.mmap(self._fd, length, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))

    @property
    def memory(self) -> Memory:
        """What a transport registers. UsageError once closed."""
        if self._fd < 0:
            raise UsageError("shared memory is closed")
        return Memory(buffer=Buffer(self._address, self._nbytes), fd=self._fd)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as a NumPy view, [nbytes]. While a view lives, `close` leaves the mapping to it."""
        if self._fd < 0:
            raise UsageError("shared memory is closed")
        return np.frombuffer(self._mmap, dtype=np.uint8, count=self._nbytes)

    def close(self) -> None:
        """Give the memory back; idempotent. Views that are still alive keep their bytes until they go."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with contextlib.suppress(BufferError):
                self._mmap.close()


def _mapped_length(nbytes: int) -> int:
    return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
