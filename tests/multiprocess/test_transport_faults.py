"""The published fault suite on the built-in transports: real processes, stopped and killed."""

from __future__ import annotations

import pytest

from weightbridge.testing.transport_faults import TransportFaultSuite
from weightbridge.transports import ShmTransport, TcpTransport

pytestmark = pytest.mark.multiprocess


class TestTcp(TransportFaultSuite):
    transport_class = TcpTransport


class TestShm(TransportFaultSuite):
    transport_class = ShmTransport
    notices_stopped_writer = False
