"""Events as Prometheus metrics, served over HTTP; the extra `prometheus` brings the client library.

One observer a process. Trainers all tell the same of an update: scrape one of them for `weightbridge_update_*`, or take
the maximum.
"""

from __future__ import annotations

import socket
import threading
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from weightbridge.coordinator import session_events as e
from weightbridge.errors import UsageError
from weightbridge.machine.session import Phase

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["PrometheusObserver"]

_ENGINE_STATES = ("joining", "ready", "updating", "poisoned", "lost", "left")
_PHASES = tuple(phase.value for phase in Phase)

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_REMEMBERED_ENDS = 256  # of versions, so that several workers of one process do not count one twice


_POLL_SECONDS = 0.05  # how soon a server notices that it is to end
_CLOSE_SECONDS = 5.0


class _Server(ThreadingMixIn, WSGIServer):
    """One thread a scrape: one that hangs does not keep others out, nor the process alive."""

    daemon_threads = True
    block_on_close = False


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class PrometheusObserver:
    """Keeps the metrics of this process's workers. Thread-safe; a context manager."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """registry: where the metrics are registered; by default one of their own, which `serve` serves.

        Raises UsageError when prometheus_client is not installed.
        """
        try:
            import prometheus_client
        except ImportError:
            raise UsageError(
                "PrometheusObserver needs the package prometheus-client, which is not installed; "
                "pip install 'weightbridge-rl[prometheus]'"
            ) from None
        self._client = prometheus_client
        self.registry = registry if registry is not None else prometheus_client.CollectorRegistry()
        self._lock = threading.Lock()
        self._ended: dict[int, None] = {}  # versions whose end was counted, oldest first
        self._session: int | None = None
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        self._make_update_metrics()
        self._make_session_metrics()

    def _make_update_metrics(self) -> None:
        self._updates = self._counter("updates", "Versions that have ended, by how", "result")
        self._attempts = self._counter("update_attempts", "Attempts at versions that have ended well")
        self._ewtt = self._histogram(
            "update_ewtt_seconds", "From the first worker that stopped to the last that resumed"
        )
        self._agst = self._histogram("update_agst_seconds", "Stall of all workers over their number")
        self._last_ewtt = self._gauge("update_last_ewtt_seconds", "EWTT of the last version")
        self._last_agst = self._gauge("update_last_agst_seconds", "AGST of the last version")
        self._ideal = self._gauge("update_ideal_seconds", "T_min of the plan of the last version")
        self._ratio = self._gauge("update_achieved_over_ideal", "EWTT over T_min of the last version")
        self._bytes = self._counter(
            "network_bytes", "Bytes between nodes, as the kernel counted them", "worker", "direction"
        )
        self._slowest = self._counter(
            "slowest", "How often a worker went on last, by what took most of its stall", "worker", "stage"
        )
        self._version = self._gauge("version", "Newest version that has ended well")
        self._round = self._gauge("update_round", "Rounds done of the version in flight", "worker")
        self._rounds = self._gauge("update_rounds", "Rounds of the version in flight", "worker")
        self._stall = self._histogram("install_stall_seconds", "How long a worker stood still to install", "worker")
        self._installed = self._gauge("installed_version", "Version a rollout worker serves", "worker")

    def _make_session_metrics(self) -> None:
        self._phase = self._gauge("phase", "1 for the phase the session is in (hub)", "phase")
        self._engine_state = self._gauge("engine_state", "1 for the state an engine is in (hub)", "engine", "state")
        self._engine_version = self._gauge("engine_version", "Version an engine serves, -1 for none (hub)", "engine")
        self._planning = self._gauge("plan_seconds", "How long the plan in force took to make (hub)")
        self._plan_rounds = self._gauge("plan_rounds", "Rounds of the plan in force (hub)")
        self._plan_pairs = self._gauge("plan_pairs", "Pairs of workers that exchange bytes over the network (hub)")
        self._plan_ratio = self._gauge("plan_ratio_to_bound", "Busiest link over the least time of any plan (hub)")
        self._epoch = self._gauge("epoch", "Epoch of the plan in force")
        self._over = self._gauge("session_over", "1 when the session has ended for a worker", "worker")
        self._ends = self._counter("session_ends", "Ends of sessions, by error, none for good order", "kind")

    def _counter(self, name: str, what: str, *labels: str) -> Any:
        return self._client.Counter(f"weightbridge_{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Any:
        return self._client.Gauge(f"weightbridge_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str) -> Any:
        return self._client.Histogram(f"weightbridge_{name}", what, labels, registry=self.registry, buckets=_SECONDS)

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Serve the metrics over HTTP on a thread of its own until `close`; returns the port (that was chosen, for 0).

        Nothing authenticates who asks: leave `host` on loopback unless the network is one for monitoring. Raises
        UsageError when the port is taken or when it serves already.
        """
        if self._server is not None:
            raise UsageError("serve() was called before; one PrometheusObserver serves one port")
        server_class = _Server6 if ":" in host else _Server
        app = self._client.make_wsgi_app(self.registry)
        try:
            server = make_server(host, port, app, server_class, handler_class=_Silent)
        except OSError as error:
            raise UsageError(
                f"metrics cannot be served on {host}:{port}: {error.strerror or error}; choose a free port, 0 for any"
            ) from None
        thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="wb-prometheus", daemon=True)
        self._server = server, thread
        thread.start()
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving. Idempotent; the metrics stay."""
        server, self._server = self._server, None
        if server is not None:
            server[0].shutdown()
            server[1].join(_CLOSE_SECONDS)
            server[0].server_close()

    def __enter__(self) -> PrometheusObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, event: e.SessionEvent) -> None:
        match event:
            case e.UpdateFinished():
                if self._is_new(event.version):
                    self._finished(event)
            case e.UpdateFailed(version=version):
                if self._is_new(version):
                    self._updates.labels("failed").inc()
            case e.Progress(worker=worker, round=round_, rounds=rounds):
                self._round.labels(worker).set(round_)
                self._rounds.labels(worker).set(rounds)
            case e.Installed(worker=worker, version=version, stall_seconds=stall):
                self._stall.labels(worker).observe(stall)
                self._installed.labels(worker).set(version)
            case _:
                self._session_event(event)

    def _finished(self, event: e.UpdateFinished) -> None:
        self._updates.labels("superseded" if event.superseded else "finished").inc()
        self._attempts.inc(event.attempts)
        self._ewtt.observe(event.ewtt_seconds)
        self._agst.observe(event.agst_seconds)
        self._last_ewtt.set(event.ewtt_seconds)
        self._last_agst.set(event.agst_seconds)
        self._ideal.set(event.ideal_seconds)
        self._ratio.set(float("nan") if event.ratio is None else event.ratio)
        for worker, (sent, received) in event.network_bytes.items():
            self._bytes.labels(worker, "sent").inc(sent)
            self._bytes.labels(worker, "received").inc(received)
        if event.slowest_worker:
            self._slowest.labels(event.slowest_worker, event.slowest_stage).inc()
        self._version.set(event.version)

    def _session_event(self, event: e.SessionEvent) -> None:
        match event:
            case e.Joined(session=session, worker=worker):
                self._joined(session)
                self._over.labels(worker).set(0)
            case e.PhaseChanged(phase=phase):
                for name in {*_PHASES, phase}:
                    self._phase.labels(name).set(name == phase)
            case e.EngineChanged(engine=engine, state=state, version=version):
                for name in {*_ENGINE_STATES, state}:
                    self._engine_state.labels(engine, name).set(name == state)
                self._engine_version.labels(engine).set(version)
            case e.Planned():
                self._planning.set(event.planning_seconds)
                self._plan_rounds.set(event.rounds)
                self._plan_pairs.set(event.pairs)
                self._plan_ratio.set(event.ratio_to_bound)
            case e.Connected(epoch=epoch):
                self._epoch.set(epoch)
            case e.SessionEnded(worker=worker, kind=kind):
                self._over.labels(worker).set(1)
                self._ends.labels(kind or "none").inc()

    def _joined(self, session: int) -> None:
        """Versions of another session count anew."""
        with self._lock:
            if session != self._session:
                self._session = session
                self._ended.clear()

    def _is_new(self, version: int) -> bool:
        """Whether the end of a version is told here for the first time: each worker of this process tells it."""
        with self._lock:
            if version in self._ended:
                return False
            self._ended[version] = None
            while len(self._ended) > _REMEMBERED_ENDS:
                del self._ended[next(iter(self._ended))]
            return True
