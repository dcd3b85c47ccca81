"""What the vLLM tests run inside the engine's workers, besides joining and polling: probing, and looking at live bits.

Every method returns a dict and raises nothing: an exception in a worker's RPC leaves stale answers behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import vllm._custom_ops
from tests.integration.vllm_engines import checkpoints

from weightbridge import discover_tensors, spec_from_folder
from weightbridge.integrations.vllm import WorkerExtension
from weightbridge.layout.coverage_live import missing_elements
from weightbridge.probe import NamedTensors, predict, probe

__all__ = ["WITHOUT_ONEDNN", "ProbingExtension"]

WITHOUT_ONEDNN = "WEIGHTBRIDGE_TEST_WITHOUT_ONEDNN"

if os.environ.get(WITHOUT_ONEDNN):
    # As on a CPU whose oneDNN cannot take bf16: linear layers keep their weights where they were loaded.
    vllm._custom_ops._supports_onednn = False

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Method = Callable[..., dict[str, Any]]


def answering(method: Method) -> Method:
    @wraps(method)
    def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return {"error": "", **method(*args, **kwargs)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Raw bits from the first to the last element in memory, gaps included."""
    local = tensor.detach()
    span = 1 + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True)) if local.numel() else 0
    flat = torch.as_strided(local, (span,), (1,)).view(_SIGNED[local.element_size()])
    return flat.numpy().view(_UNSIGNED[local.element_size()])


class ProbingExtension(WorkerExtension):
    @answering
    def test_probe(self, folder: str) -> dict[str, Any]:
        """This worker's map, in facts. The engine must have joined."""
        weights = self._weightbridge.weights
        spec = spec_from_folder(folder)
        before = {n: bits(t).copy() for n, t in weights.tensors().items()}
        found = self.source_map = probe(spec=spec, load_weights=weights.load_weights, tensors=weights.tensors)
        after = weights.tensors()
        parameters = {t.name for t in found.live if t.parameter and t.numel}
        covered = {found.live[i].name for i in found.copies.live.tolist()}
        return {
            "kinds": weights.kinds,
            "kind_of": {x.name: x.kind for x in weights.layers},
            "num_copies": len(found.copies),
            "untouched_parameters": sorted(parameters & set(found.untouched)),
            "uncovered_parameters": sorted(parameters - covered),
            "missing": missing_elements(spec, [found]),
            "constants": {
                found.live[c.live].name: [c.live_start, [n for n, _ in c.axes], c.bits] for c in found.constants
            },
            "shapes": {t.name: list(t.shape) for t in found.live if t.parameter},
            "put_back": all(np.array_equal(before[n], bits(after[n])) for n in before),
            "raw_empty": sorted(n for n, p in self.model_runner.get_model().named_parameters() if not p.numel()),
        }

    @answering
    def test_expert_rows(self, folder: str, name: str) -> dict[str, Any]:
        """How many slice copies draw on one checkpoint tensor, and where its first elements lie."""
        spec, found = spec_from_folder(folder), self.source_map
        rows = np.flatnonzero(found.copies.tensor == spec.index[name])
        first = [found.copies.live_start[r] for r in rows if not found.copies.src_start[r]]
        return {"copies": len(rows), "axes": found.copies.count[rows].tolist()[:2], "first": [int(f) for f in first]}

    @answering
    def test_holds(self, folder: str) -> dict[str, Any]:
        """Names of live tensors whose bits are not what the map says of the checkpoint in `folder`."""
        spec, given, found = spec_from_folder(folder), checkpoints.read(folder), self.source_map
        live = self._weightbridge.weights.tensors()

        def values(tensor: int, lo: int, hi: int) -> np.ndarray[Any, Any]:
            return bits(given[spec.tensors[tensor].name])[lo:hi]

        wrong, compared = [], 0
        for position, described in enumerate(found.live):
            expected, times = predict(spec, found, position, values)
            accounted = times > 0
            compared += int(accounted.sum())
            if (times > 1).any() or not np.array_equal(expected[accounted], bits(live[described.name])[accounted]):
                wrong.append(described.name)
        return {"wrong": wrong, "compared": compared}

    @answering
    def test_addresses(self) -> dict[str, Any]:
        return {n: t.data_ptr() for n, t in self._weightbridge.weights.tensors().items() if t.numel()}

    @answering
    def test_naive_probe(self, folder: str) -> dict[str, Any]:
        """What the probe says of the engine's own loader and parameters, without the integration."""
        model = self.model_runner.get_model()
        found = probe(
            spec=spec_from_folder(folder), load_weights=model.load_weights, tensors=lambda: _weights_of(model)
        )
        return {"copies": len(found.copies), "missing": missing_elements(spec_from_folder(folder), [found])}

    @answering
    def test_naive_load(self, folder: str) -> dict[str, Any]:
        """The engine's own loader and nothing else: names of parameters that hold other bits afterwards."""
        model = self.model_runner.get_model()
        before = {n: bits(t).copy() for n, t in _weights_of(model).items()}
        model.load_weights(iter(checkpoints.read(folder).items()))
        return {"changed": [n for n, t in _weights_of(model).items() if not np.array_equal(before[n], bits(t))]}

    @answering
    def test_load(self, folder: str) -> dict[str, Any]:
        """The integration's loader: names of tensors that hold other bits afterwards."""
        weights = self._weightbridge.weights
        changed = weights.adopt(checkpoints.read(folder).items())
        weights.renew()
        return {"changed": list(changed)}

    @answering
    def test_partial_load(self, folder: str, left_out: str) -> dict[str, Any]:
        given = {n: t for n, t in checkpoints.read(folder).items() if n != left_out}
        self._weightbridge.weights.load_weights(iter(given.items()))
        return {}


def _weights_of(model: torch.nn.Module) -> NamedTensors:
    names = {n for n, _ in model.named_parameters()}
    return NamedTensors({n: t for n, t in discover_tensors(model).items() if n in names})
