"""A 64-bit digest of bytes that travel, in C and in NumPy: what a sender tags a post with and the receiver checks.

It finds accidents, not attackers: without a key, anybody can make bytes of a wanted digest. One changed word of 8 bytes, so
any flipped bit or byte, changes it *always*, because every step from a word to the digest is a bijection of that word;
anything else goes unseen with a chance of about 2**-64.

The bytes of all segments, one after the other, are one string; how it is cut into segments does not matter. It is padded with
zeros to stripes of 64 bytes, a stripe being 8 little-endian words, one for each lane; 64 stripes are a block, the last one
may be shorter. All arithmetic is modulo 2**64:

    lane i at the start of a block      A * (i + 1)
    with each word                      lane = rotate_left(lane + word * B, 31) * C
    fold(chain, value)                  rotate_left(chain ^ value, 27) * A + B
    at the end of a block               chain = fold(chain, fold of all lanes in order, from C); chain is C at first
    at the end                          h = fold(chain, bytes before padding); h = (h ^ h >> 32) * B; h ^ h >> 29
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError
from weightbridge.kernels.native import load_native

__all__ = ["Digest", "digest_in_c", "digest_in_numpy", "fastest_digest"]

Int64Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Digest = Callable[[int, Int64Array], int]
"""(address, segments) -> digest in [0, 2**64). address: of the memory that offsets count from. segments: [N, 2] int64 of
(offset, bytes), of any strides. The caller has checked that all of them lie in its memory; nothing here is written.
"""

_A, _B, _C = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LANES = 8
_STRIPE_BYTES = 64
_BLOCK_STRIPES = 64
_BLOCK_BYTES = _STRIPE_BYTES * _BLOCK_STRIPES
_PIECE_BYTES = 256 * _BLOCK_BYTES  # so many are looked at together, so that a large post needs no copy of its own size


def fastest_digest() -> Digest:
    """The function in C where it was built, else the one in NumPy, which is some fifteen times slower. They agree always."""
    module = load_native()
    return digest_in_c if module is not None and hasattr(module.lib, "wb_digest") else digest_in_numpy


def digest_in_c(address: int, segments: Int64Array) -> int:
    """See Digest; the GIL is released meanwhile. InternalError where the extension was not built; ask `fastest_digest`."""
    module = load_native()
    if module is None:
        raise InternalError("the native kernels were not built; use digest_in_numpy")
    cast, (row_step, column_step) = module.ffi.cast, segments.strides
    found: int = module.lib.wb_digest(
        cast("char *", address), cast("char *", segments.ctypes.data), len(segments), row_step, column_step
    )
    return found


def digest_in_numpy(address: int, segments: Int64Array) -> int:
    """See Digest. This is the specification."""
    chain = _C
    for piece in _pieces(address, segments):
        whole = len(piece) // _BLOCK_BYTES * _BLOCK_BYTES
        for block in _blocks(piece[:whole].reshape(-1, _BLOCK_BYTES)):
            chain = _fold(chain, block)
        if whole < len(piece):
            rest = np.zeros(-(-(len(piece) - whole) // _STRIPE_BYTES) * _STRIPE_BYTES, np.uint8)
            rest[: len(piece) - whole] = piece[whole:]
            chain = _fold(chain, _blocks(rest[None])[0])
    h = _fold(chain, int(segments[:, 1].sum()))
    h = (h ^ h >> 32) * _B & _MASK
    return h ^ h >> 29


def _pieces(address: int, segments: Int64Array) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of all segments in order, _PIECE_BYTES at a time; only the last piece is shorter. Each ends the one before."""
    piece, filled = np.empty(_PIECE_BYTES, np.uint8), 0
    for offset, nbytes in segments.tolist():
        done = 0
        while done < nbytes:
            n = min(nbytes - done, _PIECE_BYTES - filled)
            ctypes.memmove(piece.ctypes.data + filled, address + offset + done, n)
            done, filled = done + n, filled + n
            if filled == _PIECE_BYTES:
                yield piece
                filled = 0
    if filled:
        yield piece[:filled]


def _blocks(blocks: npt.NDArray[np.uint8]) -> list[int]:
    """[num_blocks, bytes] to what each adds to the chain. bytes: the same whole number of stripes for all of them."""
    num_stripes = blocks.shape[1] // _STRIPE_BYTES
    words: Words = np.ascontiguousarray(blocks).view("<u8").reshape(len(blocks), num_stripes, _LANES)
    lanes: Words = np.tile(np.arange(1, _LANES + 1, dtype=np.uint64) * np.uint64(_A), (len(blocks), 1))
    for stripe in range(num_stripes):
        lanes = _rotate_left(lanes + words[:, stripe] * np.uint64(_B), 31) * np.uint64(_C)
    block = np.full(len(blocks), _C, np.uint64)
    for i in range(_LANES):
        block = _rotate_left(block ^ lanes[:, i], 27) * np.uint64(_A) + np.uint64(_B)
    found: list[int] = block.tolist()
    return found


def _rotate_left(x: Words, bits: int) -> Words:
    rotated: Words = x << np.uint64(bits) | x >> np.uint64(64 - bits)
    return rotated


def _fold(chain: int, value: int) -> int:
    x = chain ^ value
    return ((x << 27 | x >> 37) & _MASK) * _A + _B & _MASK
