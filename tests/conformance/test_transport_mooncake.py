"""The published conformance suite on Mooncake over TCP. Needs the extra `mooncake` (see scripts/setup_transports.sh)."""

from __future__ import annotations

import pytest
from tests.one_sided_transports import TrustedMooncake

from weightbridge.testing.transport_faults import TransportFaultSuite
from weightbridge.testing.transport_suite import TransportSuite
from weightbridge.transports.mooncake import MooncakeTransport

_missing = MooncakeTransport.missing()
if _missing:
    pytest.skip(f"mooncake: {_missing}", allow_module_level=True)


class TestMooncake(TransportSuite):
    transport_class = TrustedMooncake


class TestMooncakeFaults(TransportFaultSuite):
    transport_class = TrustedMooncake
