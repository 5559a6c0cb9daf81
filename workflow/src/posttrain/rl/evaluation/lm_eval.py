"""Runs lm-eval on a served checkpoint, as a separate program in its own environment, over OpenAI's endpoints.

Its request is a file, the engine's secret is in its environment, and its results are the files that it writes. It uses
one address, which distributes requests over all engines of the step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from posttrain.cluster.processes import end_processes, start_child
from posttrain.config.schema import Config
from posttrain.plan.preflight.lm_eval import lm_eval_python
from posttrain.rl.data.chat import parse_template_kwargs
from posttrain.rl.engines.engine_endpoints import EngineEndpoints, engines_to_ask
from posttrain.rl.engines.one_address import one_address
from posttrain.rl.engines.verified_engines import verified_engines
from posttrain.store import read_json

log = logging.getLogger(__name__)

# Variable from which lm-eval takes its API key.
KEY_VARIABLE = "OPENAI_API_KEY"
# Log lines in an error: the end of a traceback.
NUM_LOG_LINES = 12
# lm-eval's file names contain the time.
_DATED = re.compile(r"_\d{4}-\d\d-\d\dT[\d.-]+(?=\.jsonl?$)")


def evaluate_with_lm_eval(
    config: Config, model: str, checkpoint: Path, folder: Path, log_folder: Path
) -> list[dict[str, Any]]:
    """Serve a checkpoint, run lm-eval on it, and return its results.

    Args:
        config: The resolved configuration; `evaluation.lm_eval`, `engine`, `rollout.max_response_tokens` and
            `data.chat_template_kwargs` apply.
        model: The model's name in lm-eval's records.
        checkpoint: In Hub layout, BF16 or FP8, with tokenizer and chat template.
        folder: Empty; receives `request.yaml`, `results.json`, `samples_{task}.jsonl` and `lm_eval.log`.
        log_folder: Folder for the engine's log.

    Returns:
        See `figures_of`.

    Raises:
        ConfigError: The engine serves other weights than those trained.
        RuntimeError: A task does not exist, or the engine or lm-eval ended with an error.
    """
    wanted = config.evaluation.lm_eval
    include = ["--include_path", wanted.task_folder] if wanted.task_folder else []
    # Check first: it takes seconds, while an engine may load for half an hour.
    _run(config, ["validate", "--tasks", ",".join(wanted.tasks), *include], folder / "lm_eval.log")
    with engines_to_ask(config, checkpoint, log_folder) as engines, one_address(engines.urls) as url:
        asyncio.run(_wait_right(config, engines, checkpoint))
        request = request_of(config, model, checkpoint, url, len(engines.urls), folder)
        (folder / "request.yaml").write_text(yaml.safe_dump(request, sort_keys=False), encoding="utf-8")
        log.info("lm-eval asks %s; its log: %s", ", ".join(wanted.tasks), folder / "lm_eval.log")
        words = ["run", "--config", str(folder / "request.yaml")]
        _run(config, words, folder / "lm_eval.log", engines, str(urlsplit(url).hostname))
    _tidy(folder)
    return figures_of(read_json(folder / "results.json"))


def request_of(
    config: Config, model: str, checkpoint: Path, url: str, num_engines: int, folder: Path
) -> dict[str, Any]:
    """Return lm-eval's request in the format of its `--config`.

    Batches are as large as in training, and as many requests are in flight as the engines run concurrently.
    """
    wanted = config.evaluation.lm_eval
    size = 1 if wanted.chat else config.engine.groups_per_request * config.rollout.num_samples_per_prompt
    arguments: dict[str, Any] = {
        "model": model,
        "base_url": f"{url}/v1/{'chat/' if wanted.chat else ''}completions",
        "num_concurrent": num_engines * max(1, config.engine.max_running_requests // size),
        # No retries: a failed request ends the measurement.
        "max_retries": 1,
        "timeout": math.ceil(config.engine.request_timeout_seconds),
        "max_length": config.model.architecture.max_position_embeddings,
        "max_gen_toks": config.rollout.max_response_tokens,
        "seed": config.evaluation.seed,
    }
    if not wanted.chat:
        arguments |= {"tokenizer": str(checkpoint), "tokenizer_backend": "huggingface"}
    variables = parse_template_kwargs(config.data.chat_template_kwargs)
    return {
        "model": "local-chat-completions" if wanted.chat else "local-completions",
        "model_args": arguments,
        "tasks": wanted.tasks,
        "batch_size": size,
        "apply_chat_template": wanted.chat,
        **({"gen_kwargs": {"chat_template_kwargs": variables}} if wanted.chat and variables else {}),
        **({"include_path": wanted.task_folder} if wanted.task_folder else {}),
        **({"num_fewshot": wanted.num_fewshot} if wanted.num_fewshot >= 0 else {}),
        **({"limit": wanted.limit} if wanted.limit else {}),
        "output_path": str(folder / "written"),
        "log_samples": True,
    }


def figures_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per task, metric and filter of lm-eval's `results_*.json`.

    Returns:
        task, metric, filter, value, stderr (None where lm-eval has none), higher_is_better, num_rows, num_fewshot and
        the task's version (None for a group of tasks).
    """
    rows = []
    for task, found in results["results"].items():
        for key, value in found.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "task": task,
                    "metric": metric,
                    "filter": kind,
                    "value": _finite(value),
                    "stderr": _finite(found.get(f"{metric}_stderr,{kind}")),
                    "higher_is_better": results.get("higher_is_better", {}).get(task, {}).get(metric),
                    "num_rows": results.get("n-samples", {}).get(task, {}).get("effective"),
                    "num_fewshot": results.get("n-shot", {}).get(task),
                    "version": results.get("versions", {}).get(task),
                }
            )
    return rows


def _finite(value: Any) -> float | None:
    """Return a finite number; None for "N/A" or anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


async def _wait_right(config: Config, engines: EngineEndpoints, checkpoint: Path) -> None:
    async with verified_engines(config, engines, checkpoint, has_chat=config.evaluation.lm_eval.chat):
        pass


def _run(
    config: Config, words: Sequence[str], log_path: Path, engines: EngineEndpoints | None = None, host: str = ""
) -> None:
    """Run lm-eval; it ends if this process does.

    Raises:
        RuntimeError: lm-eval or an engine ended with an error.
    """
    environment = {**os.environ, KEY_VARIABLE: engines.secret if engines else ""}
    # Use the user's proxy for the Hub, but not for the engine, which gets the secret.
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, (os.environ.get(name), host)))
    # Safe path: a folder of the user must not shadow a package.
    command = [lm_eval_python(config), "-P", "-m", "lm_eval", *words]
    with open(log_path, "ab") as output:
        process = start_child(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait()
        finally:
            end_processes([process])
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in dict.fromkeys(line for line in lines if "WARNING" in line):
        log.warning("lm-eval: %s", line)
    if code:
        if engines:
            engines.check_alive()
        tail = "\n    ".join(lines[-NUM_LOG_LINES:])
        raise RuntimeError(f"lm-eval ended with exit code {code}; the end of {log_path}:\n    {tail}")


def _tidy(folder: Path) -> None:
    """Move lm-eval's files out of the model's subfolder and remove times from their names."""
    for path in sorted((folder / "written").rglob("*.json*")):
        path.rename(folder / _DATED.sub("", path.name))
    shutil.rmtree(folder / "written")
