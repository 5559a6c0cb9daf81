from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.gpus import told_by_ranks
from tests.support.tiny_checkpoint import TRAINED, make_random_checkpoint


@pytest.fixture(scope="session")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return updated(device, params_dtype, layout): an update of the small GLM-5 from the same weights, made once.

    With `replays` its tokens go to experts drawn by chance.
    """
    root = tmp_path_factory.mktemp("random")
    checkpoint = root / "hf"
    make_random_checkpoint(checkpoint, TRAINED, seed=3)
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make(
        device: str,
        params_dtype: str,
        layout: dict[str, int] | None = None,
        ranks: int = 1,
        replays: bool = False,
    ) -> dict[str, Any]:
        key = device, params_dtype, *sorted((layout or {}).items()), ranks, replays
        if key not in made:
            order = {"device": device, "params_dtype": params_dtype, "parallel": layout or {}, "ranks": ranks}
            order |= {"routes": str(root / "routes")} if replays else {}
            made[key] = told_by_ranks(ranks, work="update", checkpoint=str(checkpoint), **order)
        return made[key]

    return make
