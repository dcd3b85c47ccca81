"""Authenticated frames of the control plane.

A connection begins with a nonce from each end. Both derive one key per direction from the shared token and the two
nonces; every frame carries a counter and a MAC under its direction's key. So a frame cannot be forged without the token,
replayed within a connection (the counter), replayed from another one (the nonces) or reflected (the direction).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from weightbridge.errors import TransportError

__all__ = ["NONCE_BYTES", "Channel"]

NONCE_BYTES = 16
_MAC_BYTES = 32
_COUNTER_BYTES = 8


class Channel:
    """One end of one connection. Not thread-safe: it belongs to the thread that owns the socket."""

    def __init__(self, *, token: bytes, dialler_nonce: bytes, hub_nonce: bytes, is_hub: bool) -> None:
        nonces = dialler_nonce + hub_nonce
        to_hub = hmac.digest(token, b"weightbridge control v1 to hub" + nonces, hashlib.sha256)
        from_hub = hmac.digest(token, b"weightbridge control v1 from hub" + nonces, hashlib.sha256)
        self._send_key, self._receive_key = (from_hub, to_hub) if is_hub else (to_hub, from_hub)
        self._sent = 0
        self._received = 0

    @staticmethod
    def nonce() -> bytes:
        return secrets.token_bytes(NONCE_BYTES)

    def seal(self, payload: bytes) -> bytes:
        """A frame that only the other end of this connection accepts, once."""
        self._sent += 1
        counter = self._sent.to_bytes(_COUNTER_BYTES, "big")
        return counter + hmac.digest(self._send_key, counter + payload, hashlib.sha256) + payload

    def open(self, frame: bytes) -> bytes:
        """The payload of a frame. Raises TransportError when it is forged, replayed or too short."""
        counter, mac, payload = (
            frame[:_COUNTER_BYTES],
            frame[_COUNTER_BYTES:][:_MAC_BYTES],
            frame[_COUNTER_BYTES + _MAC_BYTES :],
        )
        wanted = hmac.digest(self._receive_key, counter + payload, hashlib.sha256)
        if not hmac.compare_digest(mac, wanted):
            raise TransportError("control frame is not authentic; both sides need the same token")
        if int.from_bytes(counter, "big") <= self._received:
            raise TransportError("control frame was seen before; it is a replay")
        self._received = int.from_bytes(counter, "big")
        return payload
