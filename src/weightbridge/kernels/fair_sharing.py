"""Max-min fair rates of flows that share links: progressive filling, in NumPy and in C.

The model of choice for long transfers over NICs and switches (Bertsekas and Gallager, *Data Networks*, 6.5.2): no flow can
get more without taking from one that has no more than it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError
from weightbridge.kernels.native import load_native

__all__ = ["FairRates", "fair_rates_in_c", "fair_rates_in_numpy", "fastest_fair_rates"]

Floats = npt.NDArray[np.float64]
FairRates = Callable[[npt.NDArray[np.int32], Floats], tuple[Floats, npt.NDArray[np.int64]]]
"""(links, bandwidth) -> (rate, load).

links: [num_flows, width] int32, positions in `bandwidth`, -1 where unused; a row of -1 is no flow and gets rate 0. A link
stands in a row once at most. bandwidth: [num_links] bytes per second, positive. rate: [num_flows] bytes per second.
load: [num_links] number of flows on each link.
"""


def fastest_fair_rates() -> FairRates:
    """The function in C where it was built, else the one in NumPy. They differ by rounding only."""
    module = load_native()
    return fair_rates_in_c if module is not None and hasattr(module.lib, "wb_fair_rates") else fair_rates_in_numpy


def fair_rates_in_c(links: npt.NDArray[np.int32], bandwidth: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """See FairRates. InternalError where the extension was not built; ask `fastest_fair_rates`."""
    module = load_native()
    if module is None:
        raise InternalError("the native kernels were not built; use fair_rates_in_numpy")
    links, bandwidth = np.ascontiguousarray(links, dtype=np.int32), np.ascontiguousarray(bandwidth, dtype=np.float64)
    rate, load = np.empty(len(links)), np.empty(len(bandwidth), dtype=np.int64)
    cast, of = module.ffi.cast, module.ffi.from_buffer
    failed = module.lib.wb_fair_rates(
        len(links), links.shape[1], cast("int32_t *", of(links)), len(bandwidth), cast("double *", of(bandwidth)),
        cast("double *", of(rate)), cast("int64_t *", of(load)),
    )  # fmt: skip
    if failed:
        raise MemoryError(f"no memory to share {len(bandwidth)} links between {len(links)} flows")
    return rate, load


def fair_rates_in_numpy(links: npt.NDArray[np.int32], bandwidth: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """See FairRates.

    A link is full when no flow on it is held lower by another link. All such links are settled at once: a link's share only
    grows while links with lower shares are settled, so none of them can be overtaken.
    """
    flow, column = np.nonzero(links >= 0)
    link = links[flow, column]
    load = np.bincount(link, minlength=len(bandwidth)).astype(np.int64)
    rate = np.zeros(len(links))
    left = np.asarray(bandwidth, dtype=np.float64).copy()
    while len(flow):
        count = np.bincount(link, minlength=len(left))
        share = np.maximum(left, 0) / np.maximum(count, 1)
        lowest_of_flow = np.full(len(links), np.inf)
        np.minimum.at(lowest_of_flow, flow, share[link])
        lowest_on_link = np.full(len(left), np.inf)
        np.minimum.at(lowest_on_link, link, lowest_of_flow[flow])
        settled = np.zeros(len(links), dtype=bool)
        settled[flow[(lowest_on_link >= share)[link]]] = True
        rate[settled] = lowest_of_flow[settled]
        done = settled[flow]
        left -= np.bincount(link[done], weights=rate[flow[done]], minlength=len(left))
        flow, link = flow[~done], link[~done]
    return rate, load
