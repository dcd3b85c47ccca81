"""Damage for the fuzzer: what noise, a broken peer or an attacker may make of a message. Every choice comes from the generator
that is passed in, so a case is known by its seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

__all__ = ["Sample", "damage_bytes"]

Path = tuple[Any, ...]

_NESTING = 20_000
_MAX_PATHS = 400
_HEADS_OF_GIANTS = tuple(
    bytes.fromhex(h) for h in ("ddffffffff", "dfffffffff", "c6ffffffff", "dbffffffff", "c9ffffffff01")
)
_LENGTHS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 63, 64, 65, 1 << 31, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63), 0.5,
    float("nan"), float("inf"), float("-inf"), 1e308, "", "\0", "x" * 257, "trainer/0", "\U0001f600" * 70, b"", b"\0" * 8,
    b"\xff" * 64, [], [[]], {}, {"type": "Join"}, {1: 2}, [0] * 300, msgspec.msgpack.Ext(5, b"odd"),
    msgspec.msgpack.Ext(-1, b"\xff" * 12),
)  # fmt: skip


class Sample:
    """A genuine message and, where it is MessagePack, its parts, so that damage can respect the grammar."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._paths: list[Path] = []
        try:
            self._tree = msgspec.msgpack.decode(data, strict=False)
        except (msgspec.MsgspecError, ValueError):
            self._tree = None
        else:
            self._collect(self._tree, ())

    def _collect(self, node: Any, path: Path) -> None:
        if len(self._paths) >= _MAX_PATHS:
            return
        self._paths.append(path)
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            self._collect(node[key], (*path, key))

    def damaged(self, rng: random.Random, others: Sequence[Sample]) -> bytes:
        """Never the genuine bytes. Half of the time still well-formed MessagePack, with another value or type somewhere."""
        while True:
            if self._paths and rng.random() < 0.5:
                data = msgspec.msgpack.encode(self._replaced(self._tree, rng.choice(self._paths), rng))
            else:
                data = damage_bytes(rng, self.data, rng.choice(others).data)
            if data != self.data:
                return data

    def _replaced(self, node: Any, path: Path, rng: random.Random) -> Any:
        if not path:
            return _odd(node, rng)
        copy: Any = dict(node) if isinstance(node, dict) else list(node)
        copy[path[0]] = self._replaced(node[path[0]], path[1:], rng)
        return copy


def damage_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """One to three of: flipped bits, cuts, growth, repetition, numbers and lengths of bad faith, a splice with `other`."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_BYTE_DAMAGES)(rng, data, other)
    return data


# --- bytes ------------------------------------------------------------------------------------------------------------


def _place(rng: random.Random, data: bytes | bytearray) -> int:
    """Anywhere, and half of the time near the beginning, where headers are."""
    return rng.randrange(min(len(data), 48) if rng.random() < 0.5 else len(data)) if data else 0


def _flip(rng: random.Random, data: bytes, _: bytes) -> bytes:
    bent = bytearray(data or b"\0")
    for _bit in range(rng.choice((1, 1, 2, 8))):
        bent[_place(rng, bent)] ^= 1 << rng.randrange(8)
    return bytes(bent)


def _cut(rng: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: _place(rng, data)]


def _remove(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at + rng.randrange(1, 17) :]


def _grow(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = rng.choice((len(data), _place(rng, data)))
    return data[:at] + rng.randbytes(rng.choice((1, 8, 300))) + data[at:]


def _repeat(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + data[at : at + rng.choice((1, 8, 16, 256))] * rng.choice((2, 3, 50)) + data[at:]


def _number(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at, size = _place(rng, data), rng.choice((1, 2, 4, 8))
    value = (rng.choice(_LENGTHS) & ((1 << 8 * size) - 1)).to_bytes(size, rng.choice(("little", "big")))
    return data[:at] + value + data[at + size :]


def _giant(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.choice(_HEADS_OF_GIANTS) + data[at + rng.randrange(6) :]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _place(rng, data)] + other[_place(rng, other) :]


def _nest(rng: random.Random, data: bytes, _: bytes) -> bytes:
    at = _place(rng, data)
    return data[:at] + rng.choice((b"\x91", b"\x81\xa1x", b"\x81\x01")) * rng.choice((3, 40, _NESTING)) + data[at:]


_BYTE_DAMAGES: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    _flip, _flip, _flip, _flip, _cut, _cut, _remove, _grow, _repeat, _number, _number, _giant, _splice, _splice, _nest,
)  # fmt: skip


# --- values -----------------------------------------------------------------------------------------------------------


def _odd(node: Any, rng: random.Random) -> Any:
    """Something else in a node's place: half of the time of its own type."""
    if rng.random() < 0.02:
        return msgspec.Raw(rng.choice((b"\x91", b"\x81\xa1x")) * rng.choice((40, _NESTING)) + b"\xc0")
    if rng.random() < 0.05:
        return msgspec.Raw(rng.choice(_HEADS_OF_GIANTS))
    if rng.random() < 0.45:
        return rng.choice(_ODD_VALUES)
    match node:
        case bool():
            return not node
        case int():
            return _bounded(rng.choice((node + 1, node - 1, -node, node * 2, node ^ (1 << rng.randrange(40)))))
        case float():
            return rng.choice((-node, node * 1e300, float(int(node % 1e9))))
        case str():
            return rng.choice((node[:-1], node + "x", node * 2, node.upper(), node.replace("0", "1")))
        case bytes():
            return _flip(rng, node, b"") if rng.random() < 0.7 else node[: _place(rng, node)]
        case list():
            return _odd_list(node, rng)
        case dict():
            return _odd_dict(node, rng)
    return node


def _bounded(value: int) -> int:
    return max(min(value, (1 << 64) - 1), -(1 << 63))


def _odd_list(node: list[Any], rng: random.Random) -> list[Any]:
    kept = node[: rng.randrange(len(node))] if node else node
    return rng.choice(
        (kept, [*node, *node], [*reversed(node)], [*node, rng.choice(_ODD_VALUES)], [node], [*node[:1]] * 70)
    )


def _odd_dict(node: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    copy = dict(node)
    if copy and rng.random() < 0.6:
        value = copy.pop(rng.choice([*copy]))
        if rng.random() < 0.5:
            copy[rng.choice(("type", "data", "version", "\0", "unknown"))] = value
    else:
        copy[rng.choice(("type", "unknown", "", "attempt"))] = rng.choice(_ODD_VALUES)
    return copy
