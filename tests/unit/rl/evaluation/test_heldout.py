import asyncio
import dataclasses
import itertools
import random
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from posttrain.plan.resolve import resolve
from posttrain.report.distributions import CURVE
from posttrain.report.metrics import EPISODE_NUMBERS
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.sampling_seed import sampling_seed
from posttrain.rl.evaluation.heldout import GradedResponse, pass_all, pass_at, summarize
from posttrain.rl.evaluation.sampling import make_requests, sample_responses
from posttrain.rl.reward.scoring import Scored
from posttrain.types import Prompt

CONFIG = Path(__file__).parents[4] / "config"
PROMPTS = [
    Prompt(i, ({"role": "system", "content": "s"}, {"role": "user", "content": f"{i}"}), f"{i}") for i in range(40)
]


def config(overrides):
    return resolve({"model": "tiny", "site": "local", "set": overrides}, CONFIG).config


def response(prompt, index, reward, tokens=4, truncated=False):
    return GradedResponse(
        PROMPTS[prompt], index, f"text {prompt}.{index}", tokens, truncated, Scored(reward, {"math": reward}, {})
    )


def test_rates_by_hand():
    result = summarize(
        [
            response(0, 0, 1.0),
            response(0, 1, 0.0, tokens=9, truncated=True),
            response(1, 0, 0.0),
            response(1, 1, 0.5),
        ]
    )
    assert (result["pass_rate"], result["pass_at_k"]) == (0.25, 0.5)
    assert (result["num_prompts"], result["num_samples"], result["num_responses"]) == (2, 2, 4)
    assert result["reward_mean"] == pytest.approx(0.375)
    assert result["by_prompt"] == [[0, 0.5, 0.5], [1, 0.0, 0.25]]
    assert result["has_partial_credit"]
    assert (result["response_tokens_mean"], result["response_tokens_median"]) == (5.25, 4)
    assert (result["response_tokens_max"], result["truncated_fraction"]) == (9, 0.25)


def test_episodes_have_means_and_distributions():
    assert "episodes" not in summarize([response(0, 0, 1.0)])
    numbers = [{name: float(number) for name in EPISODE_NUMBERS} for number in (3, 1, 2, 2)]
    graded = [dataclasses.replace(response(0, index, 1.0), parts=parts) for index, parts in enumerate(numbers)]
    found = summarize(graded)["episodes"]
    assert found["by_turns"] == {"1": 1, "2": 2, "3": 1}
    for name in ("turns", "tool_calls", "observed_tokens", "environment_seconds", "engine_seconds"):
        curve = dict(zip(CURVE, found["curves"][name], strict=True))
        assert (found[name], curve[0], curve[25], curve[30], curve[75], curve[80], curve[100]) == (2, 1, 1, 2, 2, 3, 3)


def test_an_ungraded_response_is_no_partial_credit():
    result = summarize([response(3, 0, 1.0), response(3, 1, None), response(1, 0, None), response(1, 1, None)])
    assert result["by_prompt"] == [[3, 0.5, 1.0], [1, 0.0, None]]
    assert (result["pass_rate"], result["reward_mean"], result["num_ungraded"]) == (0.25, 1.0, 3)
    assert not result["has_partial_credit"]


@pytest.mark.parametrize(("rates", "passes"), [(pass_at, any), (pass_all, all)], ids=["pass@k", "pass^k"])
def test_rates_of_k_are_means_over_all_choices_of_k_samples(rates, passes):
    drawn = random.Random(3)
    passed = [drawn.random() < 0.6 for _ in range(7 * 6)]
    found = rates(passed, 6)
    assert [*found] == ["1", "2", "4", "6"]
    groups = [passed[start : start + 6] for start in range(0, len(passed), 6)]
    for k, (rate, low, high) in found.items():
        choices = [passes(some) for group in groups for some in itertools.combinations(group, int(k))]
        assert rate == pytest.approx(sum(choices) / len(choices))
        assert 0 <= low <= rate <= high <= 1


def test_examples_are_the_first_samples_of_the_first_24_prompts():
    examples = summarize([response(p, k, 1.0) for p in range(40) for k in range(2)])["examples"]
    assert len(examples) == 24
    assert examples[3] == {
        "prompt": "system: s\nuser: 3",
        "response": "text 3.0",
        "label": "3",
        "reward": 1.0,
    }


def test_seeds_name_the_evaluation_the_prompt_and_the_sample():
    settings = config("evaluation.num_samples_per_prompt=2 evaluation.seed=9 evaluation.temperature=0.5")
    requests = make_requests(settings, PROMPTS[:2], [(1, 2), (3,)])
    assert [tuple(request.input_ids) for request in requests] == [(1, 2), (1, 2), (3,), (3,)]
    seeds = [sampling_seed(9, "heldout", prompt, sample) for prompt in (0, 1) for sample in (0, 1)]
    assert [request.sampling_seed for request in requests] == seeds
    assert len(set(seeds)) == 4
    assert {(request.max_new_tokens, request.temperature) for request in requests} == {(8, 0.5)}


class CountingEngine:
    """Answers every prompt with the token 5 + its seed modulo 50, and counts what it is asked at a time."""

    def __init__(self):
        self.sizes, self.now, self.most = [], 0, 0

    async def generate(self, request):
        body = await request.json()
        self.sizes.append(len(body["input_ids"]))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        tokens = [5 + parameters["sampling_seed"] % 50 for parameters in body["sampling_params"]]
        metas = [{"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, t, None]]} for t in tokens]
        return web.json_response([{"meta_info": meta} for meta in metas])


async def sample_on(engines, settings, requests):
    servers = []
    for engine in engines:
        application = web.Application()
        application.router.add_post("/generate", engine.generate)
        servers.append(TestServer(application))
        await servers[-1].start_server()
    async with EngineClient([str(server.make_url("")) for server in servers], "secret", 10) as client:
        results = await sample_responses(settings, client, requests)
    for server in servers:
        await server.close()
    return results


def test_requests_are_cut_by_the_configured_batch_and_limited_in_flight():
    settings = config(
        "engine.groups_per_request=2 rollout.num_samples_per_prompt=4 training.global_batch_size=64 "
        "engine.max_running_requests=16 evaluation.num_samples_per_prompt=3"
    )
    requests, engines = make_requests(settings, PROMPTS, [(5,)] * 40), [CountingEngine(), CountingEngine()]
    results = asyncio.run(sample_on(engines, settings, requests))
    assert [engine.sizes for engine in engines] == [[8] * 8, [8] * 7]
    # 16 running requests of 8 samples: 2 at a time for each of 2 engines.
    assert 2 <= max(engine.most for engine in engines) <= 4
    expected = [5 + request.sampling_seed % 50 for request in requests]
    assert [result.output_ids[0] for result in results] == expected
