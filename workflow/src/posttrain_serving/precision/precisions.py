"""What engines of one precision say, kept on disk until all precisions are compared.

They answer held-out prompts and suites, as in an evaluation, and then tell their likeliest tokens in every place of
some responses that the original's engines gave.
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

# Of each place; what OpenAI's interface tells at most.
NUM_LIKELIEST = 20
# Requests that an engine has at a time, each with the likeliest tokens of a whole response.
FORCED_AT_A_TIME = 4


@dataclass(frozen=True)
class EngineLogprobs:
    """What engines of one precision said.

    Args:
        precision: `config.deployment.ORIGINAL`, or the format.
        engine: Kind of the engines.
        nodes: That they took.
        engine_gib: See `engine_gib`.
        tokens_per_second: While the held-out prompts were answered.
        passed: By task, (id of the prompt, passes) of each response.
        samples: The original's responses that all precisions are compared over.
        likeliest: In every place of these.
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
    """Serve a checkpoint, ask its engines, and return what they said.

    Args:
        config: Of the engines (`serving_config`).
        precision: See `EngineLogprobs`.
        checkpoint: In Hub layout.
        eval_tasks: What is asked, the held-out prompts first.
        log_folder: For the engines' logs.
        given: What the original answered; none: these engines are the original's.

    Raises:
        RuntimeError: When an engine does not start or fails.
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
    """Return the first response to each of the first prompts; one token is left for the engine that reads them."""
    requests, results, _ = sampled
    step, room = config.evaluation.num_samples_per_prompt, config.model.architecture.max_position_embeddings - 1
    places = range(0, len(requests), step)[: config.evaluation.deployment.num_samples]
    return [
        Sample((*requests[place].input_ids, *results[place].output_ids)[:room], len(requests[place].input_ids))
        for place in places
    ]


async def likeliest_in(engines: EngineEndpoints, samples: Sequence[Sample], timeout_seconds: float) -> Likeliest:
    """Return the likeliest tokens in every place of the responses, N places of all samples together.

    Raises:
        EngineError: An engine does not tell them.
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
    """Return the memory that engines take on all of their GPUs; on a CPU, their weights as they are stored."""
    engine, hardware = served.engine, served.hardware
    if hardware.device == "cuda":
        gpus = engine.num_engines * engine.gpus_per_engine
        return gpus * engine.mem_fraction_static * hardware.memory_gib_per_gpu
    return engine.num_engines * sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB


# ---- on disk ----


def tokens_of(path: Path) -> Path:
    """Return where the likeliest tokens of an answer at `path` lie."""
    return path.with_suffix(".safetensors")


def write_said(said: EngineLogprobs, path: Path, checkpoint: str) -> None:
    """Write what was said, numbers as JSON and the likeliest tokens beside it; `checkpoint` is its receipt's digest."""
    content = save({"tokens": said.likeliest.tokens, "logprobs": said.likeliest.logprobs})
    write_atomic(tokens_of(path), partial(_put, content))
    samples = [[one.num_prompt_tokens, list(one.tokens)] for one in said.samples]
    plain = {key: value for key, value in vars(said).items() if key not in ("samples", "likeliest")}
    write_json(path, {**plain, "checkpoint": checkpoint, "samples": samples})


def read_said(path: Path) -> tuple[EngineLogprobs, str]:
    """Return what was said, and the digest of the checkpoint that said it.

    Raises:
        CheckpointError: It is no such answer.
    """
    try:
        told: dict[str, Any] = read_json(path)
        found = load_file(tokens_of(path))
        digest = str(told.pop("checkpoint"))
        told["samples"] = [Sample(tuple(tokens), count) for count, tokens in told["samples"]]
        told["passed"] = {name: [(int(i), bool(ok)) for i, ok in each] for name, each in told["passed"].items()}
        return EngineLogprobs(**told, likeliest=Likeliest(found["tokens"], found["logprobs"])), digest
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not what engines of a precision said: {error!r}") from error


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)
