"""From a failure told by the hub to the exception a caller sees."""

from __future__ import annotations

from weightbridge import errors
from weightbridge.machine import messages as w

__all__ = ["causes_of", "error_to_failure", "failure_to_error", "kind_of"]


def kind_of(error: BaseException) -> str:
    """The name under which an error travels: a class of errors.py, or InternalError for anything else."""
    name = type(error).__name__
    return name if name in errors.__all__ else "InternalError"


def causes_of(error: errors.WeightBridgeError) -> dict[str, str]:
    """Worker name -> what happened to it, as far as the error says whom it met; empty when it met nobody."""
    causes: dict[str, str] = getattr(error, "causes", None) or {}
    if causes:
        return dict(causes)
    peers = getattr(error, "waiting_for", ()) or (getattr(error, "peer", ""),)
    return {str(peer): error.message for peer in peers if peer}


def error_to_failure(error: errors.WeightBridgeError, *, me: str, version: int) -> w.Failure:
    """The failure that worker `me` would have been told of, had the hub been there to tell it."""
    causes = causes_of(error) or {me: error.message}
    return w.Failure(kind=kind_of(error), causes={str(n): str(c) for n, c in causes.items()}, version=version)


def failure_to_error(failure: w.Failure | w.UpdateFailed, *, me: str) -> errors.WeightBridgeError:
    """What every API call on worker `me` raises from now on. Always has `.causes`: worker name -> what happened."""
    causes = dict(failure.causes)
    told = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
    if failure.poisoned:
        return errors.IncompleteUpdateError(
            f"version {failure.version} did not arrive whole: {told}. Engines {', '.join(failure.poisoned)} hold a mixture of "
            "versions: do not serve from them until a full update has succeeded",
            version=failure.version, causes=causes, poisoned=tuple(failure.poisoned),
        )  # fmt: skip
    if failure.kind == "TransferTimeout":
        return errors.TransferTimeout(f"gave up waiting: {told}", waiting_for=tuple(causes), causes=causes)
    cls = getattr(errors, failure.kind, errors.WorkerError) if failure.kind in errors.__all__ else errors.InternalError
    own = set(causes) == {me}
    return cls(told if not own else causes[me], causes=causes)
