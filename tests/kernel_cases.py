"""Descriptor tables for tests of kernels: single rows by hand, and random ones."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from weightbridge.kernels import Buffer
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op

SIZES = {
    Op.F32_TO_BF16: (4, 2),
    Op.BF16_TO_F32: (2, 4),
    Op.F32_TO_F16: (4, 2),
    Op.F16_TO_F32: (2, 4),
    Op.BF16_TO_F16: (2, 2),
    Op.F16_TO_BF16: (2, 2),
    Op.F64_TO_F32: (8, 4),
    Op.F32_TO_F64: (4, 8),
    Op.F64_TO_BF16: (8, 2),
    Op.BF16_TO_F64: (2, 8),
    Op.F64_TO_F16: (8, 2),
    Op.F16_TO_F64: (2, 8),
}
"""(source, destination) bytes of an element of each cast."""


def buffer_of(array: np.ndarray) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes)


def row(
    count, src_stride, dst_stride, *, src_offset=0, dst_offset=0, op=Op.COPY, itemsize=2, src_buffer=0, dst_buffer=0
):
    out = np.zeros(1, dtype=DESCRIPTOR)
    pad = MAX_AXES - len(count)
    out["count"] = [1] * pad + list(count)
    out["src_stride"] = [0] * pad + list(src_stride)
    out["dst_stride"] = [0] * pad + list(dst_stride)
    for name, value in (("src_offset", src_offset), ("dst_offset", dst_offset), ("op", op), ("itemsize", itemsize),
                        ("src_buffer", src_buffer), ("dst_buffer", dst_buffer)):  # fmt: skip
        out[name] = value
    return out


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@st.composite
def copies(draw):
    """A row and the sizes it needs; destination elements are laid out in a shuffled axis order with gaps, so disjoint."""
    op = draw(st.sampled_from([Op.COPY] * 4 + list(SIZES)))
    src_size = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 64])) if op == Op.COPY else SIZES[op][0]
    dst_size = src_size if op == Op.COPY else SIZES[op][1]
    axes = draw(st.integers(1, MAX_AXES))
    count = [draw(st.sampled_from([1, 1, 2, 3, 5, 9, 17, 40] if axes < 4 else [1, 2, 3])) for _ in range(axes)]
    if draw(st.integers(0, 19)) == 0:
        count[draw(st.integers(0, axes - 1))] = 0

    def layout(size, broadcast):
        stride, at = [0] * axes, size
        for axis in draw(st.permutations(range(axes))):
            if broadcast and draw(st.integers(0, 9)) == 0:
                continue
            step = at + draw(st.sampled_from([0, 0, 0, 1, 6]))
            stride[axis] = step * draw(st.sampled_from([1, 1, -1]))
            at = step * max(count[axis] - 1, 0) + at
        low = sum(min(s * max(c - 1, 0), 0) for s, c in zip(stride, count, strict=True))
        offset = draw(st.integers(0, 9))
        return stride, offset - low, at + offset

    src_stride, src_offset, src_bytes = layout(src_size, broadcast=True)
    dst_stride, dst_offset, dst_bytes = layout(dst_size, broadcast=False)
    out = row(count, src_stride, dst_stride, src_offset=src_offset, dst_offset=dst_offset, op=op, itemsize=src_size)
    return out, src_bytes, dst_bytes
