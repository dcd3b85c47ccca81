"""Layout discovery: which checkpoint element each live element of a worker holds, learned by values.

`probe` feeds the worker's own `load_weights` checkpoints whose values encode their own index, looks where they land, proves
the result with a load of pseudo-random values, and returns a `SourceMap`. `discover_tensors` names a module's live tensors.
This is the lowest layer that knows torch; its arithmetic (codes, differences, reconstruction) does not, so the names
below are imported at first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightbridge.probe.live import NamedTensors, discover_tensors, live_tensors, local_tensor
    from weightbridge.probe.run import ProbeOptions, num_loads, probe
    from weightbridge.probe.verify import predict

__all__ = [
    "NamedTensors",
    "ProbeOptions",
    "discover_tensors",
    "live_tensors",
    "local_tensor",
    "num_loads",
    "predict",
    "probe",
]

_HOME = {
    "NamedTensors": "live",
    "ProbeOptions": "run",
    "discover_tensors": "live",
    "live_tensors": "live",
    "local_tensor": "live",
    "num_loads": "run",
    "predict": "verify",
    "probe": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weightbridge.probe' has no attribute {name!r}")
    value = getattr(import_module(f"weightbridge.probe.{_HOME[name]}"), name)
    globals()[name] = value
    return value
