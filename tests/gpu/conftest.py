from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.gpus import told_by_ranks
from tests.support.tiny_checkpoint import TRAINED, make_random_checkpoint


@pytest.fixture(scope="session")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return updated(device, params_dtype, layout): an update of the small GLM-5 from the same weights, made once."""
    checkpoint = tmp_path_factory.mktemp("random") / "hf"
    make_random_checkpoint(checkpoint, TRAINED, seed=3)
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make(device: str, params_dtype: str, layout: dict[str, int] | None = None, ranks: int = 1) -> dict[str, Any]:
        key = device, params_dtype, *sorted((layout or {}).items()), ranks
        if key not in made:
            order = {"device": device, "params_dtype": params_dtype, "parallel": layout or {}, "ranks": ranks}
            made[key] = told_by_ranks(ranks, work="update", checkpoint=str(checkpoint), **order)
        return made[key]

    return make
