"""A trace of a real run for Perfetto: what the session did, and every pack, post and assembly, worker by worker."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path
from types import TracebackType

from weightbridge.coordinator import session_events as e
from weightbridge.executor.observation import KernelRan, Observation, Prepared
from weightbridge.machine import events as m
from weightbridge.observability.spans import SpanMaker
from weightbridge.observability.trace_format import TraceFile, Tracks, complete, counter, instant
from weightbridge.observability.words import in_words

__all__ = ["Trace"]

_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 10.0


class Trace:
    """Writes the workers of this process into one file: Options(observe=trace.observe, on_event=trace).

    The callers only put what they tell into a queue; a thread of its own writes. A process per worker, with a thread for each
    lane: its phases (on the hub's worker), versions with their attempts, how long it stood still, kernels, and posts by
    peer. The file grows by some 150 bytes a span for as long as it is open. A context manager. What a process that was
    killed had written is there; `merge_traces` reads it, and makes one trace of the files of several processes.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises UsageError when the file cannot be written."""
        self._origin = time.time()
        self._steady_origin = time.monotonic()
        self._file = TraceFile(Path(path), self._origin)
        self._told: queue.SimpleQueue[Observation | e.SessionEvent | None] = queue.SimpleQueue()
        self._tracks = Tracks()
        self._makers: dict[str, SpanMaker] = {}
        self._phases: dict[str, e.PhaseChanged] = {}  # the running one, by worker
        self._probed: dict[str, float] = {}  # when the last step of probing was told
        self._attempts: dict[tuple[str, int], list[e.UpdateStarted]] = {}  # (worker, version)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="wb-trace", daemon=True)
        self._thread.start()

    def __call__(self, event: e.SessionEvent) -> None:
        """For Options(on_event=...)."""
        self._told.put(event)

    def observe(self, seen: Observation) -> None:
        """For Options(observe=...)."""
        self._told.put(seen)

    def close(self) -> None:
        """Write what was told so far and end the file. What is told later is left out. Idempotent."""
        if not self._closed:
            self._closed = True
            self._told.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- on the writing thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        write = e.guarded_observer(self._write, "Trace")  # a full disk, say
        try:
            while True:
                try:
                    told = self._told.get(timeout=_FLUSH_SECONDS)
                except queue.Empty:
                    self._file.flush()
                    continue
                if told is None:
                    return
                write(told)
        finally:
            self._end_phases()
            self._file.close()

    def _write(self, told: Observation | e.SessionEvent) -> None:
        if isinstance(told, Observation):
            self._observation(told)
        else:
            self._event(told)

    def _span(self, worker: str, lane: str, name: str, begin: float, end: float, **args: object) -> tuple[int, int]:
        track = self._tracks.track(worker, lane, begin, end)
        self._write_all(complete(name, lane, track, begin, end, args))
        return track

    def _instant(self, worker: str, lane: str, name: str, at: float, **args: object) -> None:
        track = self._tracks.track(worker, lane, float("inf"), float("-inf"))  # any thread of the lane
        self._write_all(instant(name, lane, track, at, args))

    def _write_all(self, *events: dict[str, object]) -> None:
        for event in (*self._tracks.take_news(), *events):
            self._file.write(event)

    # --- the data plane -----------------------------------------------------------------------------------------------------

    def _observation(self, seen: Observation) -> None:
        worker, at = seen.worker, seen.at - self._steady_origin
        span = self._makers.setdefault(worker, SpanMaker()).see(seen)
        if span is not None:
            name, begin, end = f"round {span.round}", span.begin - self._steady_origin, span.end - self._steady_origin
            if span.lane == "post":
                self._span(worker, f"post {span.peer}", name, begin, end, bytes=span.nbytes)
            elif isinstance(seen.what, KernelRan):
                self._span(worker, span.lane, name, begin, end)
            else:
                self._instant(worker, span.lane, f"{name}: {span.peer}", at)
            return
        match seen.what:
            case Prepared(program=program):
                self._instant(worker, "transfer", "prepared", at, rounds=len(program.rounds))
            case m.AssembleAllowed():
                self._instant(worker, "transfer", "may assemble", at)
            case m.Released():
                self._instant(worker, "transfer", "weights may change", at)
            case m.Finished():
                self._instant(worker, "transfer", "finished", at)
            case m.PeerLost(cause=cause) | m.Failed(cause=cause):
                self._instant(worker, "transfer", "failed", at, cause=cause)

    # --- the session --------------------------------------------------------------------------------------------------------

    def _event(self, event: e.SessionEvent) -> None:
        me, at = event.worker, event.at - self._origin
        match event:
            case e.PhaseChanged():
                self._end_phase(me, at)
                self._phases[me] = event
            case e.Probing(what=what, done=done, total=total):
                begin = self._probed.get(me, at)
                self._probed[me] = at
                self._span(me, "layout", what, min(begin, at), at, done=done, total=total)
            case e.Progress(round=round_):
                self._write_all(counter("rounds done", self._tracks.pid(me), at, {"rounds": round_}))
            case e.UpdateStarted(version=version):
                self._attempts.setdefault((me, version), []).append(event)
            case e.Installed(version=version, stall_seconds=stall):
                self._span(me, "stood still", f"version {version}", at - stall, at)
                self._end_version(me, version, at, "installed")
            case e.UpdateFinished(version=version):
                self._end_version(
                    me, version, at, "finished", ewtt_seconds=event.ewtt_seconds, agst_seconds=event.agst_seconds,
                    ratio=event.ratio, received_bytes=event.received_bytes, slowest=event.slowest_worker,
                    slowest_stage=event.slowest_stage,
                )  # fmt: skip
            case e.UpdateFailed(version=version, causes=causes):
                self._end_version(me, version, at, "given up", **causes)
                self._instant(me, "session", in_words(event), at)
            case e.Superseded(version=version):
                self._end_version(me, version, at, "superseded")
            case e.SessionEnded():
                self._end_phase(me, at)
                self._instant(me, "session", in_words(event), at)
            case _:
                self._instant(me, "session", in_words(event), at)

    def _end_version(self, worker: str, version: int, at: float, how: str, **args: object) -> None:
        """The span of a version, with one for each attempt inside it when there was more than one."""
        attempts = self._attempts.pop((worker, version), [])
        if not attempts:
            return  # it had ended here before: a trainer, say, that the others' ends are told too
        starts = [a.at - self._origin for a in attempts]
        end = max(at, *starts)
        track = self._span(worker, "version", f"version {version}", starts[0], end, ended=how, **args)
        if len(attempts) > 1:
            for attempt, begin, until in zip(attempts, starts, [*starts[1:], end], strict=True):
                inside = complete(f"attempt {attempt.attempt}", "version", track, begin, max(until, begin), {})
                self._write_all(inside)

    def _end_phase(self, worker: str, at: float) -> None:
        running = self._phases.pop(worker, None)
        if running is not None:
            begin = running.at - self._origin
            self._span(worker, "phase", running.phase, begin, max(at, begin))

    def _end_phases(self) -> None:
        now = time.time() - self._origin
        for worker in list(self._phases):
            self._end_phase(worker, now)
