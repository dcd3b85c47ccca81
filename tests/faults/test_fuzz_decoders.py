"""Damaged, forged and senseless bytes into every decoder: a small part of what `benchmarks.fuzz` does, and that it has eyes."""

from __future__ import annotations

import ast
import ctypes
import hmac
import random
import struct
from pathlib import Path

import msgspec
import pytest
import zmq
from benchmarks._fuzz_data import data_targets
from benchmarks._fuzz_targets import Parts, Strangers, control_targets, message_kinds, random_message
from benchmarks.fuzz import draw, fuzz

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.wire import Assembly
from weightbridge.errors import LayoutError, PlanError, TransportError
from weightbridge.layout import decode_source_map
from weightbridge.machine import messages as w
from weightbridge.plan import decode_plan
from weightbridge.program import decode_program

SOURCE = Path(__file__).parents[2] / "src" / "weightbridge"
SPEC = CheckpointSpec.from_iterable([("a", (4, 4), "float32")])


def findings(outcomes) -> list[str]:
    return [f for o in outcomes.values() for f in o.findings]


def test_control_messages_are_refused_or_make_sense() -> None:
    outcomes = fuzz(control_targets(), 20_000, seed=1)
    assert findings(outcomes) == []
    assert sum(o.cases for o in outcomes.values()) >= 20_000
    assert outcomes["strangers"].refused == outcomes["strangers"].cases > 300
    # Damage that is always refused at the first byte would show nothing.
    assert all(
        outcomes[n].understood > 10 for n in ("parts", "messages", "statuses", "maps", "plans", "tags", "sessions")
    )


def test_data_frames_and_handshakes_let_nothing_in() -> None:
    outcomes = fuzz(data_targets(), 600, seed=1)
    assert findings(outcomes) == []
    assert outcomes["handshakes"].refused == outcomes["handshakes"].cases
    assert all(outcomes[n].refused > 50 and outcomes[n].understood > 5 for n in ("tcp", "shm"))


def test_a_case_is_the_same_whenever_it_is_drawn() -> None:
    def some() -> list[str]:
        return [repr(draw(t, 3, i)) for t in control_targets() for i in range(20)]  # repr: nan is not equal to itself

    assert some() == some()


def accept_anything(first: bytes, second: bytes) -> bool:
    return True


def put_together(self: Assembly, header: bytes, part: bytes) -> bytes | None:
    """Trusts that the parts come as they were sent."""
    _, index, num_parts = struct.unpack("<QII", header.ljust(16, b"\0")[:16])
    self._parts.append(part)
    if index + 1 < num_parts:
        return None
    parts, self._parts = self._parts, []
    return b"".join(parts)


def write_past_the_end(self, num_writes: int) -> None:
    ctypes.memset(self.local.address + self.local.nbytes, 0, 1)


def write_anyway(self, num_writes: int) -> None:
    ctypes.memset(self.local.address, 0, 1)


@pytest.mark.parametrize(
    ("target", "defect"),
    [
        ("parts", lambda patch: patch.setattr("weightbridge.coordinator.wire.Assembly.add", put_together)),
        ("handshakes", lambda patch: patch.setattr(hmac, "compare_digest", accept_anything)),
        ("plans", lambda patch: patch.setattr("weightbridge.plan.wire.msgspec.MsgspecError", KeyError)),
        ("programs", lambda patch: patch.setattr("weightbridge.program.wire._rows", lambda data, dtype, what: data)),
        ("maps", lambda patch: patch.setattr("weightbridge.layout.wire._check_spans", lambda *_: None)),
        ("sessions", lambda patch: patch.setattr(w, "encode", lambda message: message.nothing)),
        ("tcp", lambda patch: patch.setattr("weightbridge.transports.tcp.TcpLink._receive_writes", write_past_the_end)),
        ("shm", lambda patch: patch.setattr("weightbridge.transports.shm.ShmLink._receive_writes", write_anyway)),
    ],
)  # fmt: skip
def test_the_fuzzer_notices_a_defect(target: str, defect, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [t for t in (*control_targets(), *data_targets()) if t.name == target]
    defect(monkeypatch)
    assert findings(fuzz(targets, 300)) != []


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa1x", b"\x81\x01", b"\x82\xa4type\xa4Join\xa1x"])
def test_deep_nesting_is_an_error_and_not_the_end(level: bytes) -> None:
    for data in (level * 200_000, level * 200_000 + b"\xc0"):
        with pytest.raises(TransportError):
            w.decode(data)
        with pytest.raises(PlanError):
            decode_plan(data)
        with pytest.raises(TransportError):
            decode_program(data)
        with pytest.raises(LayoutError):
            decode_source_map(data, spec=SPEC)


def test_each_kind_of_message_survives_the_wire() -> None:
    rng = random.Random(5)
    for kind in message_kinds():
        for _ in range(5):
            message = random_message(rng, kind)
            assert w.decode(w.encode(message)) == message
    assert {k.__name__ for k in message_kinds()} >= {"Join", "Welcome", "Failure", "ConnectPeers", "Report"}


def test_the_fuzzer_knows_each_message_there_is() -> None:
    declared = {v for v in vars(w).values() if isinstance(v, type) and issubclass(v, w.Message)} - {w.Message}
    assert set(message_kinds()) == declared


def test_a_hub_that_asks_for_no_key_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {zmq.CURVE_SERVER, zmq.CURVE_SERVERKEY, zmq.CURVE_SECRETKEY, zmq.CURVE_PUBLICKEY}
    keys |= {zmq.ZAP_DOMAIN, zmq.ZAP_ENFORCE_DOMAIN}

    def keyless(sock: zmq.Socket[bytes], option: int, value: int | bytes) -> None:
        if option not in keys:
            sock.set(option, value)

    monkeypatch.setattr(zmq.Socket, "setsockopt", keyless)
    assert any("without the token" in f for f in findings(fuzz([Strangers()], 60)))


def test_parts_are_lost_doubled_and_reordered_and_headers_damaged() -> None:
    target = Parts([w.encode(w.Heartbeat())] * 5)
    drawn = [draw(target, 0, i) for i in range(300)]
    assert {genuine for genuine, _ in drawn} == {True, False}
    assert {len({h for h, _ in parts}) < len(parts) for genuine, parts in drawn if genuine} == {True, False}


_EXECUTES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "yaml", "xmlrpc"}
_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_in_the_library_turns_bytes_into_code() -> None:
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [a.name.split(".")[0] for a in node.names if a.name.split(".")[0] in _EXECUTES]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)] if str(node.module).split(".")[0] in _EXECUTES else []
            elif isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                loads = call.endswith((".load_module", "torch.load")) or any(
                    k.arg == "allow_pickle" for k in node.keywords
                )
                names = [call] if call in _CALLS or loads else []
            found += [f"{file.name}:{getattr(node, 'lineno', 0)} {name}" for name in names]
    assert found == []


def test_no_message_type_can_hold_an_object_of_any_class() -> None:
    """`Any` in a message would let a sender choose what is built of its bytes."""

    def check(info: msgspec.inspect.Type) -> None:
        allowed = ("Int", "Float", "Bool", "Str", "Bytes", "VarTuple", "Tuple", "Dict", "Struct")
        assert type(info).__name__.removesuffix("Type") in allowed
        for part in ("item_type", "key_type", "value_type"):
            if hasattr(info, part):
                check(getattr(info, part))
        for inner in getattr(info, "item_types", ()):
            check(inner)
        for field in getattr(info, "fields", ()):
            check(field.type)

    for kind in message_kinds():
        check(msgspec.inspect.type_info(kind))
