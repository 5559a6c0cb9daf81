"""Measure the speed of a served checkpoint by concurrency (`evaluation.serving`)."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

from posttrain.checkpoint.staging.node_local import require_content
from posttrain.cli import RESOLVED, command_line, run
from posttrain.config.schema import Config
from posttrain.plan.sizing.evaluation import serving_config
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.data.dataset import load_prompts
from posttrain.rl.engines.engine_endpoints import EngineEndpoints, engines_to_ask
from posttrain.rl.engines.streaming import COMPLETIONS, GENERATE, Endpoint
from posttrain.rl.engines.verified_engines import verified_engines
from posttrain.store import write_text
from posttrain_serving.benchmark.serving import Load, PromptOf
from posttrain_serving.benchmark.serving_page import render_serving
from posttrain_serving.benchmark.serving_prompts import given_prompts, random_prompts
from posttrain_serving.benchmark.serving_results import Record, format_tables, measure_table, tables_beside


def main() -> None:
    """Serve the checkpoint, measure every concurrency, print the table and write it."""
    args = command_line(
        __doc__,
        resolved=RESOLVED,
        checkpoint=(Path, "checkpoint in Hub layout, BF16 or FP8"),
        checkpoint_receipt=Path,
        dataset=(Path, "folder with heldout.jsonl"),
        output=(Path, "the table, as JSON, written row by row; CSV and page beside it"),
    )
    config = serving_config(args.resolved.config)
    checkpoint = require_content(args.checkpoint, args.checkpoint_receipt, config.stage.workers)
    asked = config.evaluation.serving
    others = tables_beside(asked.beside)
    name = f"{args.resolved.run}, {config.engine.kind}"
    question = {"checkpoint": checkpoint.digest, "engine": asdict(config.engine), **asdict(asked)}
    del question["beside"]
    record = Record(args.output, name, question, asked.concurrencies)
    log_folder = args.output.parent / "benchmark_serving.engines"
    with engines_to_ask(config, args.checkpoint, log_folder, merge_requests=True) as engines:
        asyncio.run(
            measure(config, engines, args.checkpoint, prompts_of(config, args.checkpoint, args.dataset), record)
        )
    tables = [record.table, *others]
    print(format_tables(tables))
    page = args.output.with_suffix(".html")
    write_text(page, render_serving(config.model.name, tables))
    print(f"serving: {page.resolve()}", flush=True)


def prompts_of(config: Config, checkpoint: Path, dataset: Path) -> PromptOf:
    """Return the prompts: random tokens, or the held-out prompts as rendered in training."""
    asked = config.evaluation.serving
    if asked.prompts == "random":
        return random_prompts(asked.input_tokens, config.model.architecture.vocab_size, asked.seed)
    tokenizer = ChatTokenizer(checkpoint, config.data.chat_template_kwargs)
    rows = load_prompts(dataset / "heldout.jsonl")
    return given_prompts([tokenizer.render(prompt.messages, prompt.tools) for prompt in rows], asked.seed)


async def measure(
    config: Config, engines: EngineEndpoints, checkpoint: Path, prompts: PromptOf, record: Record
) -> None:
    """Wait for the engines, check them against the reference log-probabilities, and measure the missing rows."""
    asked, timeout = config.evaluation.serving, config.engine.request_timeout_seconds
    api = GENERATE if config.engine.kind == "embedded" else COMPLETIONS
    endpoints = [Endpoint(url, str(checkpoint), api, engines.secret) for url in engines.urls]
    load = Load(asked.output_tokens, asked.requests_per_client, asked.seed, asked.temperature, timeout)
    async with verified_engines(config, engines, checkpoint):
        await measure_table(record, endpoints, prompts, load)


if __name__ == "__main__":
    run(main)
