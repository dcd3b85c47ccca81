"""The weight transfer backend `weightbridge` of vLLM: the part that lives in each worker.

vLLM makes one in every worker when an engine is started with `WeightTransferConfig(backend="weightbridge")`. Joining is all
that is ever asked of it: weights then come when trainers send them, in polls that the engine core makes on all workers
between two steps (`weightbridge.integrations.vllm_core`). This module imports vLLM; vLLM imports it when it is asked for.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from weightbridge.coordinator import Options
from weightbridge.errors import UsageError
from weightbridge.integrations import vllm_seat
from weightbridge.integrations.vllm_seat import JoinSettings

__all__ = [
    "InitInfo",
    "UpdateInfo",
    "WeightBridgeBackend",
    "attach_worker",
    "join_worker",
    "leave_worker",
    "poll_worker",
]

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_version: str = import_module("vllm.version").__version__

TESTED_VERSIONS = ("0.32.",)
_LOG = logging.getLogger("vllm.weightbridge")


@dataclass
class InitInfo(_base.WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing: the engine core reads what `init_weight_transfer_engine` is given."""


@dataclass
class UpdateInfo(_base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: trainers send."""


class WeightBridgeBackend(_base.WeightTransferEngine):  # type: ignore[misc]
    """One worker's. Methods are called by vLLM, on the worker's thread, on all workers of the engine."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker: Any = None
        self._socket: socket.socket | None = None
        self._core = ""
        if not _version.startswith(TESTED_VERSIONS):
            _LOG.warning(
                "weightbridge is tested with vLLM %s*, and this is %s",
                "*, ".join(TESTED_VERSIONS),
                _version,
            )

    def attach(self, worker: Any, core: str) -> bool:
        """The engine core listens at this name: an abstract Unix socket. False if it cannot be reached from here."""
        self._worker = worker
        self._core = core
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        return self._reaches_core()

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        return InitInfo()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Raises UsageError: an engine core that has attached takes the call itself, and asks `join` of its workers."""
        raise UsageError(
            "the engine core has not attached: VLLM_PLUGINS must be unset or name weightbridge, and the version of vLLM be one "
            f"of {', '.join(v + '*' for v in TESTED_VERSIONS)}"
        )

    def join(self, settings: JoinSettings) -> dict[str, Any]:
        """Join a session. The engine must have no requests. Returns a status, raises nothing."""
        return vllm_seat.status(self._worker, lambda: vllm_seat.join(self._worker, settings, on_request=self._wake))

    def start_weight_update(self) -> None:
        """The engine core refuses it, and update_weights, before they get here: trainers send."""
        raise UsageError("with weightbridge trainers send; there is no update to start")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """As start_weight_update."""
        raise UsageError("with weightbridge trainers send; there are no weights to receive")

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Leave the session; the engine serves on with the weights it has."""
        if self._worker is not None:
            vllm_seat.leave(self._worker)

    def _wake(self) -> None:
        """On a thread of the library: let the engine core poll."""
        self._reaches_core()

    def _reaches_core(self) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.sendto(b"\0", "\0" + self._core)
        except BlockingIOError:  # its queue is full: it is about to poll
            return True
        except OSError:
            return False  # it is on another machine, or gone
        return True


# What the engine core calls on every worker by collective_rpc; executors hand over the worker or a wrapper around it.


def attach_worker(worker: Any, core: str) -> bool:
    """Whether this worker can wake the core."""
    inner = getattr(worker, "worker", worker)
    return bool(inner.weight_transfer_engine.attach(inner, core))


def join_worker(worker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = getattr(worker, "worker", worker).weight_transfer_engine.join(JoinSettings(**settings))
    return found


def leave_worker(worker: Any) -> None:
    vllm_seat.leave(getattr(worker, "worker", worker))


def poll_worker(worker: Any) -> dict[str, Any]:
    """One poll. Returns a status, raises nothing.

    Besides what vllm_seat.status says: prefix_cache, the policy, and patience_seconds, how long to wait for a version that
    mends an engine with the halves of two.
    """
    inner = getattr(worker, "worker", worker)
    found = vllm_seat.status(inner, lambda: vllm_seat.poll(inner) if vllm_seat.joined(inner) else None)
    seat = vllm_seat.seat_of(inner)
    settings, options = (seat.settings, seat.options) if seat is not None else (JoinSettings(), Options())
    patience = options.connect_timeout_seconds + options.update_timeout_seconds
    return {**found, "prefix_cache": settings.prefix_cache, "patience_seconds": patience}
