"""OpenAI's endpoints over real HTTP, on a checkpoint with the tiny model's tokenizer."""

import asyncio
import shutil

import pytest
import torch
from tests.unit.rl.engines.embedded.test_generation import topk_by_sorting_places
from tests.unit.rl.engines.embedded.test_server import engine, plain_session
from transformers import AutoModelForCausalLM

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.responses import GenerateRequest

PROMPT = "sort the digits.\n3141"
MESSAGES = [{"role": "system", "content": "sort the digits."}, {"role": "user", "content": "3141"}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint, tokenizer):
    path = tmp_path_factory.mktemp("text") / "hf"
    shutil.copytree(checkpoint, path)
    tokenizer.save_pretrained(path)
    return path


def ask(folder, *bodies, path="/v1/completions"):
    """Return (status, answer) of each body, in order."""

    async def story():
        async with engine(folder) as (server, _), plain_session() as session:
            found = []
            for body in bodies:
                async with session.post(server.make_url(path), json=body) as response:
                    found.append((response.status, await response.json()))
            return found

    return asyncio.run(story())


def answers(folder, *bodies, path="/v1/completions"):
    found = ask(folder, *bodies, path=path)
    assert [status for status, _ in found] == [200] * len(bodies), found
    return [answer for _, answer in found]


def generated(folder, *prompts, **parameters):
    async def story():
        async with (
            engine(folder) as (server, _),
            EngineClient([str(server.make_url("/"))], "of the attempt", 30) as client,
        ):
            return await client.generate([GenerateRequest(prompt, 5, 12, **parameters) for prompt in prompts], 0)

    return asyncio.run(story())


def test_text_tokens_and_generate_say_the_same_and_a_batch_keeps_its_order(folder, tokenizer):
    tokens = tokenizer.encode(PROMPT)
    other = tokenizer.encode("2718")
    by_text, by_tokens, both = answers(
        folder,
        {"prompt": PROMPT, "logprobs": 0, **GREEDY},
        {"prompt": tokens, "logprobs": 0, **GREEDY},
        {"prompt": [other, tokens], "logprobs": 0, **GREEDY},
    )
    assert by_text["choices"] == by_tokens["choices"]
    first, second = generated(folder, other, tokens, temperature=0.0, ignore_eos=True)
    alone = generated(folder, tokens, temperature=0.0, ignore_eos=True)[0]
    (choice,) = by_text["choices"]
    assert choice["logprobs"]["token_logprobs"] == list(alone.logprobs)
    assert choice["text"] == tokenizer.decode(alone.output_ids, skip_special_tokens=True)
    assert [one["index"] for one in both["choices"]] == [0, 1]
    for result, one in zip((first, second), both["choices"], strict=True):
        assert one["logprobs"]["token_logprobs"] == list(result.logprobs)
        assert one["logprobs"]["tokens"] == [tokenizer.decode([token]) for token in result.output_ids]
        assert one["finish_reason"] == "length"
    assert both["usage"] == {
        "prompt_tokens": len(tokens) + len(other),
        "completion_tokens": 24,
        "total_tokens": len(tokens) + len(other) + 24,
    }


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_log_probabilities_are_those_of_a_plain_forward(folder, tokenizer, max_tokens, monkeypatch):
    prompts = [tokenizer.encode(text) for text in (PROMPT, "2718", "a")]
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}
    (answer,) = answers(folder, body)
    # As in `test_generation`: ties of the indexer's top-k go to the lower place.
    monkeypatch.setattr(torch.Tensor, "topk", topk_by_sorting_places)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        with torch.no_grad():
            whole = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        expected = whole[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert found["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-5)
        assert len(found["tokens"]) == len(prompt) + max_tokens
        assert choice["text"].startswith(tokenizer.decode(prompt))
        for place, (token, tops) in enumerate(zip(found["tokens"], found["top_logprobs"], strict=True)):
            if place:
                assert tops[token] == found["token_logprobs"][place]
                assert sorted(tops.values())[-2:] == pytest.approx(
                    whole[place - 1].sort().values[-2:].tolist(), abs=1e-5
                )
        if max_tokens:
            # What a harness takes as "this is what the model would have said itself".
            assert found["token_logprobs"][-1] == max(found["top_logprobs"][-1].values())


def test_choices_have_seeds_of_their_own_and_come_again(folder):
    body = {"prompt": [PROMPT, "2718"], "n": 3, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    one, again, later = answers(folder, body, body, {**body, "prompt": PROMPT, "n": 1, "seed": 8})
    assert one["choices"] == again["choices"]
    assert [choice["index"] for choice in one["choices"]] == list(range(6))
    assert len({choice["text"] for choice in one["choices"]}) > 3
    assert later["choices"][0]["text"] == one["choices"][1]["text"]


def test_an_answer_ends_at_a_stop_text_without_it(folder):
    (whole,) = answers(folder, {"prompt": PROMPT, **GREEDY})
    text = whole["choices"][0]["text"]
    stop = text[4:7]
    (cut, unstopped) = answers(
        folder, {"prompt": PROMPT, "stop": ["~", stop], **GREEDY}, {"prompt": PROMPT, "stop": "~", **GREEDY}
    )
    (choice,) = cut["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 12
    assert unstopped["choices"] == whole["choices"]


def test_chat_is_the_template_and_generate(folder, tokenizer):
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}
    in_parts = [
        {"role": "system", "content": [{"type": "text", "text": "sort the "}, {"type": "text", "text": "digits."}]}
    ]
    one, parts = answers(folder, body, {**body, "messages": in_parts + MESSAGES[1:]}, path="/v1/chat/completions")
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    (result,) = generated(folder, prompt, temperature=0.0, ignore_eos=True)
    (choice,) = one["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": tokenizer.decode(result.output_ids, skip_special_tokens=True),
    }
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == list(result.logprobs)
    assert [entry["token"] for entry in content] == [tokenizer.decode([token]) for token in result.output_ids]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert len(entry["top_logprobs"]) == 2
    assert one["object"] == "chat.completion"
    assert one["usage"]["prompt_tokens"] == len(prompt)
    assert parts["choices"] == one["choices"]


def test_tools_and_variables_reach_the_template(folder, tokenizer, tmp_path):
    path = tmp_path / "hf"
    shutil.copytree(folder, path)
    template = "{{ tools | map(attribute='name') | join(' ') if tools }} {{ effort }} {{ messages[0].content }}"
    (path / "chat_template.jinja").write_text(template)
    plain = {"messages": MESSAGES[1:], "max_tokens": 1, "chat_template_kwargs": {"effort": "high"}}
    tools = [{"name": "sum"}, {"name": "product"}]
    without, with_tools, none = answers(
        path,
        plain,
        {**plain, "tools": tools},
        {**plain, "tools": tools, "tool_choice": "none"},
        path="/v1/chat/completions",
    )
    lengths = [answer["usage"]["prompt_tokens"] for answer in (without, with_tools, none)]
    assert lengths == [len(tokenizer.encode(text)) for text in (" high 3141", "sum product high 3141", " high 3141")]


def test_an_end_token_leaves_no_trace_in_the_text(folder, tokenizer):
    every = list(range(64))
    (answer,) = answers(folder, {"prompt": PROMPT, "max_tokens": 5, "stop_token_ids": every, "seed": 1})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    (asked,) = answers(folder, {"messages": MESSAGES, "temperature": 0}, path="/v1/chat/completions")
    assert asked["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_model_is_named_and_only_who_knows_the_secret_is_told(folder):
    async def story():
        async with engine(folder) as (server, _), plain_session() as session, plain_session("another") as stranger:
            async with session.get(server.make_url("/v1/models")) as response:
                (model,) = (await response.json())["data"]
                assert (model["id"], model["max_model_len"]) == (str(folder), 256)
            for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
                async with stranger.post(server.make_url(path), json={"prompt": PROMPT}) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["type"] == "authentication_error"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/completions", {}, "prompt", "a text, a list of token ids"),
        ("/v1/completions", {"prompt": [[5], [64]]}, None, "prompt 1: token 64 at position 0 is not in the vocabulary"),
        ("/v1/completions", {"prompt": "a", "top_k": 3}, "top_k", "top_k = 3 is not supported"),
        ("/v1/chat/completions", {"messages": [{"content": "a"}]}, "messages", r"messages[0]: a role"),
        ("/v1/chat/completions", {"messages": [{"role": "judge", "content": "a"}]}, "messages", "unknown role: judge"),
    ],
)
def test_bad_input_is_refused_in_openais_shape(folder, path, body, param, said):
    ((status, answer),) = ask(folder, body, path=path)
    assert status == 400
    assert said in answer["error"].pop("message")
    assert answer == {"error": {"type": "invalid_request_error", "param": param, "code": 400}}


def test_a_checkpoint_without_a_tokenizer_serves_tokens_alone(checkpoint):
    """Its texts are asked for all the same: there is no answer without them, and the refusal says so."""
    ((status, answer),) = ask(checkpoint, {"prompt": "a"})
    assert status == 400
    assert "the tokenizer cannot be loaded" in answer["error"]["message"]


def test_an_aborted_request_is_an_error_and_no_short_answer(folder):
    async def story():
        async with engine(folder) as (server, worker), plain_session() as session:
            worker.pause("in_place")
            asked = asyncio.ensure_future(session.post(server.make_url("/v1/completions"), json={"prompt": PROMPT}))
            while not worker._queue:
                await asyncio.sleep(0.01)
            worker.pause("abort")
            async with await asked as response:
                assert response.status == 500
                assert "aborted" in (await response.json())["error"]["message"]

    asyncio.run(story())
