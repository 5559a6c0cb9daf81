"""The concurrency table beside the tool of the engine that is measured.

    python -m benchmarks.serving sglang     # needs `make env-sglang`
    python -m benchmarks.serving vllm       # needs `make env-vllm`

A real engine, told to compute with one thread, serves a small random Qwen3. By turns its own tool
(`sglang.benchmark.serving`, `vllm bench serve`) and ours send the same load to the same interface: random prompts,
responses of a fixed length, the same number of requests in flight and in all. A pair has short turns, since a machine
is not as fast in one second as in the next: theirs is imported once, and waits while ours measures. Both have the last
core, of which the engine has nothing: who measures waits for nobody who computes. What is compared is the median of
ours by theirs, over the turns of a pair and over pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

from benchmarks.claims import report, start
from tests.support import served_engines
from tests.support.scripted_endpoint import scripted_endpoint
from tests.support.sglang_environment import PYTHON as SGLANG
from tests.support.sglang_environment import require_sglang
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from tests.support.vllm_environment import PYTHON as VLLM
from tests.support.vllm_environment import require_vllm
from tests.support.workflow_runs import ROOT
from transformers import AutoTokenizer

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.command_line import CONFIG_DIR
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.ports import LOOPBACK, choose_free_ports
from posttrain.rl.engines.process import check_all_alive, started_engines
from posttrain.rl.engines.secret import new_secret
from posttrain.rl.engines.streaming import COMPLETIONS, GENERATE, Endpoint
from posttrain_serving.benchmark.serving import FEWEST_REQUESTS, Load, measure_level
from posttrain_serving.benchmark.serving_prompts import random_prompts

PAIRS, TURNS, CONCURRENCIES = 7, 5, (1, 8)
INPUT_TOKENS, OUTPUT_TOKENS, ROUNDS = 512, 64, 4
ARCHITECTURE = dataclasses.replace(
    TINY_QWEN3,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=6,
    head_dim=64,
    max_position_embeddings=1024,
)
# What of their result is which of ours.
COMPARED = {
    "output_tokens_per_second": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "itl_p50_ms": "median_itl_ms",
}
LOWEST, HIGHEST = 0.95, 1.05
ONE_THREAD = {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
# Runs a module with the arguments of a line of its input, as often as there is one, and says when that has ended.
# SGLang's environment lacks a package that its tool imports and this load does not use; ours has it.
THEIR_TOOL = """
import json, os, runpy, sys
sys.path.append(sys.argv[1])
module, answers = sys.argv[2], os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    sys.argv = [module, *json.loads(line)]
    runpy.run_module(module, run_name="__main__")
    print("done", file=answers, flush=True)
"""


class OwnTool:
    """An engine's own tool, imported once.

    Args:
        python: Of the engine's environment.
        module: What is run.
        secret: That it shows; empty: none.
    """

    def __init__(self, python: Path | str, module: str, secret: str):
        own = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": secret}
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
        command = [str(python), "-c", THEIR_TOOL, sysconfig.get_path("purelib"), module]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdin=pipe, stdout=pipe)

    def run(self, flags: Sequence[object]) -> None:
        """Run it to its end."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([str(word) for word in flags]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", "what it has printed stands above"

    def end(self) -> None:
        """End its process."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Served:
    """A model that an engine serves.

    Args:
        endpoint: Where it answers.
        model: Its folder.
        flags: Of the engine's own tool, by what is served, concurrency, seed and the file for the result.
        tool: That tool.
    """

    endpoint: Endpoint
    model: Path
    flags: Callable[[Served, int, int, Path], list[object]]
    tool: OwnTool


@contextmanager
def served(engine: str, folder: Path) -> Iterator[Served]:
    """Serve a small model with a real engine."""
    model = folder / "model"
    make_random_checkpoint(model, ARCHITECTURE, seed=1)
    make_tokenizer(ARCHITECTURE.max_position_embeddings).save_pretrained(model)
    serve, python, module, flags = ENGINES[engine]
    *cores, last = sorted(os.sched_getaffinity(0))
    assert cores, "an engine needs a core, and who measures it another"
    os.sched_setaffinity(0, cores)
    with patch.dict(os.environ, ONE_THREAD), serve(model, folder) as endpoint:
        os.sched_setaffinity(0, [last])
        tool = OwnTool(python, module, endpoint.secret)
        try:
            yield Served(endpoint, model, flags, tool)
        finally:
            tool.end()


@contextmanager
def served_by_vllm(model: Path, folder: Path) -> Iterator[Endpoint]:
    """Serve with vLLM's CPU package."""
    with served_engines.vllm(served_engines.Learned("qwen3", "bf16", model, cast(Any, None), []), folder, 1024) as (
        url,
        name,
    ):
        yield Endpoint(url, name, COMPLETIONS)


@contextmanager
def served_by_sglang(model: Path, folder: Path) -> Iterator[Endpoint]:
    """Serve as a training would."""
    asked = {"model": "tiny_qwen3", "site": "local", "set": f"engine.kind=sglang engine.python={SGLANG}"}
    config = resolve(asked, CONFIG_DIR).config
    (port,) = choose_free_ports(1)
    secret = new_secret()
    command = render_engine_command(config, 0, model, LOOPBACK, port)
    with started_engines({0: command}, folder / "logs", secret) as engines:

        async def wait() -> None:
            async with EngineClient([command.url], secret, 60.0) as client:
                await client.wait_ready(300.0, lambda: check_all_alive(engines))

        asyncio.run(wait())
        yield Endpoint(command.url, str(model), GENERATE, secret)


def sglang_flags(by: Served, concurrency: int, seed: int, result: Path) -> list[object]:
    """Return what SGLang's own tool is asked."""
    sent: dict[str, object] = {
        **{"--backend": "sglang", "--base-url": by.endpoint.url, "--model": by.model},
        **{"--dataset-name": "random-ids", "--random-range-ratio": 1.0, "--seed": seed},
        **{"--random-input-len": INPUT_TOKENS, "--random-output-len": OUTPUT_TOKENS},
        **{"--num-prompts": num_requests(concurrency), "--max-concurrency": concurrency},
        **{"--warmup-requests": concurrency, "--output-file": result},
    }
    return [*(word for pair in sent.items() for word in pair), "--tokenize-prompt", "--disable-tqdm"]


def vllm_flags(by: Served, concurrency: int, seed: int, result: Path) -> list[object]:
    """Return what vLLM's own tool is asked."""
    sent: dict[str, object] = {
        **{"--backend": "openai", "--base-url": by.endpoint.url, "--tokenizer": by.model},
        **{"--model": by.endpoint.model, "--dataset-name": "random", "--random-range-ratio": 0.0, "--seed": seed},
        **{"--random-input-len": INPUT_TOKENS, "--random-output-len": OUTPUT_TOKENS, "--temperature": 0},
        **{"--num-prompts": num_requests(concurrency), "--max-concurrency": concurrency},
        **{"--num-warmups": concurrency, "--result-dir": result.parent, "--result-filename": result.name},
    }
    flags = [word for pair in sent.items() for word in pair]
    return ["bench", "serve", *flags, "--ignore-eos", "--save-result", "--disable-tqdm"]


def theirs(by: Served, concurrency: int, seed: int) -> dict[str, float]:
    """Return what the engine's own tool measures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        by.tool.run(by.flags(by, concurrency, seed, result))
        told = json.loads(result.read_text().splitlines()[-1])
    assert told["completed"] == num_requests(concurrency), told
    assert told["total_output_tokens"] == num_requests(concurrency) * OUTPUT_TOKENS, told
    return {ours: told[name] for ours, name in COMPARED.items()}


def ours(by: Served, concurrency: int, seed: int) -> dict[str, float]:
    """Return what our table says."""
    prompts = random_prompts(INPUT_TOKENS, ARCHITECTURE.vocab_size, seed)
    if by.endpoint.api == COMPLETIONS:  # vLLM's own tool sends texts
        tokenizer, numbers = AutoTokenizer.from_pretrained(by.model), prompts
        prompts = lambda row, number: str(tokenizer.decode(cast(list[int], numbers(row, number))))  # noqa: E731
    level = asyncio.run(measure_level([by.endpoint], prompts, concurrency, Load(OUTPUT_TOKENS, ROUNDS, seed)))
    return {name: getattr(level, name) for name in COMPARED}


def num_requests(concurrency: int) -> int:
    """Return how many requests both send."""
    return max(FEWEST_REQUESTS, ROUNDS * concurrency)


def ratios(by: Served, concurrency: int, pairs: int) -> dict[str, float]:
    """Return the median over pairs of ours by theirs, which is the median of a pair's turns."""
    found, seeds = [], count(1000 * concurrency)
    theirs(by, concurrency, next(seeds))  # it is imported
    for pair in range(pairs):
        turns = []
        for turn in range(TURNS):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            told = {tool: tool(by, concurrency, next(seeds)) for tool in order}
            turns.append({name: told[ours][name] / told[theirs][name] for name in COMPARED})
        found.append({name: statistics.median(turn[name] for turn in turns) for name in COMPARED})
        print(f"{concurrency} in flight, pair {pair + 1}: {found[-1]}, last {told[ours]}", flush=True)
    return {name: statistics.median(pair[name] for pair in found) for name in COMPARED}


def main() -> None:
    """Measure, and print a claim for each ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    args = parser.parse_args()
    REQUIRED[args.engine]()
    with tempfile.TemporaryDirectory() as folder, served(args.engine, Path(folder)) as by:
        for concurrency in CONCURRENCIES:
            for name, ratio in ratios(by, concurrency, args.pairs).items():
                claim = f"{name} by that of {args.engine}'s own tool, {concurrency} in flight"
                report(f"{claim}: at least", ratio, LOWEST, at_least=True)
                report(f"{claim}: at most", ratio, HIGHEST)


def quick() -> None:
    """Our table alone, of an endpoint that sends one token every 10 ms; it needs no engine."""
    with scripted_endpoint() as url:
        endpoint, prompts = Endpoint(url, "single", COMPLETIONS), random_prompts(8, 100, 0)
        level = asyncio.run(measure_level([endpoint], prompts, 1, Load(8, 1, 0)))
    report("milliseconds between tokens that are sent every 10 ms", level.itl_p50_ms, 20.0)


# How it serves, whose Python runs its own tool, which module that is, and what it is asked.
ENGINES = {
    "sglang": (served_by_sglang, SGLANG, "sglang.benchmark.serving", sglang_flags),
    "vllm": (served_by_vllm, VLLM, "vllm.entrypoints.cli.main", vllm_flags),
}
REQUIRED = {"sglang": require_sglang, "vllm": require_vllm}

if __name__ == "__main__":
    start(main, quick)
