"""What the dtype table says of raw bits, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from weightbridge.checkpoint.dtypes import dtype_named


@pytest.mark.parametrize(("name", "kind"), [("F16", np.float16), ("F32", np.float32), ("F64", np.float64)])
def test_nan_bits(name: str, kind: type[np.floating]) -> None:
    dtype = dtype_named(name)
    values = np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, -np.nan], dtype=kind)
    values = np.concatenate([values, np.array([1, (1 << 8 * dtype.itemsize) - 1], dtype=dtype.bits).view(kind)])
    assert [dtype.is_nan(int(b)) for b in values.view(dtype.bits)] == np.isnan(values).tolist()


def test_nan_bits_of_bfloat16_and_of_what_has_none() -> None:
    assert [dtype_named("BF16").is_nan(b) for b in (0x7F80, 0x7F81, 0xFF80, 0xFFFF, 0x3F80)] == [0, 1, 0, 1, 0]
    assert not dtype_named("I32").is_nan(0xFFFFFFFF)
    assert not dtype_named("F8_E4M3").is_nan(0x7F)
