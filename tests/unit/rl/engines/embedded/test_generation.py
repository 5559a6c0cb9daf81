"""The engine against a plain forward of transformers over the whole sequence, without cache, padding or
batch."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from tests.support.plain_routes import watched_routers
from tests.support.tiny_checkpoint import TINY
from tests.unit.rl.engines.conftest import strong_tensors, write_checkpoint

from posttrain.checkpoint.quantization.fp8 import dequantize_block, quantize_named
from posttrain.rl.engines.embedded import generation
from posttrain.rl.engines.embedded.generation import generate
from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.requests import Row
from posttrain.rl.engines.embedded.routes import has_experts

# Shorter and much longer than index_topk, with padding in between.
LENGTHS = (1, 3, TINY.index_topk, 17, 40, 64)


def rows(lengths=LENGTHS, samples=3, max_new_tokens=12, eos=(1,), vocabulary=64):
    generator = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(2, vocabulary, (n,), generator=generator).tolist()) for n in lengths]
    return [
        Row(f"{place}.{sample}", prompt, max(1, max_new_tokens - place % 3), 1.0, 100 * place + sample, frozenset(eos))
        for place, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def bound(model_type):
    """A delta net rounds a state in chunks of 64 tokens here and token by token there; padding moves the chunks."""
    return 3e-5 if "qwen3_5" in model_type else 1e-5


def run(model, given, after_step=lambda responses: None):
    return generate(model, given, after_step)


@functools.cache
def reference(folder):
    """The model as transformers itself loads it, from the Hub's names."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def topk_by_sorting_places(values, k, dim=-1, largest=True, sorted=True):
    """An independent top-k whose ties go to the lower place."""
    assert dim == -1
    assert largest
    places = np.argsort(-values.numpy(), axis=-1, kind="stable")[..., :k]
    return torch.return_types.topk((values.gather(-1, torch.from_numpy(places)), torch.from_numpy(places)))


def largest_difference(model, responses, monkeypatch):
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", topk_by_sorting_places)
        worst = 0.0
        for response in responses:
            tokens = torch.tensor([[*response.row.input_ids, *response.output_ids]])
            logprobs = torch.log_softmax(model(tokens).logits[0].double(), -1)
            start = len(response.row.input_ids) - 1
            expected = [logprobs[start + i, token].item() for i, token in enumerate(response.output_ids)]
            worst = max(worst, *(abs(a - b) for a, b in zip(response.logprobs, expected, strict=True)))
    return worst


def test_logprobs_equal_a_plain_forward(model_type, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "hf", model_type, strong_tensors(model_type, seed=2))
    responses = run(load_model(folder, torch.float32).model, rows())
    assert largest_difference(reference(folder), responses, monkeypatch) <= bound(model_type)


def test_a_cache_that_is_computed_again_is_the_one_it_replaces(model_type, tmp_path, monkeypatch):
    """After every other token, in every family: prompts of all lengths, rows of which some have finished."""
    folder = write_checkpoint(tmp_path / "hf", model_type, strong_tensors(model_type, seed=2))
    loaded, steps = load_model(folder, torch.float32), itertools.count()
    given = [dataclasses.replace(row, tells_routes=has_experts(loaded.model)) for row in rows()]
    responses = run(loaded.model, given, lambda _: next(steps) % 2 == 0)
    assert largest_difference(reference(folder), responses, monkeypatch) <= bound(model_type)
    if has_experts(loaded.model):
        lengths = [len(response.context) - 1 for response in responses]
        assert [len(np.concatenate(response.routes)) for response in responses] == lengths


def test_a_prompts_log_probabilities_equal_a_plain_forward(model_type, tmp_path, monkeypatch):
    """In a batch of prompts of all lengths, padded, some of them asked for nothing but this."""
    folder = write_checkpoint(tmp_path / "hf", model_type, strong_tensors(model_type, seed=2))
    given = [
        dataclasses.replace(row, scores_prompt=True, num_alternatives=place % 4, max_new_tokens=place % 2)
        for place, row in enumerate(rows(samples=2))
    ]
    monkeypatch.setattr(generation, "SCORED_AT_A_TIME", 16)
    responses = run(load_model(folder, torch.float32).model, given)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", topk_by_sorting_places)
        model = reference(folder)
        wholes = [torch.log_softmax(model(torch.tensor([row.input_ids])).logits[0].double(), -1)[:-1] for row in given]
    for row, response, whole in zip(given, responses, wholes, strict=True):
        scores, targets = response.prompt_scores, torch.tensor(row.input_ids[1:])
        assert scores.logprobs == pytest.approx(whole.gather(1, targets[:, None])[:, 0].tolist(), abs=bound(model_type))
        values = [[logprob for _, logprob in some] for some in scores.alternatives]
        expected = whole.sort(-1, descending=True).values[:, : row.num_alternatives].tolist()
        assert len(values) == len(expected)
        for one, other in zip(values, expected, strict=True):
            assert one == pytest.approx(other, abs=bound(model_type))
        assert len(response.output_ids) == row.max_new_tokens
        assert response.finish_reason["type"] in ("length", "stop")


def test_asking_for_more_changes_no_bit_of_what_is_sampled(model):
    more = {"scores_prompt": True, "num_alternatives": 3}
    plain, asked = run(model, rows()), run(model, [dataclasses.replace(row, **more) for row in rows()])
    assert [(r.output_ids, r.logprobs) for r in plain] == [(r.output_ids, r.logprobs) for r in asked]
    for response in asked:
        for token, logprob, some in zip(response.output_ids, response.logprobs, response.alternatives, strict=True):
            assert len(some) == 3
            assert some == sorted(some, key=lambda one: -one[1])
            assert dict(some).get(token, logprob) == logprob


def test_a_stop_text_ends_a_response_with_its_token(model):
    def third_token(tokens):
        return "found" if len(tokens) == 3 else ""

    given = [dataclasses.replace(row, stop_texts=third_token) for row in rows(eos=())]
    responses = run(model, given)
    assert {len(response.output_ids) for response in responses} == {3}
    assert responses[0].finish_reason == {"type": "stop", "matched": "found"}


def test_fp8_is_served_as_code_times_scale(fp8_checkpoint, tensors, tmp_path, monkeypatch):
    dequantised = {}
    for name, tensor in tensors.items():
        pair = [value for _, value in quantize_named(name, tensor)]
        dequantised[name] = dequantize_block(*pair) if len(pair) == 2 else tensor.float()
    folder = write_checkpoint(tmp_path / "hf", "glm_moe_dsa", dequantised)
    responses = run(load_model(fp8_checkpoint, torch.float32).model, rows())
    assert largest_difference(reference(folder), responses, monkeypatch) <= 1e-5


def test_the_indexer_decides_what_is_attended(checkpoint, tmp_path, tensors):
    """Without this the comparisons above would not see a wrong selection."""
    other = {name: -tensor if "indexer.weights_proj" in name else tensor for name, tensor in tensors.items()}
    folder = write_checkpoint(tmp_path / "hf", "glm_moe_dsa", other)
    given = rows(lengths=(40, 64), max_new_tokens=1)
    one, two = (run(load_model(path, torch.float32).model, given) for path in (checkpoint, folder))
    logits = torch.tensor([[r.logprobs[0] for r in x] for x in (one, two)])
    assert (logits[0] - logits[1]).abs().max() > 0.01


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, torch.float32).model


def test_the_same_batch_gives_the_same_bits(model):
    first, second = run(model, rows()), run(model, rows())
    assert [(r.output_ids, r.logprobs) for r in first] == [(r.output_ids, r.logprobs) for r in second]


def test_responses_do_not_depend_on_the_rest_of_the_batch(model):
    """Tokens are equal, log-probabilities up to the order of summation."""
    given = rows()
    together = {r.row.request_id: r for r in run(model, given)}
    for row in given[::4]:
        (alone,) = run(model, [row])
        beside = together[row.request_id]
        assert alone.output_ids == beside.output_ids
        assert alone.logprobs == pytest.approx(beside.logprobs, abs=1e-5)


def test_a_response_ends_with_an_end_token_or_at_its_own_length(model):
    stops = frozenset(range(1, 12))
    responses = run(model, rows(eos=stops))
    reasons = {response.finish_reason["type"] for response in responses}
    assert reasons == {"stop", "length"}
    for response in responses:
        assert not stops & set(response.output_ids[:-1])
        ended = response.output_ids[-1] in stops
        assert response.finish_reason["type"] == ("stop" if ended else "length")
        assert ended or len(response.output_ids) == response.row.max_new_tokens
        assert len(response.logprobs) == len(response.output_ids) <= response.row.max_new_tokens


def test_the_batch_shrinks_and_nobody_notices(model, monkeypatch):
    given = rows(eos=range(1, 12), max_new_tokens=20)
    widths = []
    decode = generation._Batch.decode
    monkeypatch.setattr(generation._Batch, "decode", lambda self: (widths.append(len(self._live)), decode(self))[1])
    shrinking = run(model, given)
    assert widths[0] > widths[-1]
    monkeypatch.setattr(generation, "COMPACT_WHEN_FINISHED", 2.0)
    whole = run(model, given)
    assert [r.output_ids for r in shrinking] == [r.output_ids for r in whole]
    for a, b in zip(shrinking, whole, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_samples_of_a_group_share_their_prompt_and_differ(model):
    given = [Row(str(i), tuple(range(2, 30)), 8, 1.0, i, frozenset()) for i in range(16)]
    responses = run(model, given)
    assert len({tuple(response.output_ids) for response in responses}) > 8
    by_first_token = {}
    for response in responses:
        by_first_token.setdefault(response.output_ids[0], set()).add(response.logprobs[0])
    assert all(len(logprobs) == 1 for logprobs in by_first_token.values())


def test_a_response_can_be_ended_between_two_tokens(model):
    def end_the_first_after_three(responses):
        if len(responses[0].output_ids) == 3:
            responses[0].finish_reason = {"type": "abort"}

    responses = run(model, rows(eos=()), end_the_first_after_three)
    assert len(responses[0].output_ids) == 3
    assert all(response.finish_reason["type"] == "length" for response in responses[1:])


def test_bfloat16_stays_near_float32(checkpoint, model):
    given = rows(lengths=(20,), max_new_tokens=1, samples=4)
    low = run(load_model(checkpoint, torch.bfloat16).model, given)
    for a, b in zip(low, run(model, given), strict=True):
        if a.output_ids == b.output_ids:
            assert a.logprobs[0] == pytest.approx(b.logprobs[0], abs=0.5)


def test_tokens_went_where_the_routers_of_a_plain_forward_send_them(model_type, tmp_path, monkeypatch):
    """Of all tokens but the last; prompts of one length and another, padded, in a batch that is cut down."""
    folder = write_checkpoint(tmp_path / "hf", model_type, strong_tensors(model_type, seed=2))
    model, other = load_model(folder, torch.float32).model, reference(folder)
    if not has_experts(model):
        with pytest.raises(ValueError, match="no experts"):
            run(model, [dataclasses.replace(rows()[0], tells_routes=True)])
        return
    responses = run(model, [dataclasses.replace(row, tells_routes=True) for row in rows()])
    has_gate = [hasattr(layer.mlp, "gate") for layer in other.model.layers]
    for response in responses:
        with torch.no_grad(), monkeypatch.context() as patch, watched_routers(other) as seen:
            patch.setattr(torch.Tensor, "topk", topk_by_sorting_places)
            other(torch.tensor([[*response.row.input_ids, *response.output_ids]])[:, :-1])
        told = np.concatenate(response.routes)
        assert len(told) == len(response.row.input_ids) + len(response.output_ids) - 1
        assert np.array_equal(np.sort(told[:, has_gate]), np.sort(np.stack(seen, axis=1)))
        assert not told[:, np.logical_not(has_gate)].any()


def test_nothing_is_watched_when_nobody_asks(tmp_path):
    folder = write_checkpoint(tmp_path / "hf", "glm_moe_dsa", strong_tensors("glm_moe_dsa", seed=2))
    model = load_model(folder, torch.float32).model
    run(model, [dataclasses.replace(row, tells_routes=True) for row in rows(samples=1)])
    assert not any(len(module._forward_pre_hooks) for module in model.modules())
    assert all(not response.routes for response in run(model, rows(samples=1)))
