"""Wire form of a Plan: one MessagePack document, typed, bounded and checked. Arrays travel raw, little-endian."""

from __future__ import annotations

from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from weightbridge.errors import PlanError, UsageError
from weightbridge.plan.plan import HOP, ROUTE, AtomTable, Bounds, Plan, ReplicaClass
from weightbridge.plan.topology import NodeGroup, Role, Topology, Worker

__all__ = ["MAX_PLAN_BYTES", "decode_plan", "encode_plan"]

MAX_PLAN_BYTES = 1 << 30
_FORMAT = 2
_INT64 = np.dtype("<i8")


class _Array(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    shape: tuple[int, ...]
    data: bytes


class _Worker(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    role: Role
    node: str
    rank: int
    engine: str
    bandwidth: float


class _Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    nodes: tuple[str, ...]
    bandwidth: float


class _Class(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    holders: tuple[int, ...]
    needers: tuple[int, ...]
    nbytes: int


class _Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    digest: str
    epoch: int
    spec_digest: str
    workers: tuple[_Worker, ...]
    node_bandwidth: tuple[tuple[str, float], ...]
    tensor: _Array
    start: _Array
    step: _Array
    count: _Array
    class_id: _Array
    stream_offset: _Array
    classes: tuple[_Class, ...]
    routes: _Array
    hops: _Array
    rounds: int
    alignment: int
    unit_bytes: int
    slot_bytes: int
    bounds: tuple[float, float, float]
    dual: tuple[float, ...]
    groups: tuple[_Group, ...] = ()


def _pack(array: npt.NDArray[np.generic]) -> _Array:
    return _Array(shape=array.shape, data=array.tobytes())


def _unpack(what: str, array: _Array, dtype: np.dtype[np.generic], ndim: int) -> npt.NDArray[np.generic]:
    if len(array.shape) != ndim or min(array.shape) < 0 or prod(array.shape) * dtype.itemsize != len(array.data):
        raise PlanError(
            f"plan column {what!r} has shape {array.shape} and {len(array.data)} bytes, expected {ndim} dims of "
            f"{dtype.itemsize} bytes an element; the message is damaged or from another version"
        )
    return np.frombuffer(array.data, dtype=dtype).reshape(array.shape)


def _topology(m: _Plan) -> Topology:
    try:
        workers = tuple(
            Worker(name=w.name, role=w.role, node=w.node, rank=w.rank, engine=w.engine, bandwidth=w.bandwidth)
            for w in m.workers
        )
        groups = tuple(NodeGroup(name=g.name, nodes=g.nodes, bandwidth=g.bandwidth) for g in m.groups)
        return Topology(workers=workers, node_bandwidth=m.node_bandwidth, groups=groups)
    except UsageError as error:
        raise PlanError(f"the plan's topology makes no sense: {error}") from error


def encode_plan(plan: Plan) -> bytes:
    """The plan as bytes. Equal plans give equal bytes."""
    a, b = plan.atoms, plan.bounds
    return msgspec.msgpack.encode(
        _Plan(
            format=_FORMAT,
            digest=plan.digest,
            epoch=plan.epoch,
            spec_digest=plan.spec_digest,
            workers=tuple(_Worker(w.name, w.role, w.node, w.rank, w.engine, w.bandwidth) for w in plan.topology.workers),
            node_bandwidth=plan.topology.node_bandwidth,
            tensor=_pack(a.tensor), start=_pack(a.start), step=_pack(a.step), count=_pack(a.count),
            class_id=_pack(a.class_id), stream_offset=_pack(a.stream_offset),
            classes=tuple(_Class(c.holders, c.needers, c.nbytes) for c in plan.classes),
            routes=_pack(plan.routes), hops=_pack(plan.hops),
            rounds=plan.rounds, alignment=plan.alignment, unit_bytes=plan.unit_bytes, slot_bytes=plan.slot_bytes,
            bounds=(b.t_min_seconds, b.link_bound_seconds, b.busiest_link_seconds), dual=b.dual,
            groups=tuple(_Group(g.name, g.nodes, g.bandwidth) for g in plan.topology.groups),
        )
    )  # fmt: skip


def decode_plan(data: bytes, *, max_bytes: int = MAX_PLAN_BYTES) -> Plan:
    """Inverse of encode_plan. Raises PlanError when the bytes are too many, malformed, or not what their digest says.

    It checks form, not sense: whoever receives a plan runs `verify_plan` (or verifies its own program) before using it.
    """
    if len(data) > max_bytes:
        raise PlanError(f"the plan has {len(data)} bytes, more than the {max_bytes} allowed")
    try:
        m = msgspec.msgpack.decode(data, type=_Plan)
    except msgspec.MsgspecError as error:
        raise PlanError(f"the plan does not decode: {error}; the message is damaged or from another version") from error
    if m.format != _FORMAT:
        raise PlanError(
            f"the plan has wire format {m.format}, this side speaks {_FORMAT}; use the same version on all sides"
        )
    columns = {
        name: _unpack(name, getattr(m, name), _INT64, 2 if name in ("start", "step", "count") else 1).astype(np.int64)
        for name in ("tensor", "start", "step", "count", "class_id", "stream_offset")
    }
    rows = {len(column) for column in columns.values()}
    if len(rows) != 1 or min(m.rounds, m.alignment, m.unit_bytes, m.slot_bytes) < 1:
        raise PlanError(
            "the plan's atom columns differ in length, or its rounds, alignment, unit or slot size is not positive"
        )
    t_min, link_bound, busiest = m.bounds
    plan = Plan(
        epoch=m.epoch,
        spec_digest=m.spec_digest,
        topology=_topology(m),
        atoms=AtomTable(**columns),
        classes=tuple(ReplicaClass(holders=c.holders, needers=c.needers, nbytes=c.nbytes) for c in m.classes),
        routes=_unpack("routes", m.routes, ROUTE, 1).copy(),
        hops=_unpack("hops", m.hops, HOP, 1).copy(),
        rounds=m.rounds,
        alignment=m.alignment,
        unit_bytes=m.unit_bytes,
        slot_bytes=m.slot_bytes,
        bounds=Bounds(t_min_seconds=t_min, link_bound_seconds=link_bound, busiest_link_seconds=busiest, dual=m.dual),
    )
    if plan.digest != m.digest:
        raise PlanError(f"the plan's digest is {plan.digest}, the message says {m.digest}; it was damaged on the way")
    return plan
