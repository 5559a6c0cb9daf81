"""What published systems lose against attainable rates: four constants, fitted on all of their rows together.

Each has a mechanism, and none is for one row. `benchmarks/published_fit.py` fits them again and prints what each row is
off by, also with that row left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fitted:
    """The constants.

    Args:
        products: Time of products over their time at the best rate of a good shape: other shapes, backward passes, and
            clocks that fall under load.
        kernel_bytes: Bytes that kernels without products move over the fewest: norms, activations and residuals that
            are not fused pass the memory several times.
        gathers: Time of gathering sharded weights for each pass (FSDP) over their bytes at the rate of a link, of what
            no computation hides. Only for systems that shard weights, as this trainer does not.
        switch_seconds: Of an RL step between generating and training: sleeping and waking, offloading, rewards, data.
    """

    products: float
    kernel_bytes: float
    gathers: float
    switch_seconds: float


IDEAL = Fitted(products=1.0, kernel_bytes=1.0, gathers=0.0, switch_seconds=0.0)
FITTED = Fitted(products=1.64, kernel_bytes=2.64, gathers=1.05, switch_seconds=33.1)
