"""Digests of bytes that travel: C and NumPy against the description of the digest in plain Python, and what they find."""

from __future__ import annotations

import numpy as np
import pytest

from weightbridge.kernels import digests
from weightbridge.kernels.digests import Digest, digest_in_c, digest_in_numpy, fastest_digest
from weightbridge.kernels.native import load_native

NATIVE = load_native() is not None
needs_native = pytest.mark.skipif(not NATIVE, reason="the native kernels were not built")
IMPLEMENTATIONS = [pytest.param(digest_in_c, marks=needs_native, id="c"), pytest.param(digest_in_numpy, id="numpy")]
MASK = (1 << 64) - 1
A, B, C = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


NOTHING, TEXT = 0xA71D54FD85D54A6C, 0x989D9B71FB859AEC


def rotated(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & MASK


def fold(chain: int, value: int) -> int:
    return (rotated(chain ^ value, 27) * A + B) & MASK


def described(data: bytes) -> int:
    """The digest of a string, word for word as the module's docstring has it."""
    padded = data + bytes(-len(data) % 64)
    chain = C
    for at in range(0, len(padded), 4096):
        lanes = [A * (i + 1) & MASK for i in range(8)]
        block = padded[at : at + 4096]
        for i in range(0, len(block), 8):
            word = int.from_bytes(block[i : i + 8], "little")
            lanes[i // 8 % 8] = rotated((lanes[i // 8 % 8] + word * B) & MASK, 31) * C & MASK
        of_block = C
        for lane in lanes:
            of_block = fold(of_block, lane)
        chain = fold(chain, of_block)
    h = fold(chain, len(data))
    h = (h ^ h >> 32) * B & MASK
    return h ^ h >> 29


def random_bytes(n: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def of(digest: Digest, memory: np.ndarray, *segments: tuple[int, int]) -> int:
    return digest(memory.ctypes.data, np.array(segments, dtype=np.int64).reshape(-1, 2))


def whole(digest: Digest, memory: np.ndarray) -> int:
    return of(digest, memory, (0, len(memory)))


# --- they are what is described -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest", IMPLEMENTATIONS)
def test_strings_of_every_short_length_at_every_alignment(digest: Digest) -> None:
    memory = random_bytes(400)
    for n in range(301):
        first = n % 17
        assert of(digest, memory, (first, n)) == described(memory[first : first + n].tobytes()), n


@pytest.mark.parametrize("digest", IMPLEMENTATIONS)
def test_strings_that_end_around_a_stripe_and_a_block(digest: Digest) -> None:
    memory = random_bytes(3 * 4096 + 100)
    for edge in (4032, 4096, 8192, 12288):
        for n in (edge - 1, edge, edge + 1, edge + 64, edge + 65):
            assert of(digest, memory, (3, n)) == described(memory[3 : 3 + n].tobytes()), n


@pytest.mark.parametrize("digest", IMPLEMENTATIONS)
def test_how_the_bytes_are_cut_does_not_matter_and_their_order_does(digest: Digest) -> None:
    memory = random_bytes(20_000)
    rng = np.random.default_rng(1)
    for num in (1, 2, 7, 60):
        cuts = np.sort(rng.integers(0, 9_001, num))
        ends = np.concatenate([cuts, [9_001]])
        offsets = np.concatenate([[0], cuts])
        segments = np.stack([offsets + 5, ends - offsets], axis=1)
        expected = described(memory[5 : 5 + 9_001].tobytes())
        assert digest(memory.ctypes.data, segments) == expected
        wider = np.zeros((len(segments), 5), dtype=np.int64)
        wider[:, [1, 4]] = segments
        assert digest(memory.ctypes.data, wider[:, 1::3]) == expected  # of any strides
        scattered = rng.permutation(segments)
        joined = b"".join(memory[o : o + n].tobytes() for o, n in scattered.tolist())
        assert digest(memory.ctypes.data, scattered) == described(joined)
        assert (joined == memory[5:9006].tobytes()) or described(joined) != expected


@needs_native
def test_a_long_string_has_one_digest_in_c_and_in_numpy() -> None:
    piece = digests._PIECE_BYTES
    memory = random_bytes(2 * piece + 4096 + 77)
    for segments in (
        [(0, piece)], [(1, piece + 1)], [(0, 2 * piece)], [(9, piece - 3), (5, 4096), (piece, piece + 4100)],
    ):  # fmt: skip
        assert of(digest_in_c, memory, *segments) == of(digest_in_numpy, memory, *segments)


def test_the_digest_of_nothing_and_of_a_known_text_stay_what_they_are() -> None:
    """A peer may run another version: a change here is a change of the wire."""
    text = np.frombuffer(b"weights that travel", dtype=np.uint8)
    for digest in [digest_in_numpy, *([digest_in_c] if NATIVE else [])]:
        assert of(digest, text) == NOTHING
        assert whole(digest, text) == TEXT


# --- what they find -------------------------------------------------------------------------------------------------


@needs_native
def test_every_single_flipped_bit_is_found_wherever_it_is() -> None:
    memory = random_bytes(4096 + 64 + 13 + 7)
    segments = np.array([(4100, 60), (7, 3), (10, 4090), (4160, 13)], dtype=np.int64)  # a block, a stripe and a rest
    base = digest_in_c(memory.ctypes.data, segments)
    seen = {base}
    for offset, nbytes in segments.tolist():
        for at in range(offset, offset + nbytes, 1 if nbytes < 100 else 5):
            for bit in range(8):
                memory[at] ^= 1 << bit
                seen.add(digest_in_c(memory.ctypes.data, segments))
                memory[at] ^= 1 << bit
    assert len(seen) == 1 + 8 * (60 + 3 + 13 + 818)  # all differ, from each other too
    assert digest_in_c(memory.ctypes.data, segments) == base


@pytest.mark.parametrize("digest", IMPLEMENTATIONS)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x5A])
def test_flips_in_uniform_memory_are_found(digest: Digest, fill: int) -> None:
    memory = np.full(4096 + 70, fill, dtype=np.uint8)
    base = whole(digest, memory)
    for at in (0, 7, 8, 63, 64, 2000, 4095, 4096, 4159, 4160, 4165):
        for bit in (0, 7):
            memory[at] ^= 1 << bit
            assert whole(digest, memory) != base, (at, bit)
            memory[at] ^= 1 << bit


@needs_native
def test_two_flips_that_meet_in_one_lane_do_not_undo_each_other() -> None:
    """Any bit of a word with any bit of the next word of its lane: what simpler mixing lets pass."""
    memory = random_bytes(256)
    words = memory.view(np.uint64)
    base = whole(digest_in_c, memory)
    for first in range(64):
        words[3] ^= np.uint64(1 << first)
        for second in range(64):
            words[11] ^= np.uint64(1 << second)
            assert whole(digest_in_c, memory) != base, (first, second)
            words[11] ^= np.uint64(1 << second)
        words[3] ^= np.uint64(1 << first)


@pytest.mark.parametrize("digest", IMPLEMENTATIONS)
def test_swapped_segments_words_stripes_and_blocks_are_found(digest: Digest) -> None:
    memory = random_bytes(3 * 4096)
    base = whole(digest, memory)
    assert of(digest, memory, (0, 128), (128, 192)) != of(digest, memory, (128, 192), (0, 128))
    for size in (1, 8, 64, 512, 4096):
        swapped = memory.copy()
        swapped[:size], swapped[size : 2 * size] = memory[size : 2 * size], memory[:size]
        assert whole(digest, swapped) != base, size
    lane = memory.copy()
    lane[:8], lane[64:72] = memory[64:72], memory[:8]  # two words of one lane
    assert whole(digest, lane) != base


@pytest.mark.parametrize("digest", IMPLEMENTATIONS)
def test_zeros_more_or_fewer_at_the_end_are_found(digest: Digest) -> None:
    memory = np.zeros(9000, dtype=np.uint8)
    found = [of(digest, memory, (0, n)) for n in (*range(200), 4095, 4096, 4097, 8192, 9000)]
    assert len(set(found)) == len(found)


# --- choosing -------------------------------------------------------------------------------------------------------


def test_without_the_extension_numpy_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    if NATIVE:
        assert fastest_digest() is digest_in_c
    monkeypatch.setattr(digests, "load_native", lambda: None)
    assert fastest_digest() is digest_in_numpy
