"""Random meshes: every plan verifies, and moving bytes as it says equals loading the checkpoint on every rollout.

The oracle is a loader written as NumPy slicing. Delivery is simulated here on plain element indices, with neither the
planner's nor the verifier's code: what a worker can read in its node must be exactly what its loader would load.
"""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightbridge.layout.boxes import expand
from weightbridge.plan import PlanOptions, decode_plan, encode_plan, make_plan, verify_plan
from weightbridge.plan.topology import Role
from weightbridge.testing.strategies import jobs

relaxed = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
options = st.builds(
    PlanOptions,
    slot_bytes=st.sampled_from([256, 1024, 1 << 20]),
    alignment=st.sampled_from([64, 128]),
    min_rounds=st.integers(1, 4),
)


def loaded_elements(job, worker):
    """Per tensor the element indices that the worker's loader takes, by loading indices instead of values."""
    low = job.spec.numel_offsets
    index = {
        t.name: np.arange(lo, lo + t.numel).reshape(t.shape) for t, lo in zip(job.spec.tensors, low[:-1], strict=True)
    }
    loader = job.loaders[worker]
    storages = [np.full(t.span_numel, -1, dtype=np.int64) for t in loader.live]
    loader.load(storages, index)
    found = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *storages]))
    return set(found[found >= 0].tolist())


def stream_of(plan, spec, class_id):
    """[nbytes] global element index of every byte of a class stream."""
    a, parts = plan.atoms, [np.zeros(0, dtype=np.int64)]
    for i in np.flatnonzero(a.class_id == class_id):
        t = spec.tensors[a.tensor[i]]
        index = np.arange(t.numel).reshape(t.shape)[
            tuple(
                slice(s, s + d * (n - 1) + 1, d)
                for s, d, n in zip(a.start[i], a.step[i], a.count[i][: len(t.shape)], strict=False)
            )
        ]
        parts.append(np.repeat(index.reshape(-1) + spec.numel_offsets[a.tensor[i]], t.dtype.itemsize))
    return np.concatenate(parts)


def itemsizes(spec):
    return np.repeat([t.dtype.itemsize for t in spec.tensors], [t.numel for t in spec.tensors])


def constant_elements(spec):
    low = spec.numel_offsets
    return {g for name in spec.constants for g in range(low[spec.index[name]], low[spec.index[name] + 1])}


@given(jobs(), options)
@relaxed
def test_every_node_receives_exactly_what_its_loaders_load(job, opts):
    plan = make_plan(job.spec, job.topology, job.maps, options=opts)
    streams = [stream_of(plan, job.spec, i) for i in range(len(plan.classes))]
    sizes, fixed, workers = itemsizes(job.spec), constant_elements(job.spec), job.topology.workers
    received = {name: np.zeros(job.spec.numel, dtype=np.int64) for name in job.topology.nodes}  # bytes of each element
    crossed = np.zeros(job.spec.numel, dtype=np.int64)
    for i, route in enumerate(plan.routes):
        sender, entry = workers[route["sender"]], workers[route["entry"]]
        holds = loaded_elements(job, route["sender"])
        for k in range(plan.rounds):
            lo, hi = plan.part(i, k)
            part = streams[route["class_id"]][lo:hi]
            assert set(part.tolist()) <= holds
            for node in [entry.node, *(workers[h["dst"]].node for h in plan.hops[plan.hops["route"] == i])]:
                np.add.at(received[node], part, 1)
            if sender.node != entry.node:
                np.add.at(crossed, part, 1)
    assert (crossed <= sizes).all()  # no byte leaves the trainers twice
    for name in job.topology.nodes:
        needed = set().union(*(loaded_elements(job, w) for w in job.topology.on_node(name, Role.ROLLOUT))) - fixed
        got = received[name]
        assert set(np.flatnonzero(got).tolist()) == needed
        assert (got[sorted(needed)] == sizes[sorted(needed)]).all()


@given(jobs(), options)
@relaxed
def test_every_plan_verifies_both_ways_and_survives_the_wire(job, opts):
    plan = make_plan(job.spec, job.topology, job.maps, options=opts)
    facts = verify_plan(plan, job.spec, job.maps)
    assert verify_plan(plan, job.spec, job.maps, exact_numel=0) == facts
    back = decode_plan(encode_plan(plan))
    assert back.digest == plan.digest == make_plan(job.spec, job.topology, job.maps, options=opts).digest
    assert verify_plan(back, job.spec, job.maps) == facts
    assert plan.bounds.t_min_seconds <= plan.bounds.busiest_link_seconds * (1 + 1e-6)


@given(jobs(max_tensors=2, max_extent=6), st.integers(0, 1 << 30))
@relaxed
def test_boxes_place_every_element_where_the_loader_does(job, seed):
    checkpoint = job.checkpoint(seed)
    for worker, source_map in enumerate(job.maps):
        storages = job.loaders[worker].storages()
        table = expand(source_map, job.spec)
        for row in range(len(table)):
            t = job.spec.tensors[table.tensor[row]]
            rank = len(t.shape)
            grid = np.indices(table.count[row]).reshape(table.num_dims, -1)
            at = table.start[row][:, None] + table.step[row][:, None] * grid
            live = table.live_start[row] + (table.live_stride[row][:, None] * grid).sum(axis=0)
            storages[table.live[row]][live] = checkpoint[t.name][tuple(at[:rank])]
        for built, loaded in zip(storages, job.loaded(worker, checkpoint), strict=True):
            assert built.tobytes() == loaded.tobytes()
