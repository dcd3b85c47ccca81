"""Trainers and engines as Ray actors, on one machine or many.

Ray knows where every actor runs, so nobody has to: the driver asks the actor of trainer rank 0 for an endpoint, and every
actor fills in its own node and its own address.

    session = host_session(trainers[0])                                      # on the driver
    ray.get([a.join.remote(session) for a in (*trainers, *engine_workers)])  # an argument like any other
    SenderAdapter(group=(rank, size), ..., **session.here())                 # in a trainer's actor
    ReceiverAdapter(group=(rank, size), ..., **session.here())               # in an engine worker's actor

Actors that are made elsewhere or later find it by a name: `publish_session`, `find_session`. Ray carries the session, which is
a hundred bytes; weights and control messages travel on the library's own connections. Ray is imported when it is asked.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from weightbridge.coordinator import Options
from weightbridge.errors import TransferTimeout, UsageError

__all__ = ["Session", "find_session", "host_session", "publish_session"]

_TOKEN_BYTES = 32
_LOOK_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What every worker of a job has to know. Give it to actors as an argument.

    endpoint: where trainer rank 0 listens. token: the shared secret, printable ASCII; never shown.
    """

    endpoint: str
    token: bytes = field(repr=False)

    def here(self, **options: Any) -> dict[str, Any]:
        """The arguments `endpoint`, `node` and `options` of either adapter, for the worker that calls it.

        Called in the worker's actor. Workers of one Ray node share memory; data connections listen on the node's address.
        options: fields of Options, the same on every worker; `data_host` where another interface is to be used.
        """
        ray = _ray()
        given = {"data_host": _address_here(), **options, "token": self.token}
        return {
            "endpoint": self.endpoint,
            "node": ray.get_runtime_context().get_node_id(),
            "options": Options(**given),
        }

    def environment(self, engine: str, **options: Any) -> dict[str, str]:
        """The variables by which a vLLM or SGLang engine joins; for its process, set by the actor that starts it.

        Called in that actor. engine: the engine's name in the job. options: fields of Options that JSON can hold.
        """
        return {
            "WEIGHTBRIDGE_ENDPOINT": self.endpoint,
            "WEIGHTBRIDGE_ENGINE": engine,
            "WEIGHTBRIDGE_NODE": _ray().get_runtime_context().get_node_id(),
            "WEIGHTBRIDGE_TOKEN": self.token.decode(),
            "WEIGHTBRIDGE_OPTIONS": json.dumps({"data_host": _address_here(), **options}),
        }


def host_session(actor: Any = None, *, port: int = 0, timeout_seconds: float = 60.0) -> Session:
    """A new session hosted by trainer rank 0, with a fresh token.

    actor: the handle of rank 0's actor, which is asked for its address and a free port; None when rank 0 calls this itself.
    port: a fixed one, where firewalls ask for it. The port is free when it is asked for; should another process take it
    before `connect`, that raises ConnectError, and a new session helps. Raises TransferTimeout when the actor does not answer.
    """
    ray = _ray()
    if actor is None:
        endpoint = _free_endpoint(None, port)
    else:
        try:
            endpoint = ray.get(actor.__ray_call__.remote(_free_endpoint, port), timeout=timeout_seconds)
        except ray.exceptions.GetTimeoutError as error:
            raise TransferTimeout(
                f"the actor of trainer rank 0 did not answer within {timeout_seconds:.0f} s; is it still waiting for resources "
                "(`ray status`), or busy in another call?",
                waiting_for=("trainer/0",), seconds=timeout_seconds,
            ) from error  # fmt: skip
    return Session(endpoint=endpoint, token=secrets.token_hex(_TOKEN_BYTES).encode())


def publish_session(session: Session, name: str = "weightbridge", *, timeout_seconds: float = 60.0) -> None:
    """Let other actors find the session by a name. A later session under the same name takes its place.

    A small actor holds it, in the caller's Ray namespace, for as long as the process lives that published it first. Raises
    TransferTimeout when Ray cannot start that actor.
    """
    ray = _ray()
    give_up = time.monotonic() + timeout_seconds
    while True:
        board = ray.remote(Board).options(name=_actor_name(name), get_if_exists=True, num_cpus=0).remote()
        try:
            ray.get(board.put.remote(session), timeout=max(give_up - time.monotonic(), 0.0))
            _BOARDS.append(board)
            return
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if time.monotonic() >= give_up:  # else it was one that ends together with the process that made it
                raise TransferTimeout(
                    f"the actor that holds session {name!r} did not start within {timeout_seconds:.0f} s; look at `ray status`",
                    waiting_for=(_actor_name(name),), seconds=timeout_seconds,
                ) from error  # fmt: skip
            time.sleep(_LOOK_AGAIN_SECONDS)


def find_session(name: str = "weightbridge", *, timeout_seconds: float = 300.0) -> Session:
    """The session published last under this name; waits until there is one.

    Jobs of another namespace are not seen: give all of them the same `ray.init(namespace=...)`. Raises TransferTimeout.
    """
    ray = _ray()
    give_up = time.monotonic() + timeout_seconds
    while True:
        left = max(give_up - time.monotonic(), 0.0)
        try:
            found: Session | None = ray.get(ray.get_actor(_actor_name(name)).get.remote(), timeout=left)
            if found is not None:
                return found
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            pass  # not there yet, or gone with the process that published it
        if time.monotonic() >= give_up:
            raise TransferTimeout(
                f"no session named {name!r} was published within {timeout_seconds:.0f} s in this Ray namespace; call "
                "publish_session where the trainers are made, and give all jobs the same ray.init(namespace=...)",
                waiting_for=("trainer/0",), seconds=timeout_seconds,
            )  # fmt: skip
        time.sleep(min(_LOOK_AGAIN_SECONDS, left))


class Board:
    """A small actor that holds one thing for others to read. For the integrations of this package."""

    def __init__(self) -> None:
        self._held: Any = None

    def put(self, held: Any) -> None:
        self._held = held

    def get(self) -> Any:
        return self._held


_BOARDS: list[Any] = []  # an actor ends with the handle it was made with: these are kept as long as the process


def _actor_name(name: str) -> str:
    return f"weightbridge session {name}"


def _free_endpoint(_actor: Any, port: int) -> str:
    """Runs where trainer rank 0 is."""
    host = _address_here()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        free = probe.getsockname()[1]
    return f"tcp://[{host}]:{free}" if ":" in host else f"tcp://{host}:{free}"


def _address_here() -> str:
    """The address under which Ray reaches this node."""
    return str(import_module("ray.util").get_node_ip_address()).strip("[]")


def _ray() -> Any:
    ray = import_module("ray")
    if not ray.is_initialized():
        raise UsageError(
            "Ray is not running in this process; call ray.init(...), or call this within an actor or a task"
        )
    return ray
