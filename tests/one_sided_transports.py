"""The transports of other packages, as the conformance suite makes them: on loopback, said to be trusted."""

from __future__ import annotations

from typing import Any

from weightbridge.transports.mooncake import MooncakeTransport
from weightbridge.transports.nixl import NixlTransport

__all__ = ["TrustedMooncake", "TrustedNixl"]


class TrustedMooncake(MooncakeTransport):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, trusted_network=True, **settings)


class TrustedNixl(NixlTransport):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, trusted_network=True, **settings)
