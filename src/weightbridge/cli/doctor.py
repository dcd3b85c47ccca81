"""`weightbridge doctor`: what of the library works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import json
import platform
import queue
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from weightbridge import __version__
from weightbridge.cli.failures import FAILURE, guarded
from weightbridge.errors import WeightBridgeError
from weightbridge.kernels.native import load_native
from weightbridge.transports import Arrived, Identity, SharedMemory, Transport
from weightbridge.transports.one_sided import OneSidedTransport
from weightbridge.transports.selection import KINDS

__all__ = ["TransportCheck", "check_transport", "doctor", "examine"]

_PACKAGES = (
    "torch",
    "numpy",
    "pyzmq",
    "msgspec",
    "nixl-cu12",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)
_TRIAL_BYTES = 1 << 20
_DEADLINE_SECONDS = 5.0
_NEEDED = ("shm", "tcp")
_FEW_FILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCheck:
    """works: None where it loads but was not tried. why: what is wrong, or why it was not tried. note: what else to know."""

    name: str
    works: bool | None
    why: str
    note: str


def doctor(
    expose: Annotated[
        bool, typer.Option("--expose", help="Try also transports that listen on every interface while they are tried.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    debug: Annotated[bool, typer.Option(help="Show stack traces of failures.")] = False,
) -> None:
    """Say which transports and kernels work on this machine, why the others do not, and the limits that matter."""

    def run() -> int:
        found = examine(expose=expose)
        if as_json:
            typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            _show(Console(), found)
        return 0 if found["healthy"] else FAILURE

    raise typer.Exit(guarded(run, as_json=as_json, debug=debug))


def examine(*, expose: bool) -> dict[str, Any]:
    """Everything `doctor --json` prints. Opens transports on loopback and moves a little over each."""
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    transports = [check_transport(kind, expose=expose, cards=cards) for kind in KINDS.values()]
    broken = [t for t in transports if t.name in _NEEDED and not t.works]
    native = load_native() is not None
    return {
        "healthy": not broken,
        "versions": _versions(),
        "transports": [asdict(t) for t in transports],
        "kernels": {
            "native": native,
            "why": "" if native else "the C kernels were not built; install a C compiler and reinstall weightbridge-rl",
        },
        "devices": {
            "rdma_cards": cards,
            "gpus": len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        },
        "limits": _limits(),
        "hints": [
            "on loopback no token is needed; beyond it give all workers the same Options(token=...), and data_host=... the "
            "address of this machine that its peers reach",
            "nixl and mooncake open ports that no token protects: beyond loopback (mooncake: always) they want "
            "Options(trusted_network=True)",
            *_limit_hints(),
        ],
    }


def check_transport(kind: type[Transport], *, expose: bool, cards: list[str]) -> TransportCheck:
    """Load one kind and let two ends of it in this process join and move a little."""
    note = ""
    if issubclass(kind, OneSidedTransport) and not cards:
        note = "no RDMA card here, so it runs over TCP, where the transport tcp is faster and needs nothing"
    why = kind.missing()
    if why:
        return TransportCheck(name=kind.name, works=False, why=why, note="")
    settings: dict[str, Any] = {}
    if issubclass(kind, OneSidedTransport):
        settings = {"trusted_network": True}
        if kind.always_exposed and not expose:
            why = "it loads, but was not tried: it listens on every interface meanwhile; --expose tries it"
            return TransportCheck(name=kind.name, works=None, why=why, note=note)
    try:
        _try(kind, settings)
    except (WeightBridgeError, queue.Empty) as error:
        what = "nothing arrived within its deadline" if isinstance(error, queue.Empty) else str(error)
        return TransportCheck(name=kind.name, works=False, why=what, note=note)
    return TransportCheck(name=kind.name, works=True, why="", note=note)


def _try(kind: type[Transport], settings: Mapping[str, Any]) -> None:
    """Join two ends over loopback and write once. Raises WeightBridgeError, or queue.Empty when nothing came."""
    events: dict[str, queue.SimpleQueue[object]] = {name: queue.SimpleQueue() for name in "ab"}
    memory = {name: SharedMemory(_TRIAL_BYTES) for name in "ab"}
    ends: dict[str, Transport] = {}
    try:
        for name in "ab":
            ends[name] = kind(
                Identity(worker=name, session="doctor"), events[name], deadline_seconds=_DEADLINE_SECONDS, **settings
            )
            ends[name].register(memory[name].memory)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(ends["b"].connect, "a", ends["a"].address)
            ends["a"].connect("b", ends["b"].address)
            other.result()
        memory["a"].array[:] = np.arange(_TRIAL_BYTES) % 251
        ends["a"].post("b", np.array([[0, 0, _TRIAL_BYTES]]), b"doctor")
        event = events["b"].get(timeout=_DEADLINE_SECONDS)
        if not isinstance(event, Arrived) or not np.array_equal(memory["a"].array, memory["b"].array):
            raise WeightBridgeError(f"a write over loopback did not arrive whole: {event}")
    finally:
        for end in ends.values():
            end.close()
        for shared in memory.values():
            shared.close()


def _versions() -> dict[str, str | None]:
    out: dict[str, str | None] = {"weightbridge": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            out[package] = None
    return {**out, "system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def _limits() -> dict[str, int | None]:
    """In bytes or numbers; None: no limit, or not known. Slots lie in memfd memory, which counts as the process's own."""
    return {
        "memory_available_bytes": _memory_available(),
        "container_memory_bytes": _container_memory(),
        "locked_memory_bytes": _soft_limit(resource.RLIMIT_MEMLOCK),
        "open_files": _soft_limit(resource.RLIMIT_NOFILE),
        "processes_and_threads": _soft_limit(resource.RLIMIT_NPROC),
    }


def _limit_hints() -> list[str]:
    hints = []
    locked, files = _soft_limit(resource.RLIMIT_MEMLOCK), _soft_limit(resource.RLIMIT_NOFILE)
    if locked is not None:
        hints.append(f"at most {locked} bytes may be locked: RDMA locks the slots once a peer; ulimit -l unlimited")
    if files is not None and files < _FEW_FILES:
        hints.append(f"{files} open files allowed: a peer takes one over tcp, some 15 over nixl; ulimit -n 65536")
    return hints


def _soft_limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _memory_available() -> int | None:
    return _read(Path("/proc/meminfo"), lambda text: int(text.split("MemAvailable:")[1].split()[0]) * 1024)


def _container_memory() -> int | None:
    return _read(Path("/sys/fs/cgroup/memory.max"), lambda text: int(text))


def _read(path: Path, parse: Callable[[str], int]) -> int | None:
    try:
        return parse(path.read_text())
    except (OSError, ValueError, IndexError):
        return None


def _show(console: Console, found: Mapping[str, Any]) -> None:
    def line(text: str, style: str = "") -> None:
        console.print(f"[{style}]{escape(text)}[/]" if style else escape(text), highlight=False, soft_wrap=True)

    line("  ".join(f"{name} {number}" for name, number in found["versions"].items() if number))
    for t in found["transports"]:
        verdict, style = {True: ("works", "green"), False: ("no", "red"), None: ("loads", "yellow")}[t["works"]]
        extra = "; ".join(x for x in (t["why"], t["note"]) if x)
        line(f"transport {t['name']:9} {verdict:6} {extra}".rstrip(), style)
    kernels = found["kernels"]
    line(
        f"kernels   native    {'built' if kernels['native'] else 'no     ' + kernels['why']}",
        "green" if kernels["native"] else "red",
    )
    devices = found["devices"]
    line(f"devices   {devices['gpus']} GPUs, RDMA cards: {', '.join(devices['rdma_cards']) or 'none'}")
    for name, value in found["limits"].items():
        line(f"limit     {name.replace('_', ' ')}: {'none' if value is None else f'{value:,}'}")
    for hint in found["hints"]:
        line(f"hint      {hint}")
