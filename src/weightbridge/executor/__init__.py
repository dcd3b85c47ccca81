"""Drives a worker's transfer machine on real memory, with kernels and transports."""

from weightbridge.executor.codecs import Codec, register_codec
from weightbridge.executor.executor import Aborted, Endpoint, Executor, NetworkBytes
from weightbridge.executor.live import live_buffers

__all__ = ["Aborted", "Codec", "Endpoint", "Executor", "NetworkBytes", "live_buffers", "register_codec"]
