"""What each step asks of the engines, and what it takes from them and from disk: against engines that misbehave."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import random
import threading
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.scripted_engines import routes_of
from tests.support.trajectories import as_samples

from posttrain.checkpoint.tiny.tokenizer import CHARACTERS, CONTROL_TOKENS, make_tokenizer
from posttrain.errors import ConfigError
from posttrain.plan.resolve import resolve
from posttrain.rl.batching.stored_routes import open_routes
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.calls import EngineError
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateResult
from posttrain.rl.engines.routes import ASKED, TOLD
from posttrain.rl.reward.answer import Failure, Grade
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.rollout.coordinator import RolloutCoordinator, check_versions
from posttrain.rl.rollout.rollout_store import RolloutStore
from posttrain.types import Prompt, VersionSpan

CONFIG = Path(__file__).parents[4] / "config"
# Three prompts a step in requests of two and one; five in all, so that an epoch ends within a step.
SETTINGS = {
    "rollout.rollout_batch_size": 3,
    "rollout.num_samples_per_prompt": 2,
    "rollout.max_response_tokens": 6,
    "rollout.temperature": 0.7,
    "training.global_batch_size": 6,
    "training.seed": 42,
    "data.seed": 9,
    "engine.groups_per_request": 2,
}
PROMPTS = [Prompt(i, ({"role": "user", "content": f"say {i}"},), "7") for i in range(5)]
GROUPS = {0: (0, 1), 1: (2,)}  # places in a step of each request


def order_of(epoch: int) -> list[int]:
    """The documented shuffle: a function of seed and epoch alone."""
    places = list(range(5))
    random.Random(f"prompt order, seed 9, epoch {epoch}").shuffle(places)
    return places


# Steps 0 to 2, by hand: three of epoch 0; its last two and one of epoch 1; three of epoch 1.
STEPS = [order_of(0)[:3], order_of(0)[3:] + order_of(1)[:1], order_of(1)[1:4]]


def seed_of(step: int, place: int, index: int) -> int:
    digest = hashlib.sha256(f"[42, {step}, {place}, {index}]".encode()).digest()
    return int.from_bytes(digest[:4], "big") // 2


def tokens_of(text: str) -> list[int]:
    """Of the tiny model: a character is a token."""
    return [CHARACTERS.index(character) for character in text]


def rendered(prompt: int) -> list[int]:
    control = {token: len(CHARACTERS) + number for number, token in enumerate(CONTROL_TOKENS)}
    asked = [control["[gMASK]"], control["<sop>"], control["<|user|>"], *tokens_of(f"\nsay {prompt}")]
    return [*asked, control["<|assistant|>"], *tokens_of("\n")]


class Engine:
    """Answers each request with the last digit of its seed; serves the weights that `versions` names, in turn."""

    def __init__(self, *versions: object):
        self.versions, self.asked = versions, []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        answers = []
        for place, parameters in enumerate(body["sampling_params"]):
            seed, version = parameters["sampling_seed"], self.versions[place % len(self.versions)]
            pairs = [[-(seed % 1000) / 1000, token, None] for token in tokens_of(str(seed % 10))]
            meta = {"finish_reason": {"type": "stop" if seed % 2 else "length"}, "weight_version": version}
            if body.get(ASKED):
                meta[TOLD] = base64.b64encode(routes_of(seed, len(body["input_ids"][place])).tobytes()).decode()
            answers.append({"output_ids": [], "meta_info": {**meta, "output_token_logprobs": pairs}})
        return web.json_response(answers)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(256).save_pretrained(folder)
    return ChatTokenizer(folder)


@pytest.fixture
def collect(tokenizer: ChatTokenizer, tmp_path: Path):
    """Return what makes the rollout of a step with some engines, and settings on top of the usual ones."""

    def collect(step: int, *engines: Engine, prompts=PROMPTS, graders=None, **settings):
        words = {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}
        overrides = " ".join(f"{key}={value}" for key, value in words.items())
        config = resolve({"model": "tiny", "site": "local", "set": overrides}, CONFIG).config
        return asyncio.run(asyncio.wait_for(run(config, step, engines, prompts, graders), 30))

    async def run(config, step, engines, prompts, graders):
        servers = []
        for engine in engines:
            application = web.Application()
            application.router.add_post("/generate", engine.handle)
            servers.append(TestServer(application))
            await servers[-1].start_server()
        store = RolloutStore(tmp_path / "rollouts")
        try:
            async with EngineClient([str(server.make_url("")) for server in servers], "", 10) as client:
                with GraderPool() as pool:
                    coordinator = RolloutCoordinator(config, prompts, tokenizer, client, store, graders or pool)
                    return await coordinator.collect(step)
        finally:
            for server in servers:
                await server.close()

    return collect


@pytest.mark.parametrize("step", range(3))
def test_prompts_seeds_and_parameters_of_a_step(collect, step: int) -> None:
    even, odd = Engine(str(step)), Engine(str(step))
    collect(step, even, odd)
    for number, engine in enumerate((even, odd)):
        (body,) = engine.asked
        places = [(place, index) for place in GROUPS[number] for index in range(2)]
        assert body["input_ids"] == [rendered(STEPS[step][place]) for place, _ in places]
        assert body["sampling_params"] == [
            {
                "temperature": 0.7,
                "top_p": 1.0,
                "max_new_tokens": 6,
                "sampling_seed": seed_of(step, *place),
                "ignore_eos": False,
            }
            for place in places
        ]


def test_answers_become_graded_samples_in_prompt_order(collect, tmp_path: Path) -> None:
    rollout = collect(1, Engine("1"))
    assert rollout.num_replayed == 0
    assert [group.prompt for group in rollout.groups] == [PROMPTS[i] for i in STEPS[1]]
    for place, group in enumerate(rollout.groups):
        assert [sample.sample_index for sample in group.trajectories] == [0, 1]
        for sample in group.trajectories:
            seed = seed_of(1, place, sample.sample_index)
            assert sample.prompt_id == group.prompt.prompt_id
            assert sample.prompt_tokens == tuple(rendered(STEPS[1][place]))
            assert sample.sampled_tokens == tuple(tokens_of(str(seed % 10)))
            assert sample.logprobs == (-(seed % 1000) / 1000,)
            assert sample.finish_reason == ("stop" if seed % 2 else "length")
            assert sample.versions == (VersionSpan(1, 1),)
            assert sample.reward == float(seed % 10 == 7)
    assert {sample.reward for group in rollout.groups for sample in group.trajectories} == {0.0, 1.0}
    stored = [json.loads(path.read_text()) for path in sorted((tmp_path / "rollouts/step_000001").iterdir())]
    assert [[group["prompt"]["prompt_id"] for group in chunk] for chunk in stored] == [STEPS[1][:2], STEPS[1][2:]]


def test_each_answer_is_graded_by_the_label_of_its_own_prompt(collect) -> None:
    """The first of each group is right, and columns are not stored with it."""
    labels = {prompt: str(seed_of(2, place, 0) % 10) for place, prompt in enumerate(STEPS[2])}
    assert len({*labels.values()}) == 3
    prompts = [Prompt(p.prompt_id, p.messages, labels.get(p.prompt_id, ""), columns={"wide": 1}) for p in PROMPTS]
    for group in collect(2, Engine("2"), prompts=prompts).groups:
        assert group.trajectories[0].reward == 1.0
        assert (group.prompt.label, group.prompt.columns) == (labels[group.prompt.prompt_id], {})


class SecondAnswerWaits(Engine):
    """Answers its second request only once a chunk is being stored."""

    def __init__(self, *versions: object):
        super().__init__(*versions)
        self.is_storing, self.has_answered_both = threading.Event(), threading.Event()

    async def handle(self, request: web.Request) -> web.Response:
        answer = await super().handle(request)
        if len(self.asked) == 2:
            while not self.is_storing.is_set():
                await asyncio.sleep(0.01)
            self.has_answered_both.set()
        return answer


@pytest.mark.parametrize("replay", ["false", "true"])
def test_a_chunk_is_graded_and_stored_while_engines_decode_others(collect, monkeypatch, replay: str) -> None:
    """The first write ends only after the engine's other answer, which the write must not delay."""
    engine, waited = SecondAnswerWaits("1"), []
    name = "write_routes" if replay == "true" else "write"
    write = getattr(RolloutStore, name)

    def slow_write(store: RolloutStore, step: int, chunk: int, content: list) -> object:
        engine.is_storing.set()
        waited.append(engine.has_answered_both.wait(5))
        return write(store, step, chunk, content)

    monkeypatch.setattr(RolloutStore, name, slow_write)
    rollout = collect(1, engine, algorithm__routing_replay=replay)
    assert waited == [True, True]
    assert [group.prompt for group in rollout.groups] == [PROMPTS[i] for i in STEPS[1]]


class BrokenEngine(Engine):
    """Answers nothing."""

    async def handle(self, request: web.Request) -> web.Response:
        return web.json_response({"error": "out of memory"}, status=500)


def test_what_other_engines_answer_is_kept_when_one_fails(collect, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="out of memory"):
        collect(1, BrokenEngine(), Engine("1"))
    assert [path.name for path in tmp_path.rglob("chunk_*.json")] == ["chunk_0001.json"]


def test_routes_of_each_sample_lie_beside_its_chunk(collect, tmp_path: Path) -> None:
    whole = collect(1, Engine("1"), algorithm__routing_replay="true")
    for place, group in enumerate(whole.groups):
        for sample in group.trajectories:
            seed = seed_of(1, place, sample.sample_index)
            (routes,) = sample.routes
            assert Path(routes.file) == tmp_path / f"rollouts/step_000001/chunk_{place // 2:04d}.routes"
            expected = routes_of(seed, len(sample.prompt_tokens)).transpose(1, 0, 2)
            assert (open_routes(routes) == expected[-len(open_routes(routes)) :]).all()
    assert collect(1, Engine(), algorithm__routing_replay="true").groups == whole.groups
    assert not any(sample.routes for group in collect(2, Engine("2")).groups for sample in group.trajectories)


MOST, OVERLONG, PROMPT = "trainer__max_tokens_per_gpu", "rollout__overlong_samples", len(rendered(0))


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({MOST: PROMPT + 4}, 6),
        ({MOST: PROMPT + 4, OVERLONG: "cut"}, 4),
        ({MOST: PROMPT + 1, OVERLONG: "cut"}, 1),
        ({MOST: 99, OVERLONG: "cut"}, 6),
        ({"rollout__max_prompt_tokens": PROMPT}, 6),
    ],
)
def test_a_response_is_cut_where_the_budget_ends_if_that_is_asked_for(collect, settings, longest: int) -> None:
    engine = Engine("0")
    collect(0, engine, **settings)
    asked = [parameters["max_new_tokens"] for body in engine.asked for parameters in body["sampling_params"]]
    assert asked == [longest] * 6


@pytest.mark.parametrize(
    ("settings", "key", "value", "remedy"),
    [
        ({"rollout__max_prompt_tokens": PROMPT - 1}, "rollout.max_prompt_tokens", PROMPT - 1, "raise it"),
        ({"rollout__max_prompt_tokens": 1}, "rollout.max_prompt_tokens", 1, "raise it"),
        ({MOST: PROMPT, OVERLONG: "cut"}, "trainer.max_tokens_per_gpu", PROMPT, "raise the budget"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_before_anything_is_sampled(
    collect, settings, key: str, value: int, remedy: str
) -> None:
    engine = Engine("0")
    with pytest.raises(ConfigError) as caught:
        collect(0, engine, **settings)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == (key, str(value))
    assert problem.allowed.endswith(f"prompt {STEPS[0][0]} has {PROMPT} tokens")
    assert problem.remedy == f"{remedy}, or leave the prompt out of the data"
    assert not engine.asked


@pytest.mark.parametrize(("step", "version"), [(0, None), (0, "default"), (0, "0"), (1, "1"), (12, "12")])
def test_the_weights_of_the_step_are_taken(collect, step: int, version: object) -> None:
    assert len(collect(step, Engine(version)).groups) == 3


@pytest.mark.parametrize(
    ("step", "versions", "said"),
    [
        (0, ["1"], r"weight version \['1'\] in step 0; expected \(None, 0\)"),
        (2, ["1"], r"weight version \['1'\] in step 2; expected \(2,\)"),
        (2, ["3"], r"weight version \['3'\] in step 2"),
        (2, ["default"], r"weight version \['None'\] in step 2"),
        (2, ["0"], r"weight version \['0'\] in step 2"),
        (2, ["2", "1"], r"weight version \['1'\] in step 2"),
    ],
)
def test_samples_of_other_weights_are_refused_and_not_kept(collect, tmp_path: Path, step, versions, said) -> None:
    with pytest.raises(RuntimeError, match=said):
        collect(step, Engine(*versions))
    assert not list(tmp_path.rglob("chunk_*.json"))
    with pytest.raises(RuntimeError, match=r"\['1'\] in step 2"):  # of the first token alone
        check_versions(2, [GenerateResult((3, 4), (-1, -1), "stop", 2, None, (VersionSpan(1, 1), VersionSpan(2, 1)))])


def test_a_finished_request_is_replayed_and_the_others_are_asked_for_as_before(collect, tmp_path: Path) -> None:
    whole = collect(1, Engine("1"), Engine("1"))
    (tmp_path / "rollouts/step_000001/chunk_0001.json").unlink()
    even, odd = Engine("1"), Engine("1")
    again = collect(1, even, odd)
    assert (len(even.asked), len(odd.asked)) == (0, 1), "the second request goes to the second engine"
    assert again.num_replayed == 2
    assert again.groups == whole.groups
    assert collect(1, Engine()).num_replayed == 3, "and with all of them there nobody is asked"


def test_a_request_that_an_older_release_finished_is_replayed(collect, tmp_path: Path) -> None:
    """It stored samples: a prompt and a response of one weight version."""
    whole = collect(1, Engine("1"), Engine("1"))
    for path in tmp_path.rglob("chunk_*.json"):
        path.write_text(json.dumps([as_samples(group) for group in json.loads(path.read_text())]))
    again = collect(1, Engine())
    assert (again.num_replayed, again.groups) == (3, whole.groups)


CHANGED_PROMPTS = [Prompt(p.prompt_id, p.messages, "8") for p in PROMPTS]


@pytest.mark.parametrize(
    "change",
    [
        {"engine__groups_per_request": 3},
        {"rollout__num_samples_per_prompt": 4, "training__global_batch_size": 12},
        {"data__seed": 11},
        {"prompts": CHANGED_PROMPTS},
    ],
    ids=["size of a request", "size of a group", "order of prompts", "labels"],
)
def test_what_was_made_with_other_settings_is_made_again(collect, caplog: pytest.LogCaptureFixture, change) -> None:
    collect(1, Engine("1"))
    engine = Engine("1")
    with caplog.at_level(logging.WARNING):
        again = collect(1, engine, **change)
    assert again.num_replayed == 0
    assert sum(len(body["input_ids"]) for body in engine.asked) == sum(
        len(group.trajectories) for group in again.groups
    )
    assert "step 1, chunk 0: made with other settings, generated again" in caplog.text
    assert collect(1, Engine(), **change).groups == again.groups, "they take the place of the others"


class FailingGraders(GraderPool):
    """As if the first response of each group could not be graded."""

    async def grade_all(self, jobs):
        assert {answer.label for job in jobs for answer in job.answers} == {"7"}
        return [Failure("deadline", "too late"), *[(Grade(1.0),)] * (len(jobs) - 1)]


def test_what_could_not_be_graded_has_no_reward_and_is_stored_so(collect) -> None:
    rollout = collect(1, Engine("1"), graders=FailingGraders(), reward__max_failure_share=0.5)
    rewards = [[sample.reward for sample in group.trajectories] for group in rollout.groups]
    assert rewards == [[None, 1.0], [1.0, 1.0], [None, 1.0]]
    assert rollout.groups[0].trajectories[0].failure == "exact_match: deadline: too late"
    again = collect(1, Engine(), reward__max_failure_share=0.5)
    assert (again.num_replayed, again.groups) == (3, rollout.groups), "it is not graded again"


def test_too_many_failures_end_the_run_and_store_nothing(collect) -> None:
    with pytest.raises(RuntimeError, match=r"failed for 2 of 6 responses(?s:.*)exact_match: deadline: too late"):
        collect(1, Engine("1"), graders=FailingGraders(), reward__max_failure_share=0.3)
    rollout = collect(1, Engine("1"), reward__max_failure_share=0.3)
    assert all(sample.reward is not None for group in rollout.groups for sample in group.trajectories)
    assert rollout.num_replayed == 0
