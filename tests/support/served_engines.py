"""Engines that serve a small checkpoint for real, and what transformers says with the same weights in FP32."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import torch
from tests.support.served_in_foreground import SECRET, serving
from tests.support.sglang_environment import PYTHON as SGLANG
from tests.support.sglang_environment import require_sglang
from tests.support.vllm_environment import ENVIRONMENT as VLLM
from tests.support.vllm_environment import require_vllm
from transformers import AutoTokenizer

from posttrain.cluster.processes import end_processes, start_child
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import ended_with_family
from posttrain.rl.engines.responses import GenerateResult

RESPONSE_TOKENS = 24
# What vLLM 0.32.0 wants of DeepSeek-V3's class on a CPU. With AMX it takes attention for BF16, whatever is asked for.
# Its kernel for plain positions takes queries with a dimension for heads as if all were one head's; YaRN goes by torch,
# and with a factor of 1 its positions are the plain ones.
PLAIN_BY_YARN = {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
MLA_ON_CPUS = [
    *("--attention-backend", "CPU_MLA"),
    *("--hf-overrides", json.dumps({"rope_parameters": PLAIN_BY_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}})),
]
READY_SECONDS = 300


@dataclass(frozen=True)
class Text:
    """What transformers says.

    Args:
        prompt: Token ids.
        response: Its greedy continuation.
        logprobs: Of each of these tokens.
        margins: By which each is likelier than the second one, in nats.
    """

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True)
class Learned:
    """A checkpoint, its tokenizer, and what transformers says with it.

    Args:
        kind: Its class, "deepseek_v3" and the like.
        form: "bf16" or "fp8".
        folder: What is served.
        tokenizer: Of that folder.
        texts: Of transformers, with what its codes stand for.
        rounded: How far transformers' own log-probabilities of these texts are apart in BF16, at most, where asked for.
    """

    kind: str
    form: str
    folder: Path
    tokenizer: AutoTokenizer
    texts: list[Text]
    rounded: float = 0.0


class RefusedError(Exception):
    """An engine does not start; its log."""


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> Text:
    tokens, logprobs, margins = list(prompt), [], []
    for _ in range(RESPONSE_TOKENS):
        row = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        (first, second), (place, _) = row.topk(2)
        tokens.append(int(place))
        logprobs.append(float(first))
        margins.append(float(first - second))
    return Text(prompt, tokens[len(prompt) :], logprobs, margins)


@torch.inference_mode()
def furthest(model: torch.nn.Module, texts: Sequence[Text]) -> float:
    """Return how far a model's log-probability of a token is from a text's at most."""
    apart = 0.0
    for text in texts:
        tokens = torch.tensor([[*text.prompt, *text.response]])
        said = model(tokens).logits[0, len(text.prompt) - 1 : -1].float().log_softmax(-1)
        own = said[torch.arange(len(text.response)), tokens[0, len(text.prompt) :]]
        apart = max(apart, float((own - torch.tensor(text.logprobs)).abs().max()))
    return apart


@contextmanager
def embedded(learned: Learned, folder: Path) -> Iterator[tuple[str, str]]:
    (port,) = choose_free_ports(1)
    with serving(
        folder, learned.folder, "--engine", "embedded", "--hardware", "cpu", "--port", port, until="healthy at"
    ):
        yield f"http://127.0.0.1:{port}", learned.folder.name


@contextmanager
def sglang(learned: Learned, folder: Path) -> Iterator[tuple[str, str]]:
    require_sglang()
    (port,) = choose_free_ports(1)
    words = ("--engine", "sglang", "--hardware", "cpu", "--python", SGLANG, "--port", port)
    with serving(folder, learned.folder, *words, until="healthy at"):
        yield f"http://127.0.0.1:{port}", learned.folder.name


@contextmanager
def vllm(learned: Learned, folder: Path, most_tokens: int = 128) -> Iterator[tuple[str, str]]:
    """By its own command: `posttrain serve` knows no vLLM on CPUs."""
    require_vllm()
    (port,) = choose_free_ports(1)
    words = ["--max-model-len", str(most_tokens), "--max-num-seqs", "8", "--enforce-eager"]
    words += ["--no-enable-prefix-caching"]  # prompts of vLLM's own load repeat
    words += ["--dtype", "bfloat16" if learned.form == "fp8" else "float32"]
    words += MLA_ON_CPUS if learned.kind == "deepseek_v3" else []
    command = [str(VLLM / "bin" / "vllm"), "serve", str(learned.folder), *words]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", learned.folder.name]
    own = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"PATH": f"{VLLM / 'bin'}:{os.environ['PATH']}", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = folder / "vllm.log"
    with log.open("wb") as output:
        argv, told_by = ended_with_family(command)
        child = start_child(argv, told_by, env=inherited | own, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while "Application startup complete" not in log.read_text():
            if child.poll() is not None:
                raise RefusedError(log.read_text())
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", learned.folder.name
    finally:
        end_processes([child])


ENGINES = {"embedded": embedded, "sglang": sglang, "vllm": vllm}


async def ask(url: str, path: str, body: dict) -> dict:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {SECRET}"}) as session,
        session.post(url + path, json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def forced(engine: str, url: str, name: str, text: Text) -> tuple[list[str], list[float], list[float]]:
    """Return, at each token of a response, the likeliest text, its log-probability, and that of the token itself."""
    tokens, count = [*text.prompt, *text.response], len(text.response)
    if engine == "sglang":
        sampling = {"max_new_tokens": 1, "temperature": 0}
        body = {
            "input_ids": tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "return_text_in_logprobs": True,
        }
        answer = await ask(url, "/generate", body | {"logprob_start_len": len(text.prompt) - 1, "top_logprobs_num": 1})
        firsts = [place[0] for place in answer["meta_info"]["input_top_logprobs"][-count:]]
        own = [float(place[0]) for place in answer["meta_info"]["input_token_logprobs"][-count:]]
        return [first[2] for first in firsts], [float(first[0]) for first in firsts], own
    body = {"model": name, "prompt": tokens, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    told = (await ask(url, "/v1/completions", body))["choices"][0]["logprobs"]
    stretch = slice(len(text.prompt), len(tokens))
    firsts = [max(place.items(), key=lambda item: item[1]) for place in told["top_logprobs"][stretch]]
    return [first[0] for first in firsts], [float(first[1]) for first in firsts], told["token_logprobs"][stretch]


async def written(url: str, name: str, text: Text) -> str:
    body = {"model": name, "prompt": text.prompt, "max_tokens": len(text.response), "temperature": 0}
    return str((await ask(url, "/v1/completions", body))["choices"][0]["text"])


async def answered(url: str, name: str, text: Text) -> GenerateResult:
    """Return the same with its tokens, of an engine that tells them over OpenAI's interface."""
    body = {"model": name, "prompt": text.prompt, "max_tokens": len(text.response), "temperature": 0, "logprobs": 1}
    (choice,) = (await ask(url, "/v1/completions", body | {"return_token_ids": True}))["choices"]
    return GenerateResult(
        tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), choice["finish_reason"], None
    )
