"""Every public exception, sorted by what the caller can do about it.

Fields are attributes and every error pickles, so that a failure crosses process boundaries with its facts. A message
names the thing, what was expected, what was found and the next action.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ConnectError",
    "CorruptionError",
    "CoverageError",
    "IncompleteUpdateError",
    "InfeasibleError",
    "InternalError",
    "IrregularLayoutWarning",
    "LayoutError",
    "PlanError",
    "ProbeError",
    "RegistrationError",
    "SpecError",
    "TransferTimeout",
    "TransportError",
    "UnsupportedError",
    "UsageError",
    "WeightBridgeError",
    "WorkerError",
]


class WeightBridgeError(Exception):
    """Root of the tree. Keyword arguments become attributes; all of them survive pickling."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self._fields))


def _rebuild(cls: type[WeightBridgeError], message: str, fields: dict[str, Any]) -> WeightBridgeError:
    return cls(message, **fields)


class LayoutError(WeightBridgeError):
    """The checkpoint spec or the loader must change."""


class SpecError(LayoutError):
    """A checkpoint cannot be described: missing file, truncated file, tensor named but absent, unknown dtype."""


class ProbeError(LayoutError):
    """A live tensor cannot be explained by copies of checkpoint elements. Fields: `tensor`, `worker` where known."""


class CoverageError(LayoutError):
    """A needed element has no holder, a live element no source, or a checkpoint tensor no taker.

    Fields where known: `tensor`, `box`, `worker`.
    """


class PlanError(WeightBridgeError):
    """The request must change."""


class InfeasibleError(PlanError):
    """A budget is too small. Fields: `needed_bytes`, `budget_bytes`."""

    needed_bytes: int
    budget_bytes: int


class UnsupportedError(PlanError):
    """A combination that is not supported; the message says which and what is."""


class TransportError(WeightBridgeError):
    """The environment failed. `retryable` says whether the same call may succeed later; `peer` names whom it met."""

    retryable: bool = False


class ConnectError(TransportError):
    """A peer or an endpoint could not be reached, or a port is taken."""

    retryable = True


class RegistrationError(TransportError):
    """Memory could not be registered with a transport."""


class TransferTimeout(TransportError):
    """A bounded wait ended. Fields: `waiting_for` (tuple of worker names), `seconds`."""

    retryable = True


class WorkerError(WeightBridgeError):
    """Other workers failed. Field `causes`: worker name -> what happened to it, in words."""

    causes: dict[str, str]


class CorruptionError(WorkerError):
    """Bytes changed between two workers; nothing was made of them. `causes` names the sender.

    Fields where they were found: `version`, `round`, `stage`, `sent_digest`, `found_digest`.
    """


class IncompleteUpdateError(WeightBridgeError):
    """Some workers hold mixed versions: do not serve from them.

    Fields: `version`, `causes` (worker name -> what happened), `poisoned` (engine names).
    """

    causes: dict[str, str]


class UsageError(WeightBridgeError):
    """Wrong call order or arguments."""


class InternalError(WeightBridgeError):
    """A defect of this library. The message holds what reproduces it."""


class IrregularLayoutWarning(UserWarning):
    """A live tensor is no set of slices; it is followed piece by piece, at a cost in memory that the message states."""
