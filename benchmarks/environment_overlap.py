"""Claim: 64 episodes with tools that take a second need at most 1.15 times the time of the longest of them alone.

The product's episodes, worker processes and engine client, over an engine that sleeps for each token and an environment
that awaits a second in each of three turns. Run from the repository's root:

    python -m benchmarks.environment_overlap
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.claims import report, report_table, start
from benchmarks.scripted_engine import SECRET

from posttrain.checkpoint.tiny.tokenizer import STOP_TOKENS, make_tokenizer
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.responses import GenerateRequest, GenerateResult
from posttrain.rl.environments.kinds import environments_of
from posttrain.rl.rollout.episode import EpisodeRunner
from posttrain.types import Prompt

CONFIG_DIR = Path(__file__).parents[1] / "config"
GOAL = 1.15
MEDIAN_TOKENS, MOST_MEDIANS, NUM_TURNS = 8, 4, 3
SLOW = """import asyncio


class Slow:
    def __init__(self, seed):
        self.num_turns = 0

    async def reset(self, row):
        return row["messages"], None

    async def step(self, action):
        await asyncio.sleep({seconds})
        self.num_turns += 1
        return [{{"role": "user", "content": "more"}}], self.num_turns == {num_turns}

    async def reward(self, trajectory):
        return 1.0
"""


@dataclass(frozen=True)
class Played:
    """Episodes that were played side by side.

    Args:
        seconds: Wall clock of all.
        longest: Number of the episode that took longest, and its sampled tokens.
    """

    seconds: float
    longest: tuple[int, int]


def main() -> None:
    """Measure 64 episodes together, and the longest alone."""
    _measure(count=64, tool_seconds=1.0, token_seconds=0.02)


def quick() -> None:
    """Run the same code for seconds."""
    _measure(count=4, tool_seconds=0.05, token_seconds=0.001)


def _measure(count: int, tool_seconds: float, token_seconds: float) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (port,) = choose_free_ports(1)
        arguments = [str(argument) for argument in (port, token_seconds, MEDIAN_TOKENS, MOST_MEDIANS)]
        engine = subprocess.Popen([sys.executable, "-m", "benchmarks.scripted_engine", *arguments])
        stack.callback(engine.wait)
        stack.callback(engine.kill)
        (folder / "slow.py").write_text(SLOW.format(seconds=tool_seconds, num_turns=NUM_TURNS))
        tokenizer = make_tokenizer(256)
        tokenizer.save_pretrained(folder / "hf")
        stops = {"eos_token_id": tokenizer.convert_tokens_to_ids([*STOP_TOKENS])}
        (folder / "hf" / "generation_config.json").write_text(json.dumps(stops))
        together = asyncio.run(_play(folder, port, range(count)))
        number, num_tokens = together.longest
        alone = asyncio.run(_play(folder, port, [number]))
    ideal = NUM_TURNS * tool_seconds + num_tokens * token_seconds
    rows = [
        (f"{count} episodes", f"{together.seconds:.2f}", f"{together.seconds / alone.seconds:.2f}"),
        ("the longest alone", f"{alone.seconds:.2f}", "1.00"),
        ("its tokens and tools", f"{ideal:.2f}", f"{ideal / alone.seconds:.2f}"),
    ]
    report_table(("", "seconds", "over the longest alone"), rows)
    report("time of 64 episodes over that of the longest alone", together.seconds / alone.seconds, GOAL)


async def _play(folder: Path, port: int, numbers: range | list[int]) -> Played:
    words = {
        "data.environment": f"{folder / 'slow.py'}:Slow",
        "data.reward": "environment",
        "rollout.max_response_tokens": 200,
    }
    settings = " ".join(f"{key}={value}" for key, value in words.items())
    config = resolve({"model": "tiny", "site": "local", "set": settings}, CONFIG_DIR).config
    with environments_of(config) as environments:
        async with EngineClient([f"http://127.0.0.1:{port}"], SECRET, 120.0) as client:
            await client.wait_ready(60.0)
            runner = EpisodeRunner(config, ChatTokenizer(folder / "hf"), environments, client.parse_tool_calls)
            # Processes of environments start with the first episodes, once in a training.
            await asyncio.gather(*(_episode(runner, client, -1 - place) for place in range(2)))
            began = time.perf_counter()
            played = await asyncio.gather(*(_episode(runner, client, number) for number in numbers))
            seconds = time.perf_counter() - began
    _, number, num_tokens = max(zip((one[0] for one in played), numbers, (one[1] for one in played), strict=True))
    return Played(seconds, (number, num_tokens))


async def _episode(runner: EpisodeRunner, client: EngineClient, number: int) -> tuple[float, int]:
    """Return the seconds and the sampled tokens of an episode."""

    async def respond(turn: int, request: GenerateRequest, engine: int | None) -> GenerateResult:
        return await client.sample(replace(request, sampling_seed=1000 * turn + abs(number)), engine)

    began = time.perf_counter()
    prompt = Prompt(abs(number), ({"role": "user", "content": f"{abs(number):04d}"},), "")
    episode = await runner.play(prompt, abs(number), respond)
    return time.perf_counter() - began, sum(episode.loss_mask)


if __name__ == "__main__":
    start(main, quick)
