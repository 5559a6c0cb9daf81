"""Results of one precision's engines, stored on disk until all precisions are compared.

The engines answer held-out prompts and suites as in an evaluation. Then they return their likeliest tokens at every
position of some of the original's responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.plan.sizing.memory import GIB
from posttrain.rl.engines.engine_endpoints import EngineEndpoints
from posttrain.rl.engines.teacher_forcing import ForcedTokens
from posttrain.rl.evaluation.heldout import EvalTask, Sampled, answer_eval_tasks
from posttrain.store import read_json, write_atomic, write_json
from posttrain_serving.precision.divergence import Likeliest, Sample

# Likeliest tokens per position; the maximum of OpenAI's API.
NUM_LIKELIEST = 20
# Concurrent requests per engine, each with the likeliest tokens of a whole response.
FORCED_AT_A_TIME = 4


@dataclass(frozen=True)
class EngineLogprobs:
    """Results of one precision's engines.

    Args:
        precision: `config.deployment.ORIGINAL`, or the format.
        engine: Kind of the engines.
        nodes: Number of nodes.
        engine_gib: Memory, see `engine_gib`.
        tokens_per_second: Throughput on the held-out prompts.
        passed: Task -> (prompt id, passes) of each response.
        samples: The original's responses, over which all precisions are compared.
        likeliest: The likeliest tokens at every position of `samples`.
    """

    precision: str
    engine: str
    nodes: int
    engine_gib: float
    tokens_per_second: float
    passed: Mapping[str, Sequence[tuple[int, bool]]]
    samples: Sequence[Sample]
    likeliest: Likeliest


def ask(
    config: Config,
    precision: str,
    checkpoint: Path,
    eval_tasks: Sequence[EvalTask],
    log_folder: Path,
    given: Sequence[Sample] = (),
) -> EngineLogprobs:
    """Serve a checkpoint, query its engines, and return the results.

    Args:
        config: Configuration of the engines (`serving_config`).
        precision: See `EngineLogprobs`.
        checkpoint: Checkpoint in Hub layout.
        eval_tasks: Tasks to answer, the held-out prompts first.
        log_folder: Gets the engines' logs.
        given: The original's responses; empty: these engines are the original's.

    Raises:
        RuntimeError: An engine does not start or fails.
    """
    told: list[tuple[Sequence[Sample], Likeliest]] = []

    async def force(engines: EngineEndpoints, sampled: Sequence[Sampled]) -> None:
        samples = given or samples_of(config, sampled[0])
        told.append((samples, await likeliest_in(engines, samples, config.engine.request_timeout_seconds)))

    answered = answer_eval_tasks(config, checkpoint, eval_tasks, log_folder, then=force)
    ((samples, likeliest),) = told
    return EngineLogprobs(
        precision,
        config.engine.kind,
        config.nodes,
        engine_gib(config, checkpoint),
        answered[eval_tasks[0].name].tokens_per_second,
        {name: [(one.prompt.prompt_id, one.passes) for one in each.graded] for name, each in answered.items()},
        samples,
        likeliest,
    )


def samples_of(config: Config, sampled: Sampled) -> list[Sample]:
    """Return the first response to each of the first prompts, truncated to leave one token for the reading engine."""
    episodes, _ = sampled
    step, room = config.evaluation.num_samples_per_prompt, config.model.architecture.max_position_embeddings - 1
    firsts = episodes[::step][: config.evaluation.deployment.num_samples]
    return [Sample(episode.tokens[:room], episode.loss_mask.index(1)) for episode in firsts]


async def likeliest_in(engines: EngineEndpoints, samples: Sequence[Sample], timeout_seconds: float) -> Likeliest:
    """Return the likeliest tokens at every position of the responses, N positions over all samples.

    Raises:
        EngineError: An engine does not return them.
    """
    async with AsyncExitStack() as stack:
        servers = [ForcedTokens(url, engines.secret, timeout_seconds) for url in engines.urls]
        for server in servers:
            await stack.enter_async_context(server)
        at_a_time = asyncio.Semaphore(FORCED_AT_A_TIME * len(servers))

        async def one(number: int, sample: Sample) -> list[list[tuple[int, float]]]:
            prompt, response = sample.tokens[: sample.num_prompt_tokens], sample.tokens[sample.num_prompt_tokens :]
            async with at_a_time:
                return await servers[number % len(servers)].likeliest(prompt, response, NUM_LIKELIEST)

        found = await asyncio.gather(*(one(number, sample) for number, sample in enumerate(samples)))
    places = [place for sample in found for place in sample]
    tokens = torch.tensor([[token for token, _ in place] for place in places], dtype=torch.int32)
    return Likeliest(tokens, torch.tensor([[value for _, value in place] for place in places]))


def engine_gib(served: Config, folder: Path) -> float:
    """Return the memory of all of the engines' GPUs; on a CPU, the size of the stored weights."""
    engine, hardware = served.engine, served.hardware
    if hardware.device == "cuda":
        gpus = engine.num_engines * engine.gpus_per_engine
        return gpus * engine.mem_fraction_static * hardware.memory_gib_per_gpu
    return engine.num_engines * sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB


# ---- on disk ----


def tokens_of(path: Path) -> Path:
    """Return the path of the likeliest tokens for results at `path`."""
    return path.with_suffix(".safetensors")


def write_said(said: EngineLogprobs, path: Path, checkpoint: str) -> None:
    """Write results as JSON and likeliest tokens as safetensors; `checkpoint` is the digest of its receipt."""
    content = save({"tokens": said.likeliest.tokens, "logprobs": said.likeliest.logprobs})
    write_atomic(tokens_of(path), partial(_put, content))
    samples = [[one.num_prompt_tokens, list(one.tokens)] for one in said.samples]
    plain = {key: value for key, value in vars(said).items() if key not in ("samples", "likeliest")}
    write_json(path, {**plain, "checkpoint": checkpoint, "samples": samples})


def read_said(path: Path) -> tuple[EngineLogprobs, str]:
    """Return the results, and the digest of the checkpoint.

    Raises:
        CheckpointError: The file has another format.
    """
    try:
        told: dict[str, Any] = read_json(path)
        found = load_file(tokens_of(path))
        digest = str(told.pop("checkpoint"))
        told["samples"] = [Sample(tuple(tokens), count) for count, tokens in told["samples"]]
        told["passed"] = {name: [(int(i), bool(ok)) for i, ok in each] for name, each in told["passed"].items()}
        return EngineLogprobs(**told, likeliest=Likeliest(found["tokens"], found["logprobs"])), digest
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError("answers-invalid", f"{path} holds no answers of engines: {error!r}") from error


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)
