"""The published conformance suite on NIXL over TCP. Needs the extra `nixl` (see scripts/setup_transports.sh)."""

from __future__ import annotations

import pytest
from tests.one_sided_transports import TrustedNixl

from weightbridge.testing.transport_faults import TransportFaultSuite
from weightbridge.testing.transport_suite import TransportSuite
from weightbridge.transports.nixl import NixlTransport

_missing = NixlTransport.missing()
if _missing:
    pytest.skip(f"nixl: {_missing}", allow_module_level=True)


class TestNixl(TransportSuite):
    transport_class = TrustedNixl


class TestNixlFaults(TransportFaultSuite):
    transport_class = TrustedNixl
