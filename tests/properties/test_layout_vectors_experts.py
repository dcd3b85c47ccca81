"""Feed-forward layouts: gate/up halves, stacked experts, expert parallelism, replicated slots, shared experts, transposes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.properties.layout_loaders import (
    BF16,
    CONSTANT,
    F32,
    Ints,
    Rank,
    Stream,
    check,
    find,
    live_like,
    num_copies,
    numbers,
    rows,
    spec_of,
    whole_state,
)

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.layout import expand, unused_tensors
from weightbridge.probe import probe

H = 5


# --- dense ------------------------------------------------------------------------------------------------------------


def dense_spec(inner: int) -> CheckpointSpec:
    return spec_of(gate=(inner, H), up=(inner, H), down=(H, inner))


def dense_rank(spec: CheckpointSpec, r: int, t: int) -> Rank:
    """[gate_r; up_r] and the columns of down: an engine's merged projection and a trainer's linear_fc1 alike."""
    inner = spec.tensors[spec.index["gate"]].shape[0]
    own = range(r * inner // t, (r + 1) * inner // t)
    fused = np.empty((2 * len(own), H), dtype=np.int64)
    for i in range(2 * len(own)):  # live row i < F/t is gate row r*F/t + i, the others are up row r*F/t + i - F/t
        name, at = ("gate", i) if i < len(own) else ("up", i - len(own))
        fused[i] = numbers(spec, name)[own.start + at]
    origin = {"gate_up": fused, "down": numbers(spec, "down")[:, own.start : own.stop]}
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name == "down":
                live["down"].copy_(loaded.narrow(1, own.start, len(own)))
            else:
                live["gate_up"].narrow(0, ("gate", "up").index(name) * len(own), len(own)).copy_(
                    loaded.narrow(0, own.start, len(own))
                )

    return Rank(live=live, load=load, origin=origin)


def test_case_b052_gate_and_up_halves_of_trainers_reach_engines_of_other_degrees() -> None:
    """A trainer's parts end to end would be gate, up, gate, up: halves must be put together by what they hold."""
    spec = dense_spec(12)
    trainers = [dense_rank(spec, r, 2) for r in range(2)]
    for t in (1, 3, 4):
        check(spec, [dense_rank(spec, r, t) for r in range(t)], trainers=trainers)
    concatenated = np.concatenate([t.origin["gate_up"] for t in trainers])
    assert (concatenated != dense_rank(spec, 0, 1).origin["gate_up"]).any()


# --- stacked experts --------------------------------------------------------------------------------------------------


def expert_spec(
    experts: int, inner: int, *, names: Sequence[str] = ("gate", "up", "down"), shared: int = 0
) -> CheckpointSpec:
    shapes: dict[str, tuple[int, ...]] = {}
    for e in range(experts):
        shapes |= {f"experts.{e}.{n}": (H, inner) if n == names[2] else (inner, H) for n in names}
    if shared:
        shapes |= {f"shared.{n}": (H, shared) if n == names[2] else (shared, H) for n in names}
    return spec_of(**shapes)


def expert_rank(
    spec: CheckpointSpec,
    slots: Sequence[int],
    inner: int,
    *,
    r: int = 0,
    t: int = 1,
    padded: int = 0,
    up_first: bool = False,
    names: Sequence[str] = ("gate", "up", "down"),
    flip_after_load: bool = False,
) -> Rank:
    """w13 [slots, 2 * half, H] and w2 [slots, H, half]. slots: the global expert of each physical slot. padded: size of a
    half in memory, zeros behind the real rows. up_first: the order of the halves."""
    gate, up, down = names
    own, half = inner // t, padded or inner // t
    w13 = np.full((len(slots), 2 * half, H), CONSTANT, dtype=np.int64)
    w2 = np.full((len(slots), H, half), CONSTANT, dtype=np.int64)
    for slot, e in enumerate(slots):
        for i in range(own):
            w13[slot, i + (half if up_first else 0)] = numbers(spec, f"experts.{e}.{gate}")[r * own + i]
            w13[slot, i + (0 if up_first else half)] = numbers(spec, f"experts.{e}.{up}")[r * own + i]
            w2[slot, :, i] = numbers(spec, f"experts.{e}.{down}")[:, r * own + i]
    live = live_like({"w13": w13, "w2": w2})
    for tensor in live.values():
        tensor.zero_()  # padding is zeroed when the parameters are made

    def load(tensors: Stream) -> None:
        if half > own:
            for tensor in live.values():
                tensor.zero_()
        for name, loaded in tensors:
            _, e, projection = name.split(".")
            for slot in [i for i, g in enumerate(slots) if g == int(e)]:  # all replicas; none: not on this rank
                if projection == down:
                    live["w2"][slot].narrow(1, 0, own).copy_(loaded.narrow(1, r * own, own))
                else:
                    second = (projection == up) != (up_first and not flip_after_load)
                    live["w13"][slot].narrow(0, half if second else 0, own).copy_(loaded.narrow(0, r * own, own))
        if flip_after_load:
            live["w13"].copy_(torch.cat(list(live["w13"].chunk(2, dim=1))[::-1], dim=1))

    return Rank(live=live, load=load, origin={"w13": w13, "w2": w2})


def test_stacked_experts_under_tensor_parallelism_with_padded_halves() -> None:
    experts, inner, t = 3, 10, 2
    spec = expert_spec(experts, inner)
    maps = check(spec, [expert_rank(spec, range(experts), inner, r=r, t=t, padded=8) for r in range(t)])
    # `up` begins at the padded half: row 8, not F / t = 5; its rows in the checkpoint are counted without padding.
    boxes = expand(maps[1], spec)
    chosen = (boxes.tensor == spec.index["experts.0.up"]) & (boxes.live == 0)
    assert (boxes.live_start[chosen] // H).tolist() == [8]
    assert boxes.start[chosen, 0].tolist() == [5]


def test_case_b060_experts_of_expert_parallel_ranks_are_counted_globally() -> None:
    spec = expert_spec(4, 2)
    trainers = [expert_rank(spec, [2 * r, 2 * r + 1], 2) for r in range(2)]
    engines = [expert_rank(spec, [r], 2) for r in range(4)]
    check(spec, engines, trainers=trainers)
    # Example: rank 1 of two holds expert 2 first, and w13[0, 2 + i, h] is up of expert 2 at [i, h].
    h, i = np.meshgrid(np.arange(H), np.arange(2))
    assert (trainers[1].origin["w13"][0, 2 + i, h] == numbers(spec, "experts.2.up")[i, h]).all()


def test_case_b050_b055_each_expert_parallel_rank_is_probed_by_itself() -> None:
    """Two ranks that load the same experts, or an option that swaps dims, show in the maps and in coverage."""
    spec = expert_spec(4, 2)
    wrong = [find(spec, expert_rank(spec, [0, 1], 2)) for _ in range(2)]
    assert unused_tensors(spec, wrong) == tuple(f"experts.{e}.{n}" for e in (2, 3) for n in ("gate", "up", "down"))
    square = spec_of(w=(3, 4, 4))
    live = {"w": torch.zeros(3, 4, 4, dtype=BF16)}
    maps = []
    for dims in ((1, 2), (2, 1)):
        origin = {"w": numbers(square, "w").transpose(0, *dims)}
        load = whole_state(lambda s, d=dims: live["w"].copy_(s["w"].permute(0, *d)))  # type: ignore[misc]
        maps.append(find(square, Rank(live=live, load=load, origin=origin)))
    assert maps[0].fingerprint != maps[1].fingerprint


def test_case_b057_one_logical_expert_in_several_physical_slots() -> None:
    spec = expert_spec(8, 3)
    physical = [0, 5, 2, 3, 4, 5, 6, 7, 1, 2]  # 8 logical, 10 physical: 2 and 5 are there twice
    ranks = [expert_rank(spec, physical[5 * r : 5 * r + 5], 3) for r in range(2)]
    maps = check(spec, ranks)
    moved = [expert_rank(spec, [physical[i] for i in (1, 0, 2, 3, 4)], 3), ranks[1]]  # rebalanced while it runs
    again = check(spec, moved)
    assert [a.fingerprint == b.fingerprint for a, b in zip(maps, again, strict=True)] == [False, True]


def test_case_b064_a_fused_shared_expert_takes_the_last_slot_and_is_missed_when_it_is_dropped() -> None:
    spec = expert_spec(3, 4, shared=4)
    last = {f"shared.{n}": f"experts.3.{n}" for n in ("gate", "up", "down")}
    renamed = CheckpointSpec.from_iterable((last.get(t.name, t.name), t.shape, BF16) for t in spec.tensors)
    inside = expert_rank(renamed, range(4), 4)

    def load(tensors: Stream) -> None:
        inside.load((last.get(name, name), tensor) for name, tensor in tensors)

    rank = Rank(live=inside.live, load=load, origin=inside.origin)  # the order of elements is that of `renamed`
    check(spec, [rank])

    dropping = expert_rank(spec, range(3), 4)

    def routed_only(tensors: Stream) -> None:
        dropping.load((name, tensor) for name, tensor in tensors if name.startswith("experts"))

    found = find(spec, Rank(live=dropping.live, load=routed_only, origin=dropping.origin))
    assert unused_tensors(spec, [found]) == ("shared.gate", "shared.up", "shared.down")


def test_a_wide_shared_expert_is_split_into_slots() -> None:
    """Rows for gate and up, columns for down."""
    inner, num_shared = 3, 2
    spec = expert_spec(2, inner, shared=num_shared * inner)
    w13 = np.empty((4, 2 * inner, H), dtype=np.int64)
    w2 = np.empty((4, H, inner), dtype=np.int64)
    for slot in range(4):
        part = slice(None) if slot < 2 else slice((slot - 2) * inner, (slot - 1) * inner)
        source = f"experts.{slot}" if slot < 2 else "shared"
        w13[slot] = np.concatenate([numbers(spec, f"{source}.{n}")[part] for n in ("gate", "up")])
        w2[slot] = numbers(spec, f"{source}.down")[:, part]
    live = live_like({"w13": w13, "w2": w2})

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            owner, _, projection = name.rpartition(".")
            down = projection == "down"
            parts = loaded.chunk(num_shared, dim=1 if down else 0) if owner == "shared" else [loaded]
            first = 2 if owner == "shared" else int(owner.split(".")[1])
            for slot, part in enumerate(parts, start=first):
                target = live["w2"][slot] if down else live["w13"][slot].chunk(2)[("gate", "up").index(projection)]
                target.copy_(part)

    check(spec, [Rank(live=live, load=load, origin={"w13": w13, "w2": w2})])


def test_the_order_of_halves_is_found_whether_it_is_made_while_loading_or_by_a_flip_afterwards() -> None:
    spec = expert_spec(2, 3)
    maps = [
        check(spec, [expert_rank(spec, range(2), 3, **how)])[0]  # type: ignore[arg-type]
        for how in ({}, {"up_first": True}, {"up_first": True, "flip_after_load": True})
    ]
    assert maps[0].fingerprint != maps[1].fingerprint == maps[2].fingerprint


def test_w1_w2_w3_are_gate_down_up() -> None:
    spec = expert_spec(3, 4, names=("w1", "w3", "w2"))
    order = ("w1", "w2", "w3")
    on_disk = CheckpointSpec.from_iterable(
        (f"experts.{e}.{n}", (H, 4) if n == "w2" else (4, H), BF16) for e in range(3) for n in order
    )
    assert on_disk.digest != spec.digest
    ranks = [expert_rank(on_disk, range(3), 4, r=r, t=2, names=("w1", "w3", "w2")) for r in range(2)]
    check(on_disk, ranks)


def test_case_b045_b046_packed_experts_of_a_trainer_become_per_expert_names() -> None:
    experts, inner = 3, 4
    spec = expert_spec(experts, inner)
    packed = np.stack(
        [np.concatenate([numbers(spec, f"experts.{e}.{n}") for n in ("gate", "up")]) for e in range(experts)]
    )
    down = np.stack([numbers(spec, f"experts.{e}.down") for e in range(experts)])
    for transposed in (False, True):  # older and newer releases keep the packed tensors in either orientation
        origin = {"gate_up_proj": packed, "down_proj": down}
        if transposed:
            origin = {n: a.transpose(0, 2, 1).copy() for n, a in origin.items()}
        held = live_like(origin)

        def write(s: dict[str, torch.Tensor], held: dict[str, torch.Tensor] = held, turn: bool = transposed) -> None:
            gate_up = torch.stack([torch.cat([s[f"experts.{e}.gate"], s[f"experts.{e}.up"]]) for e in range(experts)])
            stacked = torch.stack([s[f"experts.{e}.down"] for e in range(experts)])
            held["gate_up_proj"].copy_(gate_up.transpose(1, 2) if turn else gate_up)
            held["down_proj"].copy_(stacked.transpose(1, 2) if turn else stacked)

        trainer = Rank(live=held, load=whole_state(write), origin=origin)
        check(spec, [expert_rank(spec, range(experts), inner, r=r, t=2) for r in range(2)], trainers=[trainer])


def test_case_b053_a_loader_that_goes_by_the_rank_of_a_tensor_is_given_the_ranks_of_the_spec() -> None:
    experts, inner = 2, 3
    spec = spec_of(**{"experts.0.gate_up_proj": (2 * inner, H), "experts.gate_up_proj": (experts - 1, 2 * inner, H)})
    origin = {
        "w13": np.concatenate([numbers(spec, "experts.0.gate_up_proj")[None], numbers(spec, "experts.gate_up_proj")])
    }
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for _, loaded in tensors:
            if loaded.dim() == 3:  # 'fused', by rank alone
                live["w13"][1:].copy_(loaded)
            else:
                live["w13"][0].copy_(loaded)

    check(spec, [Rank(live=live, load=load, origin=origin)])


def test_a_mapping_that_changes_after_the_first_three_dimensional_tensor() -> None:
    """The order of the checkpoint is part of what is probed: another order, another map."""

    def ordered(names: Sequence[str]) -> tuple[CheckpointSpec, Rank]:
        spec = CheckpointSpec.from_iterable((n, (2, 3, H) if n == "packed" else (3, H), BF16) for n in names)
        packed_first = names.index("packed") < names.index("w")
        w = numbers(spec, "w")
        origin = {"w": w[::-1] if packed_first else w, "packed": numbers(spec, "packed")}
        live = live_like(origin)

        def load(tensors: Stream) -> None:
            fused = False
            for name, loaded in tensors:
                fused |= loaded.dim() == 3
                live[name].copy_(loaded.flip(0) if fused and name == "w" else loaded)

        return spec, Rank(live=live, load=load, origin=origin)

    for names in (("w", "packed"), ("packed", "w")):
        spec, rank = ordered(names)
        check(spec, [rank])


def test_grouped_down_projections_are_cut_along_columns_whatever_the_metadata_say() -> None:
    """Some trainers mark a grouped fc2 as cut along dim 0; the values show dim 1."""
    spec = expert_spec(2, 6)
    trainers = [expert_rank(spec, range(2), 6, r=r, t=3) for r in range(3)]
    for rank in trainers:
        rank.live["w2"].partition_dim = 0  # type: ignore[attr-defined]
    check(spec, [expert_rank(spec, [e], 6) for e in range(2)], trainers=trainers)


def test_case_b065_expert_tensor_parallelism_that_differs_from_the_dense_one() -> None:
    """EP 1, TP 2, ETP 1: dense parts are sharded, experts are whole on both ranks."""
    names = {"experts.0.gate": (4, H), "experts.0.up": (4, H), "experts.0.down": (H, 4)}
    spec = spec_of(**names, o=(H, 6))

    def trainer(r: int) -> Rank:
        dense = {"o": numbers(spec, "o")[:, 3 * r : 3 * r + 3]}
        experts = expert_rank(spec, [0], 4)
        live = {**experts.live, **live_like(dense)}

        def load(tensors: Stream) -> None:
            state = dict(tensors)
            live["o"].copy_(state.pop("o").chunk(2, dim=1)[r])
            experts.load(state.items())

        return Rank(live=live, load=load, origin={**experts.origin, **dense})

    engine = expert_rank(spec, [0], 4, r=0, t=1)
    live = {**engine.live, "o": torch.zeros(H, 6, dtype=BF16)}

    def load(tensors: Stream) -> None:
        state = dict(tensors)
        live["o"].copy_(state.pop("o"))
        engine.load(state.items())

    whole = Rank(live=live, load=load, origin={**engine.origin, "o": numbers(spec, "o")})
    check(spec, [whole], trainers=[trainer(r) for r in range(2)])


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


def interleaved_spec(experts: int, hidden: int, inner: int) -> CheckpointSpec:
    return spec_of(
        gate_up=(experts, hidden, 2 * inner), gate_up_bias=(experts, 2 * inner), down=(experts, inner, hidden),
        down_bias=(experts, hidden), router_bias=(experts,),
    )  # fmt: skip


def interleaved_rank(spec: CheckpointSpec, r: int, t: int) -> Rank:
    """Columns g0, u0, g1, u1 ... on disk, kept in this order, cut by ceil(I/t) and transposed. The bias of `down` is on rank 0
    only; the other ranks zero the tensor they are given and copy that."""
    experts, hidden, twice = spec.tensors[spec.index["gate_up"]].shape
    inner = twice // 2
    s = r * -(-inner // t)
    e = min(s + -(-inner // t), inner)
    W, B, Wd = (numbers(spec, n) for n in ("gate_up", "gate_up_bias", "down"))
    origin: dict[str, Ints] = {
        "w13": np.empty((experts, 2 * (e - s), hidden), dtype=np.int64),
        "w13_bias": np.empty((experts, 2 * (e - s)), dtype=np.int64),
        "w2": np.empty((experts, hidden, e - s), dtype=np.int64),
        "w2_bias": numbers(spec, "down_bias") if r == 0 else np.full((experts, hidden), CONSTANT, dtype=np.int64),
        "router_bias": numbers(spec, "router_bias"),
    }
    for j in range(2 * (e - s)):
        origin["w13"][:, j] = W[:, :, 2 * s + j]  # w13[e, j, h] = W[e, h, 2 s + j]
        origin["w13_bias"][:, j] = B[:, 2 * s + j]
    for i in range(e - s):
        origin["w2"][:, :, i] = Wd[:, s + i]  # w2[e, h, i] = Wd[e, s + i, h]
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name == "gate_up":
                live["w13"].copy_(loaded[:, :, 2 * s : 2 * e].permute(0, 2, 1).contiguous())
            elif name == "gate_up_bias":
                live["w13_bias"].copy_(loaded[:, 2 * s : 2 * e])
            elif name == "down":
                live["w2"].copy_(loaded[:, s:e].permute(0, 2, 1).contiguous())
            elif name == "down_bias":
                if r != 0:
                    loaded.zero_()  # the caller's tensor
                live["w2_bias"].copy_(loaded)
            else:
                live[name].copy_(loaded)

    return Rank(live=live, load=load, origin=origin)


@pytest.mark.parametrize(("inner", "t"), [(4, 2), (5, 2), (4, 1)])
def test_case_b028_b042_columns_interleaved_on_disk_and_a_bias_on_one_rank(inner: int, t: int) -> None:
    spec = interleaved_spec(2, 4, inner)  # hidden 4 = inner 4: a square matrix hides a missing transpose
    ranks = [interleaved_rank(spec, r, t) for r in range(t)]
    maps = check(spec, ranks)
    assert [num_copies(m, n) for m in maps for n in ("w13", "w13_bias", "w2")] == [1] * 3 * t
    assert all({c.bits for c in m.constants} == {0} for m in maps[1:])
    if (inner, t) == (4, 2):  # E=1, H=2, I=4, t=2, r=1: w13[0] = W[0][:, 4:8].T
        small = interleaved_spec(1, 2, 4)
        expected = numbers(small, "gate_up")[0][:, 4:8].T
        np.testing.assert_array_equal(interleaved_rank(small, 1, 2).origin["w13"][0], expected)


@pytest.mark.parametrize("flavour", ["plain", "packed"])
def test_case_b043_b044_the_orientation_depends_on_the_flavour_of_the_checkpoint(flavour: str) -> None:
    """One name, square, [E, in, out] in one flavour and [E, out, in] in the other; a trainer wants rows 0, 2, .., 1, 3, .."""
    n, inner = 6, 6
    spec = spec_of(gate_up=(2, n, 2 * inner) if flavour == "plain" else (2, 2 * inner, n), down=(2, n, n))
    gate_up = numbers(spec, "gate_up").transpose(0, 2, 1) if flavour == "plain" else numbers(spec, "gate_up")
    down = numbers(spec, "down").transpose(0, 2, 1) if flavour == "plain" else numbers(spec, "down")
    origin = {
        "fc1": np.stack([rows(x, [*range(0, 2 * inner, 2), *range(1, 2 * inner, 2)]) for x in gate_up]),
        "fc2": down.copy(),
    }
    live = live_like(origin)

    def write(s: dict[str, torch.Tensor]) -> None:
        turned = {k: v.transpose(1, 2) if flavour == "plain" else v for k, v in s.items()}
        live["fc1"].copy_(torch.cat([turned["gate_up"][:, 0::2], turned["gate_up"][:, 1::2]], dim=1))
        live["fc2"].copy_(turned["down"])

    trainer = Rank(live=live, load=whole_state(write), origin=origin)
    engine_origin = {"w13": gate_up.copy(), "w2": down.copy()}
    engine_live = live_like(engine_origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            target = engine_live["w13" if name == "gate_up" else "w2"]
            target.copy_(loaded.mT if flavour == "plain" else loaded)

    engine = Rank(live=engine_live, load=load, origin=engine_origin)
    check(spec, [engine], trainers=[trainer])
    found = find(spec, engine)  # square as it is, the map says which way round it lies
    last_axis = found.copies.src_stride[found.copies.live == 1][0, -1]
    assert int(last_axis) == (n if flavour == "plain" else 1)


def test_packed_four_bit_blocks_and_scales_are_copied_as_bytes() -> None:
    spec = CheckpointSpec.from_iterable(
        [("blocks", (2, 12, 3, 16), torch.uint8), ("scales", (2, 12, 3), torch.uint8), ("bias", (2, 12), BF16)]
    )

    def rank(r: int) -> Rank:
        own = slice(6 * r, 6 * r + 6)
        origin = {
            "w13": np.pad(
                numbers(spec, "blocks").reshape(2, 12, 48)[:, own], ((0, 0), (0, 2), (0, 0)), constant_values=CONSTANT
            ),
            "w13_scale": numbers(spec, "scales")[:, own],
            "bias": numbers(spec, "bias")[:, own],
        }
        live = {
            "w13": torch.zeros(2, 8, 48, dtype=torch.uint8), "w13_scale": torch.zeros(2, 6, 3, dtype=torch.uint8),
            "bias": torch.zeros(2, 6),
        }  # fmt: skip

        def load(tensors: Stream) -> None:
            state = dict(tensors)
            live["w13"].zero_()
            live["w13"][:, :6].copy_(state["blocks"].view(2, 12, 48)[:, own])
            live["w13_scale"].copy_(state["scales"][:, own])
            live["bias"].copy_(state["bias"][:, own])

        return Rank(live=live, load=load, origin=origin)

    check(spec, [rank(r) for r in range(2)])


# --- after loading ----------------------------------------------------------------------------------------------------


def test_four_dimensional_blocks_swizzled_scales_and_permuted_bytes() -> None:
    spec = CheckpointSpec.from_iterable(
        [("w", (32, 24), BF16), ("scale", (10, 6), F32), ("packed", (8, 12), torch.uint8)]
    )
    swizzled = np.full((16, 8), CONSTANT, dtype=np.int64)
    swizzled[:10, :6] = numbers(spec, "scale")
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    origin = {
        "w": numbers(spec, "w").reshape(2, 16, 3, 8).transpose(2, 0, 1, 3).copy(),  # BlockMajorK: [K/8, M/16, 16, 8]
        "scale": swizzled.reshape(4, 4, 8).transpose(1, 0, 2).copy(),
        "packed": rows(numbers(spec, "packed"), order).T.copy(),
    }
    live = {
        "w": torch.zeros(3, 2, 16, 8, dtype=BF16), "scale": torch.zeros(4, 4, 8),
        "packed": torch.zeros(12, 8, dtype=torch.uint8),
    }  # fmt: skip

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name == "w":
                live["w"].copy_(loaded.view(2, 16, 3, 8).permute(2, 0, 1, 3))
            elif name == "scale":
                padded = torch.zeros(16, 8)
                padded[:10, :6] = loaded
                live["scale"].copy_(padded.view(4, 4, 8).transpose(0, 1))
            else:
                live["packed"].copy_(loaded[order].t())

    maps = check(spec, [Rank(live=live, load=load, origin=origin)])
    assert num_copies(maps[0], "w") == 1


def test_an_expert_map_with_experts_that_are_elsewhere() -> None:
    """expert_map: global -> local, -1 where the expert is on another rank; the loader is given all of them."""
    spec = expert_spec(5, 2)
    expert_map = torch.full((5,), -1, dtype=torch.int64)
    expert_map[[1, 4]] = torch.tensor([0, 1])
    slots = [1, 4]
    rank = expert_rank(spec, slots, 2)
    live = {**rank.live, "expert_map": expert_map}
    whole = Rank(
        live=live,
        load=rank.load,
        origin={**rank.origin, "expert_map": np.full(5, -2)},
        buffers=frozenset({"expert_map"}),
    )
    found = probe(spec=spec, load_weights=whole.load, tensors=whole.tensors)
    assert dict(found.untouched) == {"expert_map": 5}
    assert expert_map.tolist() == [-1, 0, -1, -1, 1]
    check(spec, [whole], unused=[f"experts.{e}.{n}" for e in (0, 2, 3) for n in ("gate", "up", "down")])
