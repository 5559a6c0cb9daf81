"""Scripted episodes in our loop and in verifiers 0.4.0: tokens, masks, log-probabilities and rewards."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from tests.support.chat_tokenizers import GLM, QWEN3, make_chat_tokenizer
from tests.support.megatron_single import CONFIG_DIR
from tests.support.requirements import require
from tests.support.scripted_episodes import ScriptedEpisode, play_ours, respond, segments_of
from tests.support.tiny_checkpoint import TINY_QWEN3, make_random_checkpoint
from tests.support.workflow_runs import ROOT

from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.engines.engine_endpoints import EngineEndpoints, client_of, engines_to_ask
from posttrain.rl.engines.responses import GenerateRequest
from posttrain.rl.environments.protocol import EpisodeReward
from posttrain.rl.environments.tool_calls import parse_action
from posttrain_verifiers.engine import TokenEndpoint

pytestmark = pytest.mark.faults("environments")
ENVIRONMENTS = Path(os.environ.get("POSTTRAIN_ENVIRONMENTS") or ROOT / ".envs" / "environments")
ASKED = [{"role": "user", "content": "add 12"}]
MORE = [{"role": "user", "content": "more 12"}]
TOOL = [{"role": "tool", "content": "42", "tool_call_id": "call_0"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
QWEN3_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


def episodes_of_qwen3(chat: ChatTokenizer) -> dict[str, ScriptedEpisode]:
    end, think = "<|im_end|>", "<think>\n3\n</think>\n\n"
    # `12` is sampled as two tokens, where the tokenizer would write one.
    said, called = respond(chat, "1", "2", end), respond(chat, QWEN3_CALL, end)
    return {
        "tool": ScriptedEpisode(ASKED, [called, said], [TOOL], [0.5, 1.0], TOOLS),
        "two tools": ScriptedEpisode(ASKED, [called, called, said], [TOOL, TOOL], [0.25, 0.5, 1.0], TOOLS),
        "two user turns": ScriptedEpisode(ASKED, [respond(chat, "12", end), said], [MORE], [-0.5, 1.0]),
        "two user turns, rare tokens": ScriptedEpisode(ASKED, [said, said], [MORE], [-0.5, 1.0]),
        "thinking": ScriptedEpisode(ASKED, [respond(chat, think, "1", "2", end), said], [MORE], [0.0, 1.0]),
        "another stop token": ScriptedEpisode(
            ASKED, [respond(chat, QWEN3_CALL, "<|endoftext|>"), said], [TOOL], [0.0, 1.0], TOOLS
        ),
    }


def episodes_of_glm(chat: ChatTokenizer) -> dict[str, ScriptedEpisode]:
    no_think, think = "\n<think></think>\n", "\n<think>3</think>\n"
    said, called = respond(chat, no_think, "1", "2", "<|user|>"), respond(chat, no_think, GLM_CALL, "<|observation|>")
    usual = respond(chat, f"{no_think}12", "<|user|>")
    return {
        "tool": ScriptedEpisode(ASKED, [called, said], [TOOL], [0.5, 1.0], TOOLS),
        "two user turns": ScriptedEpisode(ASKED, [usual, said], [MORE], [-0.5, 1.0]),
        "two user turns, rare tokens": ScriptedEpisode(ASKED, [said, said], [MORE], [-0.5, 1.0]),
        "thinking": ScriptedEpisode(ASKED, [respond(chat, think, "1", "2", "<|user|>"), said], [MORE], [0.0, 1.0]),
        "another stop token": ScriptedEpisode(
            ASKED, [respond(chat, no_think, GLM_CALL, "<|user|>"), said], [TOOL], [0.0, 1.0], TOOLS
        ),
        "no line break": ScriptedEpisode(
            ASKED, [respond(chat, no_think[1:], GLM_CALL, "<|observation|>"), said], [TOOL], [0.5, 1.0], TOOLS
        ),
    }


FAMILIES = {"qwen3": (QWEN3, episodes_of_qwen3), "glm-4.5": (GLM, episodes_of_glm)}
# Renderers keep what was sampled across user turns only if they are told to.
HISTORIES: dict[str, dict[str, str]] = {"keep": {"thinking_retention": "all"}, "template": {}}
# Where the sequences are not the same, and why.
ENDED = "we end a turn as its template does, they leave it at <|endoftext|>"
REWRITTEN = "the template would write the turn otherwise, so we begin anew; they ask whether it drops thinking"
MERGED = "the template changes nothing, so we keep the tokens; they render anew at a user's turn, with merged tokens"
DIFFERENT = {
    "qwen3 keep another stop token": ENDED,
    "qwen3 template another stop token": REWRITTEN,
    "qwen3 template two user turns, rare tokens": MERGED,
    "glm-4.5 template another stop token": REWRITTEN,
    "glm-4.5 template no line break": REWRITTEN,
    "glm-4.5 template two user turns, rare tokens": MERGED,
}
NAMES = ("tool", "two user turns", "two user turns, rare tokens", "thinking", "another stop token")
OF_ONE = {"qwen3": "two tools", "glm-4.5": "no line break"}
PLAYED = {
    f"{family} {history} {name}" for family in FAMILIES for history in HISTORIES for name in (*NAMES, OF_ONE[family])
}
EQUAL = PLAYED - {*DIFFERENT}


def records_of(script: Sequence[dict[str, Any]], folder: Path, **variables: str) -> list[dict[str, Any]]:
    """Return what verifiers records of the episodes of a script; see `verifiers_player`."""
    python = ENVIRONMENTS / "verifiers/bin/python"
    require("environments", "" if (ENVIRONMENTS / "verifiers/.ready").exists() else f"{python} is not there")
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    program = [python, ROOT / "tests/support/verifiers_player.py", path]
    environment = {**os.environ, **variables}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [(record["ok"], record["errors"]) for record in records] == [(True, [])] * len(script)
    return records


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ChatTokenizer, ScriptedEpisode, dict]]:
    """All episodes with both policies of thinking, and verifiers' record of each."""
    asked: dict[str, tuple[ChatTokenizer, ScriptedEpisode]] = {}
    script: list[dict[str, Any]] = []
    for family, (tokens, episodes) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        chat = make_chat_tokenizer(folder, tokens)
        for history, retention in HISTORIES.items():
            place = {"folder": str(folder), "renderer": {"name": family, **retention}}
            for name, episode in episodes(chat).items():
                asked[f"{family} {history} {name}"] = chat, episode
                script.append(episode.as_json() | place)
    # A second conversation goes on after the first response of the last episode.
    chat, episode = asked["forked"] = chat, replace(episode, responses=[*episode.responses, episode.responses[-1]])
    script.append(episode.as_json() | place | {"fork": [{**TOOL[0], "content": "43"}]})
    records = records_of(script, tmp_path_factory.mktemp("script"))
    return {key: (*asked[key], record) for key, record in zip(asked, records, strict=True)}


@pytest.mark.parametrize("key", sorted(PLAYED))
def test_what_is_sampled_and_rewarded_is_the_same(played: dict, key: str) -> None:
    chat, episode, theirs = played[key]
    ours = play_ours(chat, episode, key.split()[1])
    samples = [zip(b["tokens"], b["logprobs"], b["mask"], strict=True) for b in theirs["branches"]]
    sampled = [(token, logprob) for branch in samples for token, logprob, mark in branch if mark]
    trained = [token for token, mark in zip(ours.tokens, ours.loss_mask, strict=True) if mark]
    assert sampled == list(zip(trained, ours.logprobs, strict=True))
    assert ours.logprobs == episode.logprobs
    assert isinstance(ours.grade, EpisodeReward)
    assert theirs["reward"] == ours.grade.reward == sum(episode.rewards)


def theirs_of(record: dict) -> list[tuple[list[int], list[int]]]:
    """Return tokens and mask of each sequence of a record."""
    return [(branch["tokens"], branch["mask"]) for branch in record["branches"]]


@pytest.mark.parametrize("key", sorted(EQUAL))
def test_sequences_are_the_same(played: dict, key: str) -> None:
    chat, episode, record = played[key]
    assert theirs_of(record) == segments_of(play_ours(chat, episode, key.split()[1]))


@pytest.mark.parametrize("key", DIFFERENT)
def test_where_sequences_differ(played: dict, key: str) -> None:
    """And in nothing else than the reason says."""
    chat, episode, record = played[key]
    ours, theirs, why = segments_of(play_ours(chat, episode, key.split()[1])), theirs_of(record), DIFFERENT[key]
    if why == ENDED:
        ((tokens, _),), ((their_tokens, _),) = ours, theirs
        ended = chat.text_of(tokens).replace("<|endoftext|><|im_end|>", "<|endoftext|>")
        assert ended == chat.text_of(their_tokens) != chat.text_of(tokens)
        return
    kept = theirs_of(played[key.replace("template", "keep")][2])
    assert len(kept) == 1
    if why == REWRITTEN:
        assert theirs == kept
        answered = parse_action(chat.text_of_turn(episode.responses[0].tokens), episode.tools)
        rendered = chat.render([*episode.messages, answered, *episode.observations[0]], episode.tools)
        _, (tokens, mask) = ours
        assert tokens == [*rendered, *episode.responses[1].tokens]
        assert mask == [0] * len(rendered) + [1] * len(episode.responses[1].tokens)
    else:
        assert ours == kept
        assert [chat.text_of(tokens) for tokens, _ in theirs] == [
            chat.text_of(ours[0][0])[: len(chat.text_of(theirs[0][0]))],
            chat.text_of(ours[0][0]),
        ]


def test_what_their_records_lack(played: dict) -> None:
    """Facts that the decision for our own loop names."""
    _, episode, theirs = played["qwen3 keep tool"]
    assert not theirs["names_versions"], "the endpoint names a version with every answer"
    assert tuple(theirs["rounded"]) == tuple(round(value, 4) for value in episode.logprobs) != episode.logprobs


def test_their_forks_train_a_shared_response_twice(played: dict) -> None:
    _, episode, theirs = played["forked"]
    assert len(theirs["branches"]) == 2
    trained = sum(sum(branch["mask"]) for branch in theirs["branches"])
    shared = len(episode.responses[0].tokens)
    assert trained == sum(len(response.tokens) for response in episode.responses) + shared


def test_their_loop_with_our_engine(tmp_path: Path) -> None:
    """Their training client asks the embedded engine: it records what the engine samples after the same tokens."""
    folder = tmp_path / "model"
    architecture = replace(TINY_QWEN3, vocab_size=512, max_position_embeddings=4096)
    make_random_checkpoint(folder, architecture, seed=3)
    chat = make_chat_tokenizer(folder, QWEN3)
    sizes = {f"model.architecture.{name}": size for name, size in asdict(architecture).items()}
    words = " ".join(f"{name}={size}" for name, size in sizes.items() if not isinstance(size, dict))
    config = resolve({"model": "tiny_qwen3", "site": "local", "set": f"rollout.fp8=false {words}"}, CONFIG_DIR).config
    episode = ScriptedEpisode(ASKED, [], [MORE], [1.0]).as_json()
    episode |= {"folder": str(folder), "renderer": {"name": "qwen3", "thinking_retention": "all"}}
    with engines_to_ask(config, folder, tmp_path / "logs") as engines:
        asyncio.run(_compare(config, engines, episode, tmp_path, chat))


async def _compare(
    config: Config, engines: EngineEndpoints, episode: dict[str, Any], folder: Path, chat: ChatTokenizer
) -> None:
    async with client_of(config, engines) as client, TestServer(TokenEndpoint(engines.urls[0]).app()) as front:
        script = [episode | {"model": str(front.make_url("")).rstrip("/")}]
        (record,) = await asyncio.to_thread(records_of, script, folder, MODEL_KEY=engines.secret)
        (branch,) = record["branches"]
        tokens, places = branch["tokens"], [place for place, mark in enumerate(branch["mask"]) if mark]
        assert chat.text_of(tokens).count("<|im_start|>assistant") == 2
        starts = [place for place in places if place - 1 not in places]
        assert len(starts) == 2
        for start in starts:
            request = GenerateRequest(tokens[:start], sampling_seed=0, max_new_tokens=8, temperature=0.0)
            (again,) = await client.generate([request], 0)
            count = len(again.output_ids)
            assert tuple(tokens[start : start + count]) == again.output_ids
            assert start + count not in places
            assert branch["logprobs"][start : start + count] == pytest.approx(again.logprobs, abs=1e-6)
