"""Flows over shared links: rates by hand, by definition and by a second simulation in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from weightbridge.errors import InternalError, UsageError
from weightbridge.kernels.fair_sharing import fair_rates_in_c, fair_rates_in_numpy, fastest_fair_rates
from weightbridge.simulator.flows import MAX_LINKS_OF_FLOW, EventLoop, FlowModel

RATES = {"numpy": fair_rates_in_numpy} | (
    {"c": fair_rates_in_c} if fastest_fair_rates() is fair_rates_in_c else {}  # where there was a compiler
)


@pytest.fixture(params=RATES, name="rates")
def _rates(request):
    return RATES[request.param]


def table(paths, width: int = 4) -> np.ndarray:
    links = np.full((len(paths), width), -1, dtype=np.int32)
    for row, path in zip(links, paths, strict=True):
        row[: len(path)] = path
    return links


def random_paths(rng, num_flows: int, num_links: int) -> list[list[int]]:
    return [
        rng.choice(num_links, size=min(num_links, rng.integers(1, 5)), replace=False).tolist() for _ in range(num_flows)
    ]


# --- rates ------------------------------------------------------------------------------------------------------------


def test_two_flows_halve_the_link_they_share(rates) -> None:
    rate, load = rates(table([[0], [0, 1]]), np.array([10.0, 100.0]))
    assert rate.tolist() == [5, 5]
    assert load.tolist() == [2, 1]


def test_a_long_flow_is_held_by_its_worst_link_and_the_others_take_the_rest(rates) -> None:
    """Links A, B, C of 12, 20 and 30. One flow goes through all three; A has two more flows, B one more, C one more.

    A gives 12 / 3 = 4 to each of its three: less than B's 20 / 2 and C's 30 / 2, so A is settled first. B's other flow then
    gets 20 - 4 = 16, C's 30 - 4 = 26.
    """
    rate, _ = rates(table([[0, 1, 2], [0], [0], [1], [2]]), np.array([12.0, 20.0, 30.0]))
    assert rate.tolist() == [4, 4, 4, 16, 26]


def test_settling_one_link_moves_the_next_bottleneck(rates) -> None:
    """Links A = 6, B = 10, C = 9: flows AB, A, BC, B, C. A gives 3 each. B has 10 - 3 = 7 for two: 3.5. C has 9 - 3.5 = 5.5
    left for its own flow, not the 4.5 it would give if both its flows asked."""
    rate, _ = rates(table([[0, 1], [0], [1, 2], [1], [2]]), np.array([6.0, 10.0, 9.0]))
    assert rate.tolist() == [3, 3, 3.5, 3.5, 5.5]


def test_rows_without_links_are_no_flows(rates) -> None:
    rate, load = rates(table([[], [1], []]), np.array([3.0, 7.0]))
    assert rate.tolist() == [0, 7, 0]
    assert load.tolist() == [0, 1]
    assert [a.tolist() for a in rates(table([]), np.array([3.0]))] == [[], [0]]


@pytest.mark.parametrize("seed", range(25))
def test_rates_are_max_min_fair_by_definition(rates, seed: int) -> None:
    """No link carries more than it can, and every flow has a full link on which nobody has more than it: then and only then
    can no flow be given more without taking from one that has no more than it."""
    rng = np.random.default_rng(seed)
    num_links = int(rng.integers(1, 30))
    paths = random_paths(rng, int(rng.integers(1, 150)), num_links)
    bandwidth = rng.choice([1e9, 4e9, 50e9, 50e9, 450e9], num_links)
    rate, load = rates(table(paths), bandwidth)
    carried = np.zeros(num_links)
    most = np.zeros(num_links)
    for path, r in zip(paths, rate, strict=True):
        carried[path] += r
        most[path] = np.maximum(most[path], r)
    assert (carried <= bandwidth * (1 + 1e-9)).all()
    full = carried >= bandwidth * (1 - 1e-9)
    for path, r in zip(paths, rate, strict=True):
        assert any(full[link] and r >= most[link] * (1 - 1e-9) for link in path)
    assert load.tolist() == [sum(link in p for p in paths) for link in range(num_links)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.skipif("c" not in RATES, reason="the extension was not built")
def test_the_c_function_equals_the_specification(seed: int) -> None:
    rng = np.random.default_rng(seed)
    paths = random_paths(rng, 400, 60)
    bandwidth = rng.choice([1e9, 50e9, 450e9], 60)
    links = table(paths, width=8)
    for got, wanted in zip(fair_rates_in_c(links, bandwidth), fair_rates_in_numpy(links, bandwidth), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


# --- flows in time ----------------------------------------------------------------------------------------------------


def times_of(bandwidth, flows, *, window_seconds: float = 0.0, rates=None) -> tuple[list[float], FlowModel]:
    """When each of `flows` = (start, path, nbytes) is through."""
    model = FlowModel(bandwidth, rates=rates)
    loop = EventLoop(model, window_seconds=window_seconds)
    done = [0.0] * len(flows)

    def end(i: int) -> None:
        done[i] = loop.now

    for i, (start, path, nbytes) in enumerate(flows):
        loop.at(start, loop.send, path, nbytes, end, i)
    loop.run()
    assert model.num_flows == 0
    return done, model


def exact_times(bandwidth: list[int], flows) -> list[Fraction]:
    """The same in exact fractions: share out, go on to the next start or end, and so on; max-min by raising all rates
    together and stopping the flows of each link as it fills."""

    def share(active: list[int]) -> dict[int, Fraction]:
        rate: dict[int, Fraction] = {}
        left = {link: Fraction(b) for link, b in enumerate(bandwidth)}
        level = Fraction(0)
        while len(rate) < len(active):
            rising = [i for i in active if i not in rate]
            users = {link: [i for i in rising if link in flows[i][1]] for link in left}
            step, _ = min((left[link] / len(u), link) for link, u in users.items() if u)
            level += step
            for link, u in users.items():
                left[link] -= step * len(u)
            for link, u in users.items():
                if left[link] == 0:
                    rate.update(dict.fromkeys(u, level))
        return rate

    now, todo = Fraction(0), {i: Fraction(f[2]) for i, f in enumerate(flows)}
    done: dict[int, Fraction] = {}
    while len(done) < len(flows):
        active = [i for i in todo if i not in done and Fraction(flows[i][0]) <= now]
        rate = share(active)
        ends = [now + todo[i] / rate[i] for i in active]
        starts = [Fraction(f[0]) for f in flows if Fraction(f[0]) > now]
        after = min(ends + starts)
        for i in active:
            todo[i] -= rate[i] * (after - now)
            if todo[i] == 0:
                done[i] = after
        now = after
    return [done[i] for i in range(len(flows))]


def random_flows(seed: int):
    rng = np.random.default_rng(seed)
    num_links = int(rng.integers(1, 6))
    bandwidth = rng.integers(1, 9, num_links).tolist()
    starts = rng.integers(0, 40, 12) / 8
    paths = random_paths(rng, 12, num_links)
    return bandwidth, [
        (float(s), tuple(p), int(n)) for s, p, n in zip(starts, paths, rng.integers(1, 30, 12), strict=True)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_flows_end_when_exact_arithmetic_says(rates, seed: int) -> None:
    bandwidth, flows = random_flows(seed)
    done, model = times_of(bandwidth, flows, rates=rates)
    np.testing.assert_allclose(done, [float(t) for t in exact_times(bandwidth, flows)], rtol=1e-12)
    carried = [sum(n for _, path, n in flows if link in path) for link in range(len(bandwidth))]
    assert model.nbytes.tolist() == carried


def test_links_count_the_time_in_which_they_have_a_flow() -> None:
    """Link 0 of 2 B/s: 6 bytes from 1 s to 4 s, nothing, 2 bytes from 10 s to 11 s. Link 1 is never used."""
    done, model = times_of([2.0, 5.0], [(1.0, (0,), 6), (10.0, (0,), 2)])
    assert done == [4, 11]
    assert model.busy_seconds.tolist() == [4, 0]


@pytest.mark.parametrize("seed", range(6))
def test_a_window_delays_by_no_more_than_itself_for_each_start_and_end(seed: int) -> None:
    bandwidth, flows = random_flows(seed)
    exact, _ = times_of(bandwidth, flows)
    window = 0.01
    late, model = times_of(bandwidth, flows, window_seconds=window)
    assert np.abs(np.array(late) - exact).max() <= window * 2 * len(flows)
    assert model.nbytes.tolist() == [sum(n for _, p, n in flows if link in p) for link in range(len(bandwidth))]


def test_starts_within_a_window_cost_one_sharing() -> None:
    flows = [(i * 1e-7, (0,), 1000) for i in range(10)]
    _, apart = times_of([1e9], flows)
    _, together = times_of([1e9], flows, window_seconds=1e-6)
    assert apart.num_rebalances > 10
    assert together.num_rebalances <= 4


def test_a_bandwidth_that_changes_holds_from_then_on() -> None:
    """10 bytes at 2 B/s: 4 are through at 2 s; the other 6 at 0.5 B/s take 12 s."""
    model = FlowModel([2.0])
    loop = EventLoop(model, window_seconds=0)
    done = []
    loop.send((0,), 10, lambda: done.append(loop.now))
    loop.at(2.0, model.set_bandwidth, 0, 0.5)
    loop.run()
    assert done == [14]


def test_a_cancelled_flow_makes_room_and_counts_what_it_carried() -> None:
    """Two flows of 10 bytes at 1 B/s each; one is cancelled at 3 s, the other has 7 bytes left, at 2 B/s."""
    model = FlowModel([2.0])
    loop = EventLoop(model, window_seconds=0)
    done: list[tuple[str, float]] = []
    loop.send((0,), 10, lambda: done.append(("kept", loop.now)))
    flow = loop.send((0,), 10, lambda: done.append(("cancelled", loop.now)))
    loop.at(3.0, loop.cancel, flow)
    loop.run()
    assert done == [("kept", 6.5)]
    assert model.nbytes.tolist() == [13]


def test_a_flow_cancelled_in_the_window_in_which_it_ends_is_not_done() -> None:
    model = FlowModel([1.0, 1.0])
    loop = EventLoop(model, window_seconds=0.5)
    done: list[str] = []
    flow = loop.send((0,), 2, done.append, "cancelled")

    def replace() -> None:
        loop.cancel(flow)
        assert loop.send((1,), 3, done.append, "its successor under the same number") == flow

    loop.at(1.9, replace)
    loop.run()
    assert done == ["its successor under the same number"]


def test_what_needs_no_link_or_has_no_bytes_is_done_at_once() -> None:
    loop = EventLoop(FlowModel([1.0]))
    done: list[tuple[int, float]] = []
    for i, (path, nbytes) in enumerate([((), 100), ((0,), 0)]):
        loop.at(
            2.0, lambda i, path, nbytes: loop.send(path, nbytes, lambda: done.append((i, loop.now))), i, path, nbytes
        )
    loop.run()
    assert done == [(0, 2.0), (1, 2.0)]


def test_ties_are_resolved_by_the_order_of_the_calls_and_the_past_is_now() -> None:
    loop = EventLoop(FlowModel([1.0]))
    order: list[object] = []
    loop.at(1.0, order.append, "a")
    loop.at(1.0, loop.at, 0.5, lambda: order.append(loop.now))
    loop.at(1.0, order.append, "b")
    loop.run()
    assert order == ["a", "b", 1.0]
    assert loop.num_events == 4


def test_room_grows_with_the_flows() -> None:
    done, model = times_of([100.0], [(0.0, (0,), 1)] * 300)
    assert done == pytest.approx([3.0] * 300)
    assert model.nbytes[0] == 300


def test_what_makes_no_sense_is_refused() -> None:
    for bandwidth in ([0.0], [-1.0], [float("inf")]):
        with pytest.raises(UsageError, match="positive and finite"):
            FlowModel(bandwidth)
    model = FlowModel([1.0])
    with pytest.raises(InternalError, match="0 bytes over 1 links"):
        model.add((0,), 0)
    with pytest.raises(InternalError, match=f"1 to {MAX_LINKS_OF_FLOW} links"):
        model.add(range(MAX_LINKS_OF_FLOW + 1), 5)
    with pytest.raises(UsageError, match="got 0"):
        model.set_bandwidth(0, 0)
    with pytest.raises(UsageError, match="window_seconds"):
        EventLoop(model, window_seconds=-1)
