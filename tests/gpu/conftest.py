from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import made_once
from tests.support.gpus import told_by_ranks
from tests.support.tiny_checkpoint import TRAINED, make_random_checkpoint


@pytest.fixture(scope="session")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return updated(device, params_dtype, layout): an update of the small GLM-5 from the same weights.

    With `replays` its tokens go to experts drawn by chance. Each is made once, whichever worker needs it first.
    """
    checkpoint = made_once(tmp_path_factory, "gpu_model", lambda path: make_random_checkpoint(path, TRAINED, seed=3))

    def make(
        device: str,
        params_dtype: str,
        layout: dict[str, int] | None = None,
        ranks: int = 1,
        replays: bool = False,
    ) -> dict[str, Any]:
        order = {"device": device, "params_dtype": params_dtype, "parallel": layout or {}, "ranks": ranks}

        def tell(folder: Path) -> None:
            routes = {"routes": str(folder / "routes")} if replays else {}
            told = told_by_ranks(ranks, work="update", checkpoint=str(checkpoint), **order, **routes)
            (folder / "told.json").write_text(json.dumps(told))

        name = hashlib.sha256(json.dumps([order, replays], sort_keys=True).encode()).hexdigest()[:12]
        return json.loads((made_once(tmp_path_factory, f"gpu_{name}", tell) / "told.json").read_text())

    return make
