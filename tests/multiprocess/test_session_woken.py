"""An engine that polls only when it is told that polls are waited for, as one does whose core schedules for its workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.multiprocess import toy_job as toy
from tests.multiprocess.test_session_in_process import FAST, Job

from weightbridge.coordinator import ReceiverAdapter


class Core:
    """An engine's workers, on threads of their own; woken by `on_request`, all of them poll until nobody is waited for."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.wanted = threading.Event()
        self.num_polls = 0
        self.installed: list[list[int]] = []  # at each poll that installed: the version of every worker
        self.failure: BaseException | None = None

    def run(self) -> None:
        workers = [toy.engine_worker(self.job.spec, "tp", rank) for rank in range(toy.TP)]
        receivers = [
            ReceiverAdapter(
                group=(rank, toy.TP),
                endpoint=self.job.endpoint,
                checkpoint=self.job.spec,
                load_weights=worker.load_weights,
                tensors=worker.tensors,
                engine="tp",
                options=FAST,
                on_request=self.wanted.set,
            )
            for rank, worker in enumerate(workers)
        ]
        try:
            with ThreadPoolExecutor(toy.TP) as threads:
                while len(self.installed) < self.job.versions:
                    assert self.wanted.wait(20), f"nobody woke the engine after {self.installed}"
                    self.wanted.clear()
                    while True:
                        updated = list(threads.map(lambda r: r.poll_requests(), receivers))
                        self.num_polls += 1
                        if any(updated):
                            assert all(updated)
                            self.installed.append([r.version for r in receivers])
                            for rank, worker in enumerate(workers):
                                expected = toy.engine_worker(self.job.spec, "tp", rank)
                                version = self.installed[-1][rank]
                                expected.load_weights(iter(toy.rounded(self.job.spec, version).items()))
                                assert toy.same_bytes(expected.live, worker.live) == []
                        if not any(r.requested for r in receivers):
                            break
        except BaseException as error:  # noqa: BLE001
            self.failure = error
        finally:
            for receiver in receivers:
                receiver.close()


def test_an_engine_is_woken_for_connecting_and_for_every_version() -> None:
    job = Job(engines={})
    job.expected = {"tp": toy.TP}
    core = Core(job)
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    with job.running() as workers:
        for rank in range(2):
            workers[f"trainer/{rank}"].join(60)
        thread.join(30)
    assert core.failure is None
    assert [w.error for w in workers.values()] == [None] * 2
    assert core.installed == [[version] * toy.TP for version in (1, 2, 3)]
    # To connect and for each version: as many polls as a promise reaches ahead, and few that came before all were asked.
    assert core.num_polls <= 4 * (2 * FAST.window + 2)
