"""Measure the speed of an endpoint by concurrency; the rule `benchmark_serving` measures what a run trained."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from posttrain.config.command_line import CONFIG_DIR
from posttrain.errors import ConfigError, Problem, raise_if_any
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain.rl.engines.streaming import CHAT, COMPLETIONS, Endpoint, open_session, served_models
from posttrain.rl.engines.verified_engines import verify_all
from posttrain.store import hash_file, write_text
from posttrain_serving.benchmark.serving import Load, PromptOf
from posttrain_serving.benchmark.serving_page import render_serving
from posttrain_serving.benchmark.serving_prompts import given_prompts, random_prompts, read_prompts
from posttrain_serving.benchmark.serving_results import Record, format_tables, measure_table, tables_beside
from posttrain_serving.checkpoint import find_checkpoint

log = logging.getLogger(__name__)

PROBE_SECONDS = 30.0
MAX_NAMES, MAX_NAME_CHARACTERS = 20, 100


def main(
    url: str,
    model: str,
    checkpoint: str,
    chat: bool,
    dataset: Path | None,
    input_tokens: int,
    vocabulary: int,
    output_tokens: int,
    concurrency: Sequence[int],
    requests_per_client: int,
    temperature: float,
    seed: int,
    name: str,
    beside: Sequence[str],
    output: Path,
) -> None:
    """Check the endpoint, measure the missing rows, and write and print the table."""
    endpoint = Endpoint(url.rstrip("/"), model, CHAT if chat else COMPLETIONS, os.environ.get(SECRET_VARIABLE, ""))
    others = tables_beside(beside)
    numbers = (input_tokens, vocabulary, output_tokens, requests_per_client, *concurrency)
    _refuse_nonsense(url, chat, dataset, min(numbers))
    served = _served(checkpoint, model)
    raise_if_any(asyncio.run(_find_problems(endpoint, output_tokens + (0 if dataset else input_tokens))))
    if served:
        asyncio.run(verify_all([endpoint.url], endpoint.secret, served, chat))
    else:
        log.warning("what %s serves is not compared with what was trained: --checkpoint says what that is", url)
    prompts = _prompts(endpoint, dataset, input_tokens, vocabulary, seed)
    load = Load(output_tokens, requests_per_client, seed, temperature)
    rows = list(dict.fromkeys(concurrency))
    asked = {"dataset": hash_file(dataset)} if dataset else {"input_tokens": input_tokens, "vocabulary": vocabulary}
    question = {"url": endpoint.url, "model": model, "api": endpoint.api, "rows": rows, **asdict(load), **asked}
    record = Record(output, name or f"{model} at {endpoint.url}", question, rows)
    asyncio.run(measure_table(record, [endpoint], prompts, load))
    tables = [record.table, *others]
    print(format_tables(tables))
    page = output.with_suffix(".html")
    write_text(page, render_serving(model, tables))
    print(f"serving: {page.resolve()}", flush=True)


def _refuse_nonsense(url: str, chat: bool, dataset: Path | None, smallest: int) -> None:
    problems = []
    if not url.startswith(("http://", "https://")):
        problems.append(
            Problem("not-an-address", "URL", repr(url), "http://HOST:PORT, without /v1", "give the endpoint's address")
        )
    if smallest < 1:
        problems.append(Problem("not-a-count", "a length or a count", str(smallest), "1 or more", "ask for more"))
    if chat and dataset is None:
        allowed = "a file of prompts: conversations need text, not random tokens"
        problems.append(
            Problem("not-set", "--dataset", "not given, with --chat", allowed, "name one, or leave out --chat")
        )
    raise_if_any(problems)


async def _find_problems(endpoint: Endpoint, length: int) -> list[Problem]:
    """Return the problems of the request that the endpoint reports."""
    try:
        async with open_session(PROBE_SECONDS) as session:
            models = await served_models(session, endpoint)
    except EngineError as error:
        allowed = "the address of a server that speaks OpenAI's interface, without /v1"
        return [Problem("server-unusable", "URL", str(error), allowed, "start it, or give its own address")]
    if endpoint.model not in models:
        shown = [name[:MAX_NAME_CHARACTERS] for name in list(models)[:MAX_NAMES]]
        known = ", ".join([*shown, *["..."] * (len(models) > MAX_NAMES)]) or "none"
        return [
            Problem(
                "unknown-name", "--model", endpoint.model, f"a model of {endpoint.url}: {known}", "name one of these"
            )
        ]
    room = models[endpoint.model]
    if room is not None and length > room:
        allowed = f"at most {room:,}, what {endpoint.model} has room for there"
        return [
            Problem(
                "exceeds-positions", "--input-tokens + --output-tokens", f"{length:,}", allowed, "ask for fewer tokens"
            )
        ]
    return []


def _served(checkpoint: str, model: str) -> Path | None:
    """Return the folder that the endpoint must serve; None if neither --checkpoint nor the model names one."""
    if not checkpoint:
        return Path(model) if Path(model).is_dir() else None
    found = find_checkpoint(checkpoint, "", [CONFIG_DIR], Path("results"))
    if not found.is_folder or found.missing:
        remedy = found.missing or "name the folder that is served"
        raise ConfigError([Problem("no-such-checkpoint", "--checkpoint", checkpoint, "an export that is here", remedy)])
    return Path(found.place)


def _prompts(endpoint: Endpoint, dataset: Path | None, input_tokens: int, vocabulary: int, seed: int) -> PromptOf:
    if dataset is None:
        return random_prompts(input_tokens, vocabulary, seed)
    if not dataset.is_file():
        raise ConfigError(
            [Problem("no-such-file", "--dataset", str(dataset), "a file of prompts", "name one that is there")]
        )
    return given_prompts(read_prompts(dataset, endpoint.api), seed)
