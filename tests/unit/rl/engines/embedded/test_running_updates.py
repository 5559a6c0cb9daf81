"""Weights change while requests run: each token has the version of the weights that computed it."""

import asyncio

import pytest
import torch
from tests.support.running_updates import fresh_logprobs, kept_cache_logprobs, random_prompts, sample_to_its_end
from tests.support.tiny_checkpoint import ALL
from tests.unit.rl.engines.conftest import strong_tensors, write_checkpoint
from tests.unit.rl.engines.embedded.test_server import SECRET, engine

from posttrain.rl.engines.buckets import make_buckets
from posttrain.rl.engines.client import EngineClient

NUM_PUBLISHES, LENGTH, NUM_RESPONSES = 20, 60, 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def family(request):
    """One with keys and values in its cache, and one with recurrent states, too."""
    return request.param


@pytest.fixture(scope="module")
def weights(family):
    """Two sets of weights; versions alternate between them."""
    return [strong_tensors(family, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def folders(family, weights, tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return [write_checkpoint(root / str(place), family, tensors) for place, tensors in enumerate(weights)]


@pytest.fixture(scope="module")
def models(folders):
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    both = [load(folder, dtype=torch.float32, attn_implementation="eager").eval() for folder in folders]
    return {version: both[version % 2] for version in range(NUM_PUBLISHES + 1)}


def length_in(mode):
    """Return the tokens of a response; short where each publish waits for some."""
    return 12 if mode == "finish" else LENGTH


async def publish_while_running(folder, weights, mode):
    """Sample some responses, with a publish every few tokens; return them."""
    async with (
        engine(folder, version="0") as (server, worker),
        EngineClient([str(server.make_url("/"))], SECRET, 30) as client,
    ):
        steps, after_step = [], worker._after_step
        worker._after_step = lambda *given: steps.append(1) or after_step(*given)
        prompts = random_prompts(NUM_RESPONSES, ALL["qwen3"].vocab_size)
        running = []
        for version in range(1, NUM_PUBLISHES + 1):
            if all(task.done() for task in running):
                samples = (sample_to_its_end(client, prompt, length_in(mode), 100 * len(running)) for prompt in prompts)
                running += [asyncio.create_task(sample) for sample in samples]
            before = len(steps)
            while len(steps) < before + 7:
                await asyncio.sleep(0.001)
            assert client.num_in_flight, "a publish meets running requests"
            await client.pause(mode)
            await client.update_weights(version, make_buckets(weights[version % 2].items(), 1 << 16))
            await client.resume()
        made = await asyncio.gather(*running)
        assert client.num_in_flight == 0
        return made


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort", "finish"])
def test_every_token_has_the_version_of_the_weights_that_computed_it(folders, weights, models, mode):
    made = asyncio.run(publish_while_running(folders[0], weights, mode))
    versions = {span.version for one in made for span in one.spans}
    assert all(len(one.tokens) == length_in(mode) for one in made)
    if mode == "finish":
        assert all(len(one.spans) == 1 for one in made)
    assert len(versions) >= NUM_PUBLISHES
    if mode == "abort":
        assert any(len(one.answers) > 2 for one in made)
    differences = [(fresh_logprobs(models, one) - one.logprobs).abs().max() for one in made]
    if mode == "keep":
        assert max(differences) > 0.1, "tokens after a publish see the cache of the weights before it"
        differences = [(kept_cache_logprobs(models, one) - one.logprobs).abs().max() for one in made]
    assert max(differences) < TOLERANCE
