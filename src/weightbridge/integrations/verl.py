"""verl: WeightBridge as a checkpoint engine, under the name "weightbridge" in verl's own registry.

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightbridge
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightbridge.integrations.verl

verl hands a checkpoint engine whole tensors, on every actor rank, and asks it for whole tensors again beside every rollout
worker. Here every actor rank keeps its share of the rows in host memory, so that all of them send; every rollout worker gets
the checkpoint into host memory, over the network once a node, and yields it to verl's server adapter. The session is made at
the first update and lives until a worker comes, goes or fails: docs/guides/verl.md.

Importing this module registers the engine, so it imports verl.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.errors import SpecError, TransferTimeout, UsageError
from weightbridge.integrations.ray import Board, Session, host_session

__all__ = ["WeightBridgeCheckpointEngine"]

_base: Any = import_module("verl.checkpoint_engine.base")

_LOG = logging.getLogger(__name__)
_ENGINE = "rollout"
_LOOK_AGAIN_SECONDS = 0.01
_GRACE_SECONDS = 10.0

Rows = list[tuple[str, tuple[int, ...], str]]
"""A CheckpointSpec on its way: (name, global shape, dtype name)."""


@_base.CheckpointEngineRegistry.register("weightbridge")
class WeightBridgeCheckpointEngine(_base.CheckpointEngine):  # type: ignore[misc]
    """One worker's checkpoint engine, driven by verl's CheckpointEngineManager.

    For every update: prepare, build_topology, init_process_group, then send_weights and receive_weights at the same time,
    then finalize.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False, options: Mapping[str, Any] | None = None) -> None:
        """bucket_size: verl gives it; nothing is bucketed here. is_master: actor rank 0. options: fields of
        weightbridge.Options, by `checkpoint_engine.engine_kwargs.weightbridge.options`, the same on both sides."""
        self._is_master = is_master
        self._options = dict(options or {})
        self._limits = Options(**self._options)
        self._board: Any = None  # the master's: tells rollout workers what the actor sends
        self._adapter: SenderAdapter | ReceiverAdapter | None = None
        self._held: _Share | _Whole | None = None
        self._members: tuple[str, ...] = ()
        self._version = 0
        self._renew()

    # --- what verl calls -------------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Who this worker is, and on the master where a new session would be, should one be needed."""
        found: dict[str, Any] = {"identity": self._identity, "version": self._version}
        if self._is_master:
            if self._board is None:
                self._board = import_module("ray").remote(Board).options(num_cpus=0).remote()
            found |= {"session": host_session(), "board": self._board}
        return found

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """On the driver: the arguments of init_process_group for actors and for rollout workers."""
        hosts = [m for m in metadata[:actor_wg_world_size] if "session" in m]
        if len(hosts) != 1:
            raise UsageError(
                f"{len(hosts)} of {actor_wg_world_size} actor workers say that they are the checkpoint engine's master; verl "
                "makes rank 0 the one (is_master)"
            )
        common = {
            "session": hosts[0]["session"],
            "board": hosts[0]["board"],
            "members": tuple(m["identity"] for m in metadata),
            "version": max(m["version"] for m in metadata) + 1,
        }

        def side(size: int, is_trainer: bool) -> dict[str, list[Any]]:
            same = {name: [value] * size for name, value in common.items()}
            return {**same, "rank": list(range(size)), "world_size": [size] * size, "is_trainer": [is_trainer] * size}

        return side(actor_wg_world_size, True), side(rollout_world_size, False)

    def init_process_group(
        self, *, session: Session, board: Any, members: Sequence[str], version: int, rank: int, world_size: int,
        is_trainer: bool,
    ) -> None:  # fmt: skip
        """Take part in the next update. With the members of the last one the session goes on, else a new one begins."""
        self._version = version
        if tuple(members) == self._members:
            return
        self._leave()
        self._members = tuple(members)
        self._session, self._board = session, board
        self._rank, self._size, self._is_trainer = rank, world_size, is_trainer

    def finalize(self) -> None:
        """After each update: nothing is let go of, the next one uses it again."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """On every actor rank: `weights` yields (name, whole tensor), the same on each; making them may be collective.

        Returns when all rollout workers hold them, with what verl logs. Raises what SenderAdapter raises; the next update then
        begins a new session.
        """
        self._check_side(is_trainer=True, called="send_weights")
        session = self._session
        try:
            share = self._held if isinstance(self._held, _Share) else _Share(self._rank, self._size)
            await share.take(weights)
            if self._adapter is None:
                self._held = share
                spec = share.spec()
                if self._is_master:
                    rows: Rows = [(t.name, t.shape, t.dtype.torch_name) for t in spec.tensors]
                    await self._board.put.remote((self._session.token, rows))
                self._adapter = SenderAdapter(
                    group=(self._rank, self._size), checkpoint=spec, load_weights=share.load_weights, tensors=share.tensors,
                    engines=(_ENGINE,), **self._session.here(**self._options),
                )  # fmt: skip
                await asyncio.to_thread(self._adapter.connect)
            sender, version = self._adapter, self._version
            report = await asyncio.to_thread(lambda: sender.send_weights(version).wait())  # type: ignore[union-attr]
        except BaseException as error:
            self._fail(session, error)
            raise
        sent = sum(sent for sent, _ in report.network_bytes.values())
        return {
            "weightbridge/ewtt_seconds": report.ewtt_seconds,
            "weightbridge/agst_seconds": report.agst_seconds,
            "weightbridge/network_bytes": float(sent),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Beside every rollout worker: yields (name, whole tensor in host memory) once all of them have arrived.

        The memory is used again by the next update: copy what is to be kept. Raises TransferTimeout, or what ended the session.
        """
        self._check_side(is_trainer=False, called="receive_weights")
        session = self._session
        try:
            if self._adapter is None:
                spec = CheckpointSpec.from_iterable(await self._rows())
                whole = self._held = _Whole(spec)
                self._adapter = ReceiverAdapter(
                    group=(self._rank, self._size), checkpoint=spec, load_weights=whole.load_weights, tensors=whole.tensors,
                    engine=_ENGINE,
                    **self._session.here(**{**self._options, "idle_install": True, "backup_weights": False}),
                )  # fmt: skip
            await self._arrival()
        except BaseException as error:
            self._fail(session, error)
            raise
        for name, tensor in self._held.live.items():  # type: ignore[union-attr]
            yield name, tensor

    # --- inside --------------------------------------------------------------------------------------------------------

    async def _rows(self) -> Rows:
        """What the actor sends, as soon as its master has said so."""
        limit = self._limits.connect_timeout_seconds
        give_up = time.monotonic() + limit
        while time.monotonic() < give_up:
            said = await self._board.get.remote()
            if said is not None and said[0] == self._session.token:
                rows: Rows = said[1]
                return rows
            await asyncio.sleep(10 * _LOOK_AGAIN_SECONDS)
        raise TransferTimeout(
            f"rollout worker {self._rank} waited {limit:.0f} s for the actor's rank 0 to have gathered its weights once; if "
            "gathering them takes longer, raise engine_kwargs.weightbridge.options.connect_timeout_seconds",
            waiting_for=("trainer/0",), seconds=limit,
        )  # fmt: skip

    async def _arrival(self) -> None:
        """Until this worker holds the version of this update. It idles meanwhile, so nothing has to be polled."""
        receiver, version = self._adapter, self._version
        if not isinstance(receiver, ReceiverAdapter):
            raise UsageError("receive_weights needs a receiver; init_process_group made this worker an actor")
        limit = 5 * self._limits.connect_timeout_seconds + self._limits.update_timeout_seconds + _GRACE_SECONDS
        give_up = time.monotonic() + limit
        while receiver.version < version:
            failure = receiver.last_failure
            if failure is not None:
                raise failure
            if receiver is not self._adapter:
                raise UsageError(f"rollout worker {self._rank} was called for another update before this one ended")
            if time.monotonic() >= give_up:
                raise TransferTimeout(
                    f"rollout worker {self._rank} waited {limit:.0f} s for version {version}; look at the actor's rank "
                    "0, which hosts the session",
                    waiting_for=("trainer/0",), seconds=limit,
                )  # fmt: skip
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    def _check_side(self, *, is_trainer: bool, called: str) -> None:
        if not self._members:
            raise UsageError(
                f"{called} before init_process_group; let verl's CheckpointEngineManager drive this engine"
            )
        if self._is_trainer != is_trainer:
            raise UsageError(f"{called} was called on the {'actor' if self._is_trainer else 'rollout'} side")

    def _renew(self) -> None:
        self._identity = secrets.token_hex(8)

    def _leave(self) -> None:
        if self._adapter is not None:
            self._adapter.close()
        self._adapter, self._held, self._members = None, None, ()

    def _fail(self, session: Session, error: BaseException) -> None:
        """A worker that failed is a new one to everybody at the next update: all of them begin a new session.

        session: the one that failed; nothing happens when a later one has begun meanwhile. The error is logged because Ray
        shows the driver that of one worker only, which may be another's that lost this one.
        """
        if self._session is session:
            side = "actor" if self._is_trainer else "rollout worker"
            _LOG.error("weightbridge: %s %d of %d: %s: %s", side, self._rank, self._size, type(error).__name__, error)
            self._leave()
            self._renew()


class _Share:
    """An actor rank's rows of every tensor, in host memory: as torch.chunk cuts them along dim 0; the last may have fewer."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.live: dict[str, torch.Tensor] = {}

    async def take(self, weights: Any) -> None:
        """Keep this rank's rows of whole tensors. The first time it learns which there are; then they must be the same."""
        known = bool(self._shapes)
        taken = set()
        async for name, full in _each(weights):
            found = (tuple(full.shape), full.dtype)
            if known and self._shapes.get(name) != found:
                raise SpecError(
                    f"tensor {name!r} is {found} in this update and was {self._shapes.get(name, 'absent')} in the first; a "
                    "session sends the same tensors every time",
                    tensor=name,
                )
            if not known:
                self._shapes[name] = found
                self.live[name] = torch.empty(self._rows(full).shape, dtype=full.dtype)
            self.live[name].copy_(self._rows(full))
            taken.add(name)
        missing = self._shapes.keys() - taken
        if missing:
            raise SpecError(
                f"{len(missing)} tensors of the first update are missing in this one, {min(missing)!r} among them; a session "
                "sends the same tensors every time",
                tensor=min(missing),
            )

    def spec(self) -> CheckpointSpec:
        return CheckpointSpec.from_iterable((name, shape, dtype) for name, (shape, dtype) in self._shapes.items())

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, full in tensors:
            self.live[name].copy_(self._rows(full))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        rows = full.detach() if full.dim() else full.detach().reshape(1)
        per_rank = -(-rows.shape[0] // self._size)
        return rows[self._rank * per_rank : (self._rank + 1) * per_rank]


class _Whole:
    """Every tensor whole, in host memory."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self.live = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype.torch_name)) for t in spec.tensors}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, full in tensors:
            self.live[name].copy_(full)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """verl's generators are plain or asynchronous ones."""
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
