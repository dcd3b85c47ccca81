"""WeightBridge: moves updated model weights from the trainer workers of an RL job to its rollout (inference) workers.

The names below are the public ones. Importing this package is cheap and does not import torch: whatever needs torch is
imported when its name is first used. Errors come at once, since an `except` clause must never fail itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightbridge.errors import (
    ConnectError,
    CorruptionError,
    CoverageError,
    IncompleteUpdateError,
    InfeasibleError,
    InternalError,
    IrregularLayoutWarning,
    LayoutError,
    PlanError,
    ProbeError,
    RegistrationError,
    SpecError,
    TransferTimeout,
    TransportError,
    UnsupportedError,
    UsageError,
    WeightBridgeError,
    WorkerError,
)

if TYPE_CHECKING:
    from weightbridge.checkpoint import CheckpointSpec, spec_from_folder
    from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter, UpdateReport
    from weightbridge.probe import discover_tensors

__version__ = "0.1.0"

__all__ = [
    "CheckpointSpec",
    "ConnectError",
    "CorruptionError",
    "CoverageError",
    "IncompleteUpdateError",
    "InfeasibleError",
    "InternalError",
    "IrregularLayoutWarning",
    "LayoutError",
    "Options",
    "PlanError",
    "ProbeError",
    "ReceiverAdapter",
    "RegistrationError",
    "SenderAdapter",
    "SpecError",
    "TransferTimeout",
    "TransportError",
    "UnsupportedError",
    "UpdateReport",
    "UsageError",
    "WeightBridgeError",
    "WorkerError",
    "__version__",
    "discover_tensors",
    "spec_from_folder",
]

# Public name -> the package that defines it; imported at first use.
_LAZY = {
    "CheckpointSpec": "weightbridge.checkpoint",
    "Options": "weightbridge.coordinator",
    "ReceiverAdapter": "weightbridge.coordinator",
    "SenderAdapter": "weightbridge.coordinator",
    "UpdateReport": "weightbridge.coordinator",
    "discover_tensors": "weightbridge.probe",
    "spec_from_folder": "weightbridge.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'weightbridge' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
