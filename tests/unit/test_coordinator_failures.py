"""Whom an error met: what a worker tells the hub of an attempt that failed here."""

from __future__ import annotations

import pytest

from weightbridge.coordinator.failures import causes_of, error_to_failure
from weightbridge.errors import ConnectError, RegistrationError, TransferTimeout, WeightBridgeError, WorkerError


@pytest.mark.parametrize(
    ("error", "causes"),
    [
        (WorkerError("lost b/0", causes={"b/0": "reset"}), {"b/0": "reset"}),
        (TransferTimeout("b/0 is late", waiting_for=("b/0",), seconds=3.0, peer="b/0"), {"b/0": "b/0 is late"}),
        (ConnectError("cannot join b/0", peer="b/0"), {"b/0": "cannot join b/0"}),
        (ConnectError("port taken", peer=None), {}),
        (RegistrationError("no memory"), {}),
    ],
)
def test_an_error_names_whom_it_met(error: WeightBridgeError, causes: dict[str, str]) -> None:
    assert causes_of(error) == causes
    told = error_to_failure(error, me="a/1", version=4)
    assert told.causes == (causes or {"a/1": error.message})
    assert told.version == 4
