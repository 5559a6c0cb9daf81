"""What docs/environments.md shows works as it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.support.workflow_runs import ROOT

from posttrain.config.load import merge
from posttrain.config.own_environment import BUILT_IN
from posttrain.rl.environments import pool
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.environments.protocol import EpisodeReward

PAGE = (ROOT / "docs/environments.md").read_text()


def test_the_example_plays(tmp_path: Path) -> None:
    (found,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "guess.py").write_text(found)
    words = f"data.environment={tmp_path}/guess.py:Guess data.reward=environment environment.num_workers=1"
    config = merge({"model": "tiny", "site": "local", "set": words}, ROOT / "config").config

    async def episode():
        with environments_of(config) as environments:
            environment = await environments.open(3)
            start = await environment.reset({"messages": [{"role": "user", "content": "Guess."}], "label": None})
            assert start.messages[0]["content"] == "Guess."
            hints = []
            for guess in range(10):
                answer = await environment.step({"role": "assistant", "content": str(guess)})
                if answer.done:
                    return hints, await environment.reward({"messages": [], "num_turns": guess + 1, "end": "done"})
                hints += [message["content"] for message in answer.messages]

    hints, reward = asyncio.run(episode())
    assert {*hints} == {"higher"}
    assert reward == EpisodeReward(1 / (len(hints) + 1))


def test_the_page_lists_all_that_are_built_in() -> None:
    _, _, rest = PAGE.partition("\n## Built in\n")
    table = rest.partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [*BUILT_IN] == [*pool.BUILT_IN]
