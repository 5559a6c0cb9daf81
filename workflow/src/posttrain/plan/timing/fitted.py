"""Losses of published systems against attainable rates: four constants, fitted jointly on all published rows.

Each has a mechanism, and none is for a single row. `benchmarks/published_fit.py` repeats the fit and prints the error
of each row, also with that row left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """The fitted constants.

    Args:
        products: Time of products over their time at the rate of a well-shaped one, because of other shapes, backward
            passes and clocks that drop under load.
        kernel_bytes: Bytes moved by kernels without products over the minimum, because unfused norms, activations and
            residuals pass the memory several times.
        gathers: Time of gathering sharded weights for each pass (FSDP) over their bytes at a link's rate, without the
            part hidden behind computation. Only for systems that shard weights, which this trainer does not.
        switch_seconds: Time per RL step between generation and training: sleep, wake-up, offloading, rewards, data.
    """

    products: float
    kernel_bytes: float
    gathers: float
    switch_seconds: float


IDEAL = Fitted(products=1.0, kernel_bytes=1.0, gathers=0.0, switch_seconds=0.0)
FITTED = Fitted(products=1.64, kernel_bytes=2.64, gathers=1.05, switch_seconds=33.1)
