"""Rows of a model with gated delta nets: recurrent and convolution states follow their rows as keys and values do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny_checkpoint import QWEN3_5
from tests.unit.rl.engines.conftest import strong_tensors, write_checkpoint

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.rl.engines.embedded.generation import Response
from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.requests import Row
from posttrain.rl.engines.embedded.worker import Work, Worker

WAIT_SECONDS = 60
# Shorter than the convolution, as long as it, longer than a chunk of 64 tokens; two rows have the same prompt.
LENGTHS = (1, 2, 3, 4, 5, 17, 17, 63, 64, 65, 130)
NO_PADDING = (17, 17)
TOLERANCE = 3e-5


@pytest.fixture(scope="module", params=sorted(QWEN3_5))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = str(request.param)
    return write_checkpoint(tmp_path_factory.mktemp(family) / "hf", family, strong_tensors(family, seed=2))


@pytest.fixture(scope="module")
def transformers_model(folder: Path) -> Any:
    """The whole model, with its vision tower."""
    from transformers import AutoModelForImageTextToText

    load = AutoModelForImageTextToText.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").eval()


def greedy_rows(lengths: Sequence[int], name: str = "") -> list[Row]:
    """Return rows whose responses end at different tokens, so that the batch is cut down several times."""
    generator = torch.Generator().manual_seed(5)
    prompts = {n: tuple(torch.randint(2, 64, (n,), generator=generator).tolist()) for n in sorted({*lengths})}
    return [
        Row(f"{name}{place}", prompts[length], 6 + 5 * (place % 6), 0.0, place, frozenset())
        for place, length in enumerate(lengths)
    ]


def generated(model: Any, row: Row) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities of transformers' own generation of one request."""
    output = model.generate(
        torch.tensor([row.input_ids]),
        max_new_tokens=row.max_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[0, len(row.input_ids) :].tolist()
    logits = torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
    return tokens, logits.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def assert_equal(responses: Sequence[Response], model: Any) -> None:
    for response in responses:
        tokens, logprobs = generated(model, response.row)
        assert response.output_ids == tokens, response.row.request_id
        assert response.logprobs == pytest.approx(logprobs, abs=TOLERANCE), response.row.request_id


@pytest.mark.parametrize("lengths", [LENGTHS, NO_PADDING, (1,), (130,)])
def test_a_batch_says_what_transformers_generates_one_request_at_a_time(
    folder: Path, transformers_model: Any, lengths: Sequence[int]
) -> None:
    worker = Worker(load_model(folder, torch.float32).model, lambda: "1", merge_requests=False, max_batch_rows=64)
    worker.start()
    responses = worker.submit(Work(greedy_rows(lengths))).result(WAIT_SECONDS)
    worker.stop(WAIT_SECONDS)
    assert_equal(responses, transformers_model)


def test_requests_that_join_leave_are_aborted_and_lose_their_cache_change_nothing_for_others(
    folder: Path, transformers_model: Any
) -> None:
    """A batch is held between two tokens: a request of it is aborted, others come, and the cache is dropped."""
    worker = Worker(load_model(folder, torch.float32).model, lambda: "1", merge_requests=True, max_batch_rows=64)
    reached, opened, seen = threading.Event(), threading.Event(), []

    def hold(_: Sequence[Response]) -> None:
        seen.append(1)
        if len(seen) == 4:
            reached.set()
            assert opened.wait(WAIT_SECONDS)

    worker.start()
    first = worker.submit(Work(greedy_rows(LENGTHS, "a"), hold))
    beside = worker.submit(Work(greedy_rows((17,), "beside")))
    assert reached.wait(WAIT_SECONDS)
    worker.pause("retract")
    worker.abort("a10", everything=False)
    joined = [worker.submit(Work(greedy_rows(lengths, name))) for name, lengths in (("b", (3, 65)), ("c", LENGTHS))]
    opened.set()
    worker.resume()
    responses = [one for work in (first, beside, *joined) for one in work.result(WAIT_SECONDS)]
    worker.stop(WAIT_SECONDS)
    (aborted,) = [one for one in responses if one.finish_reason and one.finish_reason["type"] == "abort"]
    assert (aborted.row.request_id, len(aborted.output_ids) < aborted.row.max_new_tokens) == ("a10", True)
    assert worker.counters.num_batches == 2, "what waited became one batch"
    assert_equal([one for one in responses if one is not aborted], transformers_model)


def test_in_bf16_what_is_published_in_fp32_keeps_its_bits(folder: Path) -> None:
    loaded, reader = load_model(folder, torch.bfloat16), CheckpointReader(folder)
    wide = 0
    for name, tensor in loaded.model.state_dict().items():
        is_wide = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        assert tensor.dtype is (torch.float32 if is_wide else torch.bfloat16), name
        if is_wide:
            wide += 1
            assert torch.equal(tensor, reader.tensor(name.replace("model.", "model.language_model.", 1))), name
    assert wide == 2 * 2
    logits = loaded.model(torch.arange(20)[None]).logits
    assert logits.dtype is torch.bfloat16
    assert logits.isfinite().all()
