"""Who is at the other end: a mutual challenge and response before the first byte of data.

Four messages of one fixed size, the dialler speaks first:

    dialler  -> HELLO(session, own name, expected name, nonce)
    acceptor -> HELLO(session, own name, dialler's name, own nonce)   or REFUSED(reason)
    dialler  -> PROOF(HMAC-SHA256(token, role | both HELLOs))
    acceptor -> PROOF(same with its role)                             or REFUSED(reason)

A HELLO holds session, both names and a nonce, so a proof cannot be replayed, reflected or moved to another pair. With an
empty token the proofs prove nothing, but the names and the session are still checked. The token keeps strangers out; it
does not encrypt what follows.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time

from weightbridge.errors import ConnectError, UsageError
from weightbridge.transports.base import Identity

__all__ = ["MAX_NAME_BYTES", "accept_handshake", "check_identity", "dial_handshake", "receive_exactly"]

MAX_NAME_BYTES = 128
_NONCE_BYTES = 32
_MESSAGE = struct.Struct(f"<8sB7x{MAX_NAME_BYTES}s{MAX_NAME_BYTES}s{MAX_NAME_BYTES}s{_NONCE_BYTES}s")
_MAGIC = b"WBRIDGE1"
_HELLO, _PROOF, _REFUSED = 1, 2, 3


def check_identity(identity: Identity) -> None:
    """Raise UsageError unless worker and session fit the messages."""
    _name("worker name", identity.worker)
    _name("session", identity.session)


def dial_handshake(sock: socket.socket, identity: Identity, peer: str, deadline: float) -> None:
    """Run the dialler's part; blocks until `deadline` (time.monotonic) at the latest.

    Raises ConnectError naming the peer when it is another worker or session, refuses, has another token, or is silent.
    """
    mine = _hello(identity, peer)
    _send(sock, mine, peer, deadline)
    theirs = _receive(sock, peer, deadline)
    session, name, target = _read_hello(theirs, peer)
    if session != identity.session:
        raise _refusal(peer, f"it belongs to session {session!r}, this worker to {identity.session!r}")
    if name != peer:
        raise _refusal(peer, f"worker {name!r} answered there: the address belongs to another worker")
    if target != identity.worker:
        raise _refusal(peer, f"it answered to {target!r} instead of {identity.worker!r}")
    _send(sock, _proof(identity.token, b"dialler", mine, theirs), peer, deadline)
    answer = _receive(sock, peer, deadline)
    if not hmac.compare_digest(answer, _proof(identity.token, b"acceptor", mine, theirs)):
        raise _refusal(peer, "its token differs from this worker's; give all workers of the job the same token")


def accept_handshake(sock: socket.socket, identity: Identity, deadline: float) -> str:
    """Run the acceptor's part and return the dialler's name.

    Raises ConnectError, or UsageError for a name that is none; the dialler is told the reason, and the caller logs it.
    """
    theirs = _receive(sock, "a dialler", deadline)
    session, name, target = _read_hello(theirs, "a dialler")
    who = repr(name)
    if session != identity.session:
        _refuse(sock, who, f"this worker belongs to another session than {session!r}", deadline)
    if target != identity.worker:
        _refuse(sock, who, f"this is worker {identity.worker!r}, not {target!r}", deadline)
    mine = _hello(identity, name)
    _send(sock, mine, who, deadline)
    proof = _receive(sock, who, deadline)
    if not hmac.compare_digest(proof, _proof(identity.token, b"dialler", theirs, mine)):
        _refuse(sock, who, "the token differs; give all workers of the job the same token", deadline)
    _send(sock, _proof(identity.token, b"acceptor", theirs, mine), who, deadline)
    return name


def receive_exactly(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Read nbytes; b"" when the other end closed before. Raises TimeoutError past the deadline, OSError as it comes."""
    data = b""
    while len(data) < nbytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        part = sock.recv(nbytes - len(data))
        if not part:
            return b""
        data += part
    return data


def _name(what: str, text: str) -> bytes:
    data = text.encode()
    if not data or len(data) > MAX_NAME_BYTES or b"\0" in data:
        raise UsageError(f"{what} {text!r} has {len(data)} bytes, expected 1 to {MAX_NAME_BYTES} and no NUL")
    return data


def _hello(identity: Identity, peer: str) -> bytes:
    session, me, you = _name("session", identity.session), _name("worker name", identity.worker), _name("peer", peer)
    return _MESSAGE.pack(_MAGIC, _HELLO, session, me, you, os.urandom(_NONCE_BYTES))


def _proof(token: bytes, role: bytes, dialler_hello: bytes, acceptor_hello: bytes) -> bytes:
    digest = hmac.digest(token, role + b"|" + dialler_hello + acceptor_hello, "sha256")
    return _MESSAGE.pack(_MAGIC, _PROOF, b"", b"", b"", digest)


def _read_hello(data: bytes, peer: str) -> tuple[str, str, str]:
    _, kind, *fields, _ = _MESSAGE.unpack(data)
    if kind != _HELLO:
        raise _refusal(peer, "it did not begin with a greeting")
    session, name, target = (f.rstrip(b"\0").decode(errors="replace") for f in fields)
    return session, name, target


def _send(sock: socket.socket, data: bytes, peer: str, deadline: float) -> None:
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(data)
    except OSError as error:
        raise _refusal(peer, f"the connection broke during the handshake ({error})") from error


def _receive(sock: socket.socket, peer: str, deadline: float) -> bytes:
    try:
        data = receive_exactly(sock, _MESSAGE.size, deadline)
    except TimeoutError as error:
        raise _refusal(peer, "it did not answer the handshake in time") from error
    except OSError as error:
        raise _refusal(peer, f"the connection broke during the handshake ({error})") from error
    if not data:
        raise _refusal(peer, "it closed the connection during the handshake")
    magic, kind, first, second, third, _ = _MESSAGE.unpack(data)
    if magic != _MAGIC:
        raise _refusal(peer, "it speaks another protocol; do all workers run the same version of the library?")
    if kind == _REFUSED:
        raise _refusal(peer, "it refused: " + (first + second + third).rstrip(b"\0").decode(errors="replace"))
    return data


def _refuse(sock: socket.socket, who: str, reason: str, deadline: float) -> None:
    text = reason.encode()[: 3 * MAX_NAME_BYTES].ljust(3 * MAX_NAME_BYTES, b"\0")
    parts = (text[i : i + MAX_NAME_BYTES] for i in range(0, len(text), MAX_NAME_BYTES))
    _send(sock, _MESSAGE.pack(_MAGIC, _REFUSED, *parts, b""), who, deadline)
    raise ConnectError(f"refused a dial from worker {who}: {reason}", peer=who)


def _refusal(peer: str, reason: str) -> ConnectError:
    return ConnectError(f"cannot join worker {peer}: {reason}", peer=peer)
