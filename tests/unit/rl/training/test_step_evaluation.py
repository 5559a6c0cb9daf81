"""A policy measured between steps: which weights answered, what is kept, and what a run that goes on does again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer, stop_token_ids
from posttrain.config.load import merge
from posttrain.config.suites import eval_tasks_of
from posttrain.report.rank_progress import EVALUATION, PROGRESS_VARIABLE, read_progress
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.evaluation.heldout import EvalTask
from posttrain.rl.reward.graders import GraderPool
from posttrain.rl.training.step_evaluation import StepEvaluation, result_of
from posttrain.types import Prompt

CONFIG_DIR = Path(__file__).parents[4] / "config"
SUITES = {"words": {"kind": "files", "file": "w", "num_samples_per_prompt": 2, "temperature": 0, "num_prompts": 3}}


class Engine:
    """Answers each prompt with its last digit, from weights of one version."""

    def __init__(self, tokenizer: ChatTokenizer, version: int):
        self.tokenizer, self.version, self.num_asked = tokenizer, version, 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        answers = []
        for tokens in body["input_ids"]:
            self.num_asked += 1
            asked = self.tokenizer.tokenizer.decode(tokens)
            digit = next(letter for letter in reversed(asked) if letter.isdigit())
            output = [*self.tokenizer.tokenizer.encode(digit, add_special_tokens=False), stop_token_ids()[0]]
            meta = {
                "finish_reason": {"type": "stop"},
                "output_token_logprobs": [[-1.0, token, None] for token in output],
                "weight_version": str(self.version),
            }
            answers.append({"meta_info": meta})
        return web.json_response(answers)


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    make_tokenizer(256).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_token_ids()}))
    return ChatTokenizer(tmp_path / "model", [])


@pytest.fixture
def opened(tmp_path: Path, tokenizer: ChatTokenizer) -> Iterator[tuple[StepEvaluation, Engine]]:
    """An evaluation whose engine has the weights after four steps."""
    config = merge({"model": "tiny", "site": "local", "evaluation": {"suites": SUITES}}, CONFIG_DIR).config
    prompts = [Prompt(i, ({"role": "user", "content": f"{i}"},), label) for i, label in enumerate("017")]
    eval_tasks = [EvalTask(name, of_exam, prompts) for name, of_exam in eval_tasks_of(config).items()]
    engine, application = Engine(tokenizer, 4), web.Application()
    application.router.add_post("/generate", engine.generate)
    with asyncio.Runner() as runner, GraderPool.of(config) as graders:
        server = TestServer(application)
        runner.run(server.start_server())
        client = EngineClient([str(server.make_url(""))], "secret", 10)
        runner.run(client.__aenter__())
        yield StepEvaluation(eval_tasks, tokenizer, client, graders, tmp_path / "evaluations", runner), engine
        runner.run(client.__aexit__(None, None, None))
        runner.run(server.close())


def test_a_result_belongs_to_the_weights_that_answered(opened: tuple[StepEvaluation, Engine], tmp_path: Path) -> None:
    evaluation, engine = opened
    metrics = evaluation.measure(4)
    assert metrics == {
        f"evaluation/{name}/{key}": 2 / 3 for name in ("heldout", "words") for key in ("pass_rate", "reward_mean")
    }
    assert engine.num_asked == 3 * 4 + 3 * 2
    kept = json.loads(result_of(tmp_path / "evaluations", 4).read_text())
    assert kept["finished"] == 4
    assert [len(eval_task["pass_at"]) for eval_task in kept["exams"].values()] == [3, 2]
    # An engine that restarted would serve other ones.
    with pytest.raises(RuntimeError, match="expected \\(8,\\)"):
        evaluation.measure(8)
    assert not result_of(tmp_path / "evaluations", 8).exists()


def test_whoever_watches_the_rank_is_told_that_it_waits_for_engines(
    opened: tuple[StepEvaluation, Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
    evaluation, _ = opened
    evaluation.measure(4)
    told = read_progress(tmp_path / "progress")
    assert told
    assert (told.step, told.phase) == (4, EVALUATION)
    loop = evaluation._runner.get_loop()
    loop.run_until_complete(asyncio.sleep(0))
    assert not asyncio.all_tasks(loop), "and no longer than it waits"


def test_a_run_that_goes_on_measures_its_weights_again(opened: tuple[StepEvaluation, Engine], tmp_path: Path) -> None:
    evaluation, _ = opened
    folder = tmp_path / "evaluations"
    evaluation.forget_from(0)
    folder.mkdir()
    for finished in (2, 4, 6):
        result_of(folder, finished).write_text("{}")
    evaluation.forget_from(4)
    assert [path.name for path in folder.iterdir()] == ["step_000002.json"]
