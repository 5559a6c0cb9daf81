"""What a trainer opens: no more than its run needs."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from posttrain.config.load import merge
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.rl.training.assembly import _open_makers
from posttrain.types import Prompt

CONFIG_DIR = Path(__file__).parents[4] / "config"


def test_a_run_on_stored_rollouts_reads_neither_tokenizer_nor_prompts(tmp_path: Path) -> None:
    def read_prompts() -> list[Prompt]:
        raise AssertionError("nothing is asked")

    config = merge({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    store = RolloutStore(tmp_path / "rollouts")
    with asyncio.Runner() as runner, ExitStack() as stack:
        found = _open_makers(config, tmp_path / "no model", {}, read_prompts, None, store, tmp_path, runner, stack)
    assert found == (None, None)
