"""Sparse linear programs, as much of them as planning needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError

__all__ = ["FloatArray", "Int64Array", "Rows", "minimise"]

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """A sparse matrix as triplets."""

    row: Int64Array
    column: Int64Array
    value: FloatArray
    shape: tuple[int, int]

    @classmethod
    def of(cls, entries: Iterable[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]], shape: tuple[int, int]) -> Rows:
        """From (rows, columns, values), each a number or an array; those of one entry are broadcast together."""
        parts = [np.broadcast_arrays(*entry) for entry in entries]
        row, column, value = (np.concatenate([np.atleast_1d(p[i]) for p in parts]) for i in range(3))
        return cls(row.astype(np.int64), column.astype(np.int64), value.astype(np.float64), shape)

    def widened(self, num_columns: int) -> Rows:
        """With more columns, all zero."""
        return replace(self, shape=(self.shape[0], self.shape[1] + num_columns))

    def above(self, other: Rows) -> Rows:
        """Both, one above the other."""
        return Rows(
            np.concatenate([self.row, other.row + self.shape[0]]),
            np.concatenate([self.column, other.column]),
            np.concatenate([self.value, other.value]),
            (self.shape[0] + other.shape[0], self.shape[1]),
        )


def minimise(
    cost: FloatArray, at_most: tuple[Rows, FloatArray], equal: tuple[Rows, FloatArray], most: FloatArray
) -> tuple[FloatArray, float, FloatArray]:
    """Solution, value and multipliers of the <= rows, by HiGHS's dual simplex: interior points double the pairs.

    most: upper bound of each variable; all are non-negative.
    """
    from scipy.optimize import linprog  # a second's import that only the one worker that plans needs
    from scipy.sparse import csr_matrix

    left, right = (csr_matrix((m.value, (m.row, m.column)), shape=m.shape) for m, _ in (at_most, equal))
    bounds = np.stack([np.zeros_like(most), most], axis=1)
    found = linprog(cost, A_ub=left, b_ub=at_most[1], A_eq=right, b_eq=equal[1], bounds=bounds, method="highs-ds")
    if found.status != 0:
        raise InternalError(f"the routing LP ended with status {found.status}: {found.message}")
    return found.x, float(found.fun), found.ineqlin.marginals
