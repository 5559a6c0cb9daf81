"""The concurrency table beside the tool of the engine that is measured.

    python -m benchmarks.serving            # needs `make env-sglang`

A real SGLang serves a small random Qwen3 on this machine's CPU. By turns SGLang's own tool (`sglang.benchmark.serving`)
and ours send the same load to /generate: random prompts, responses of a fixed length, the same number of requests in
flight and in all. What is compared is the median, over pairs, of ours by theirs.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.claims import report
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from tests.support.workflow_runs import ROOT

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.config.command_line import CONFIG_DIR
from posttrain.engines.client import EngineClient
from posttrain.engines.launch_command import render_engine_command
from posttrain.engines.ports import LOOPBACK, choose_free_ports
from posttrain.engines.process import check_all_alive, started_engines
from posttrain.engines.secret import new_secret
from posttrain.engines.streaming import GENERATE, Endpoint
from posttrain.evaluation.serving import FEWEST_REQUESTS, Load, measure_level
from posttrain.evaluation.serving_prompts import random_prompts
from posttrain.planner.resolve import resolve

PAIRS, CONCURRENCIES = 7, (1, 8)
INPUT_TOKENS, OUTPUT_TOKENS, ROUNDS = 64, 64, 4
ARCHITECTURE = dataclasses.replace(
    TINY_QWEN3, hidden_size=256, intermediate_size=768, num_hidden_layers=6, max_position_embeddings=1024
)
# What of their result is which of ours.
COMPARED = {
    "output_tokens_per_second": "output_throughput",
    "ttft_ms": "median_ttft_ms",
    "tpot_ms": "median_tpot_ms",
    "itl_p50_ms": "median_itl_ms",
}
LOWEST, HIGHEST = 0.95, 1.05
# SGLang's environment lacks a package that its tool imports and this load does not use; ours has it.
THEIR_TOOL = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("sglang.benchmark.serving", run_name="__main__")
"""


@contextmanager
def served(folder: Path) -> Iterator[Endpoint]:
    """Serve a small model with a real SGLang; where it answers."""
    model = folder / "model"
    make_random_checkpoint(model, ARCHITECTURE, seed=1)
    make_tokenizer(ARCHITECTURE.max_position_embeddings).save_pretrained(model)
    asked = {"model": "tiny_qwen3", "site": "local", "set": f"engine.kind=sglang engine.python={PYTHON}"}
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


def theirs(endpoint: Endpoint, concurrency: int, seed: int) -> dict[str, float]:
    """Return what SGLang's own tool measures."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.jsonl"
        sent = {
            **{"--backend": "sglang", "--base-url": endpoint.url, "--model": endpoint.model},
            **{"--dataset-name": "random-ids", "--random-range-ratio": 1.0, "--seed": seed},
            **{"--random-input-len": INPUT_TOKENS, "--random-output-len": OUTPUT_TOKENS},
            **{"--num-prompts": num_requests(concurrency), "--max-concurrency": concurrency},
            **{"--warmup-requests": concurrency, "--output-file": result},
        }
        flags = [str(word) for pair in sent.items() for word in pair]
        packages = sysconfig.get_path("purelib")
        command = [PYTHON, "-c", THEIR_TOOL, packages, *flags, "--tokenize-prompt", "--disable-tqdm"]
        own = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": endpoint.secret}
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
        ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr[-2000:]
        told = json.loads(result.read_text().splitlines()[-1])
    assert told["completed"] == num_requests(concurrency), told
    return {ours: told[name] for ours, name in COMPARED.items()}


def ours(endpoint: Endpoint, concurrency: int, seed: int) -> dict[str, float]:
    """Return what our table says."""
    prompts = random_prompts(INPUT_TOKENS, ARCHITECTURE.vocab_size, seed)
    level = asyncio.run(measure_level([endpoint], prompts, concurrency, Load(OUTPUT_TOKENS, ROUNDS, seed)))
    return {name: getattr(level, name) for name in COMPARED}


def num_requests(concurrency: int) -> int:
    """Return how many requests both send."""
    return max(FEWEST_REQUESTS, ROUNDS * concurrency)


def ratios(endpoint: Endpoint, concurrency: int, pairs: int) -> dict[str, float]:
    """Return the median of ours by theirs; whoever goes first changes from pair to pair."""
    found = []
    for pair in range(pairs):
        tools = (ours, theirs) if pair % 2 else (theirs, ours)
        seed = 1000 * concurrency + 10 * pair
        told = {tool: tool(endpoint, concurrency, seed + place) for place, tool in enumerate(tools)}
        found.append({name: told[ours][name] / told[theirs][name] for name in COMPARED})
        print(f"{concurrency} in flight, pair {pair + 1}: {[told[tool] for tool in (ours, theirs)]}", flush=True)
    return {name: statistics.median(pair[name] for pair in found) for name in COMPARED}


def main() -> None:
    """Measure, and print a claim for each ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    args = parser.parse_args()
    require_sglang()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as endpoint:
        for concurrency in CONCURRENCIES:
            for name, ratio in ratios(endpoint, concurrency, args.pairs).items():
                claim = f"{name} by that of SGLang's own tool, {concurrency} in flight"
                report(f"{claim}: at least", ratio, LOWEST, at_least=True)
                report(f"{claim}: at most", ratio, HIGHEST)


if __name__ == "__main__":
    main()
