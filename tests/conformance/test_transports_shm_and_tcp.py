"""The published conformance suite on the built-in transports."""

from __future__ import annotations

from weightbridge.testing.transport_suite import TransportSuite
from weightbridge.transports import ShmTransport, TcpTransport


class TestTcp(TransportSuite):
    transport_class = TcpTransport


class TestShm(TransportSuite):
    transport_class = ShmTransport
