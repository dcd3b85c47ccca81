"""Updates measured on an emulated cluster: network namespaces for nodes, links shaped by the kernel, workers as processes.

    python -m benchmarks.cluster SCENARIO [--json]

`netns` makes and removes the cluster, `scenarios` says which jobs are run on it, `model` is what the workers hold, `worker` is
one process, `crew` the set of them, `run` the measuring, `report` what is said of it. The usual methods (`broadcast`, `p2p`,
`files`) run on the same links in the same call.
"""

from __future__ import annotations

__all__: list[str] = []
