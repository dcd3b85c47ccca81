"""Layout discovery: which checkpoint element each live element of a worker holds, learned by values.

`probe` feeds the worker's own `load_weights` checkpoints whose values encode their own index, looks where they land, proves
the result with a load of pseudo-random values, and returns a `SourceMap`. `discover_tensors` names a module's live tensors.
This is the lowest layer that knows torch.
"""

from __future__ import annotations

from weightbridge.probe.live import NamedTensors, discover_tensors, live_tensors, local_tensor
from weightbridge.probe.probe import ProbeOptions, num_loads, probe
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
