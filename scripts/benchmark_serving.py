"""Measure the speed of a served checkpoint by concurrency, with prompts of the held-out set."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict
from pathlib import Path

from posttrain.artifacts import write_json
from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.schema import Config
from posttrain.data.chat import ChatTokenizer
from posttrain.data.dataset import load_prompts
from posttrain.engines.given import AskedEngines, client_of, engines_to_ask
from posttrain.evaluation.serving import Level, format_table, measure_serving
from posttrain.planner.sizing.evaluation import serving_config


def main() -> None:
    """Serve the checkpoint, measure every concurrency, print the table and write it."""
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        checkpoint=(Path, "checkpoint in Hub layout, BF16 or FP8"),
        checkpoint_receipt=Path,
        dataset=(Path, "folder with heldout.jsonl"),
        output=(Path, "the table, as JSON; written last"),
        concurrency={"type": int, "nargs": "+", "default": [1, 8, 32, 64], "help": "requests in flight"},
        requests={"type": int, "default": 32, "help": "requests per level, at least as many as are in flight"},
        output_tokens={"type": int, "default": 32, "help": "length of every response"},
    )
    config = serving_config(args.resolved.config)
    checkpoint = require_content(args.checkpoint, args.checkpoint_receipt, config.stage.workers)
    tokenizer = ChatTokenizer(args.checkpoint, config.data.chat_template_kwargs)
    rows = load_prompts(args.dataset / "heldout.jsonl")
    prompts = [tokenizer.render(prompt.messages, prompt.tools) for prompt in rows]
    log_folder = args.output.parent / "benchmark_serving.engines"
    with engines_to_ask(config, args.checkpoint, log_folder, merge_requests=True) as engines:
        levels = asyncio.run(measure(config, engines, prompts, args))
    print(format_table(levels))
    write_json(
        args.output,
        {
            "checkpoint": checkpoint.digest,
            "output_tokens": args.output_tokens,
            "levels": [asdict(level) for level in levels],
        },
    )


async def measure(
    config: Config, engines: AskedEngines, prompts: list[tuple[int, ...]], args: argparse.Namespace
) -> list[Level]:
    """Wait for the engines and measure them."""
    async with client_of(config, engines) as client:
        return await measure_serving(client, prompts, args.concurrency, args.requests, args.output_tokens)


if __name__ == "__main__":
    run(main)
