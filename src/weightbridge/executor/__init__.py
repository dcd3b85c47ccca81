"""Drives a worker's transfer machine on real memory, with kernels and transports."""

from weightbridge.executor.codecs import Codec, register_codec
from weightbridge.executor.executor import Aborted, Endpoint, Executor, NetworkBytes
from weightbridge.executor.live import LiveMemory
from weightbridge.executor.observation import KernelRan, Observation, Observe, Prepared
from weightbridge.executor.staging import HostCopy

__all__ = [
    "Aborted", "Codec", "Endpoint", "Executor", "HostCopy", "KernelRan", "LiveMemory", "NetworkBytes", "Observation", "Observe",
    "Prepared", "register_codec",
]  # fmt: skip
