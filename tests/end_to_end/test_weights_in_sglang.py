"""Weights in a real SGLang: every rank proves what it holds, and whatever else it holds is named."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.hub_tensors import fill
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.sglang_environment import PYTHON, require_sglang
from tests.support.spoiled_messages import SPOILED, Place, Spoil
from tests.support.tiny_checkpoint import QWEN3_5, TINY_DEEPSEEK, TINY_GLM4_MOE, TINY_QWEN3, make_random_checkpoint

from posttrain.checkpoint.tiny.tokenizer import make_tokenizer
from posttrain.plan.sizing.phases import ENGINE_CACHE, ENGINE_WEIGHTS
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.launch_command import render_engine_command
from posttrain.rl.engines.ports import choose_free_ports
from posttrain.rl.engines.process import check_all_alive, started_engines
from posttrain.rl.engines.responses import GenerateRequest
from posttrain.rl.engines.secret import new_secret

NUM_UPDATES = 50
NUM_RELEASES, IN_FLIGHT = 50, 32
SPOILING = Path(__file__).parents[1] / "support" / "spoiling"
# What SGLang asks of these classes and transformers does not write.
ASKED_FOR = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
ARCHITECTURES = {
    "deepseek": dataclasses.replace(TINY_DEEPSEEK, rms_norm_eps=1e-6, num_nextn_predict_layers=0),
    "glm4_moe": dataclasses.replace(TINY_GLM4_MOE, num_nextn_predict_layers=0),
    "qwen3": TINY_QWEN3,
    **QWEN3_5,
}

pytestmark = [pytest.mark.slow, pytest.mark.sglang]


@pytest.fixture(autouse=True)
def environment() -> None:
    require_sglang()


@dataclass
class Served:
    """A trainer of one rank, and SGLang with its weights."""

    weights: Any
    publisher: Any
    proof: Any
    client: EngineClient
    runner: asyncio.Runner

    def call(self, path: str, **body: Any) -> Any:
        return self.runner.run(self.client.call_all("POST", path, body))

    def update(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """Give the engine another tensor under a version."""

        async def send() -> None:
            await self.client.begin_update(version)
            await self.client.send_bucket([(name, tensor)], last_of_version=version)
            await self.client.end_update()

        self.runner.run(send())


def write_image_processors(folder: Path) -> None:
    """Write what SGLang, which serves the vision tower, too, starts its image processors from."""
    images = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 16, "merge_size": 2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


@contextmanager
def served(folder: Path, kind: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    arch, model = ARCHITECTURES[kind], folder / "model"
    tensors = make_random_checkpoint(model, arch, seed=1)
    make_tokenizer(arch.max_position_embeddings).save_pretrained(model)
    if arch.vision.depth:
        write_image_processors(model)
    written = json.loads((model / "config.json").read_text()) | ASKED_FOR
    if interval := arch.full_attention_interval:
        rotated = {"partial_rotary_factor": arch.partial_rotary_factor}
        written["text_config"] |= {"full_attention_interval": interval} | rotated
    (model / "config.json").write_text(json.dumps(written))
    config = test_config(arch)
    engine = dataclasses.replace(
        config.engine, kind="sglang", python=str(PYTHON), num_threads=1, weight_deltas=kind == "deepseek"
    )
    rollout = dataclasses.replace(config.rollout, fp8=False)
    config = dataclasses.replace(config, engine=engine, rollout=rollout)
    initialize_single_rank(config)
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.served_values import ServedValues
    from posttrain.rl.megatron_backend.weights import HubWeights
    from posttrain.rl.weight_sync.engine_layout import EngineShards
    from posttrain.rl.weight_sync.proof import WeightProof
    from posttrain.rl.weight_sync.publish import WeightPublisher
    from posttrain.rl.weight_sync.sharded import ShardedTransfer

    policy = build_policy(config)
    weights = HubWeights(policy.chunks, arch)
    fill(weights, tensors)
    monkeypatch.setenv("PYTHONPATH", str(SPOILING))
    command = render_engine_command(config, 0, model, "127.0.0.1", choose_free_ports(1)[0], without_weights=True)
    if num_ranks > 1:
        # SGLang on CPUs binds a rank to a processor of its own, unless it is told where to.
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join("0" * num_ranks))
        command = dataclasses.replace(command, argv=(*command.argv, "--tp-size", str(num_ranks)))
    with started_engines({0: command}, folder, new_secret()) as engines, asyncio.Runner() as runner:
        client = EngineClient([command.url], engines[0].secret, 60, ranks_per_engine=num_ranks)
        runner.run(client.__aenter__())
        try:
            runner.run(client.wait_ready(240, lambda: check_all_alive(engines)))
            values = ServedValues(weights, None)
            engine_shards = EngineShards(values, client, runner)
            proof = WeightProof(engine_shards, engines[0].secret)
            publisher = WeightPublisher(config, engine_shards, folder / "none", model, proof)
            publisher._sharded = ShardedTransfer(config, engine_shards, round_bytes=1 << 15)  # several rounds
            yield Served(weights, publisher, proof, client, runner)
        finally:
            runner.run(client.__aexit__(None, None, None))


ALONE = pytest.mark.faults("slow")


# A real SGLang of two ranks starts, and every rank hashes what it holds some fifty times.
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("deepseek", 2),
        pytest.param("glm4_moe", 1, marks=ALONE),
        pytest.param("qwen3", 1, marks=ALONE),
        pytest.param("qwen3_5", 2, marks=ALONE),
        pytest.param("qwen3_5_moe", 2, marks=ALONE),
    ],
)
def test_every_rank_proves_its_weights(
    tmp_path: Path, kind: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After sharded updates, and with something else in one place, which is named. It starts without weights."""
    with served(tmp_path, kind, num_ranks, monkeypatch) as run:
        with pytest.raises(RuntimeError, match=r"weight version 0: .*engine 0: .* and \d+ more"):
            run.proof.check(0)
        sent = []
        for version in range(1, NUM_UPDATES + 1):
            for shard in run.weights.shards:
                if version % 2:
                    shard.values.mul_(-1.01)
                else:
                    shard.values.view(-1)[version::50].mul_(-0.99)
            run.publisher.publish(version)
            sent.append(run.publisher._sharded.num_sent)
            assert run.runner.run(run.client.weight_versions()) == [str(version)]
        if kind == "deepseek":  # of which every other update brings what has changed alone
            whole, changed = sent[-2] - sent[-3], sent[-1] - sent[-2]
            assert changed < 0.15 * whole, "small parts, and what is told of them"
        whole = {name: tensor.clone() for name, tensor in run.weights.gather()}
        for name in (next(n for n in whole if part in n) for part in ("o_proj", "layernorm", "embed", "down_proj")):
            other = whole[name].clone()
            other.view(-1)[-1] *= -1
            run.update(name, other, NUM_UPDATES)
            with pytest.raises(RuntimeError, match=rf"\(engine 0: {re.escape(name)}\)"):
                run.proof.check(NUM_UPDATES)
            run.update(name, whole[name], NUM_UPDATES)
            run.proof.check(NUM_UPDATES)
        if kind == "deepseek":
            assert_what_is_derived_is_proven(run, num_ranks)


def assert_what_is_derived_is_proven(run: Served, num_ranks: int) -> None:
    """Spoil what SGLang derives from weights, one tensor of one rank at a time; nothing that was sent changes."""
    chosen = [*itertools.product(range(num_ranks), ("w_kc", "w_vc"), range(3), WAYS)][::5]
    assert len(chosen) == 20
    assert {way for *_, way in chosen} == {*WAYS}
    for rank, attribute, layer, way in chosen:
        module = f"model.layers.{layer}.self_attn"
        run.call("/weights_checker", action=f"spoil {rank} {module} {attribute} {way}", selector="target")
        with pytest.raises(RuntimeError, match=rf"rank {rank}: StaleError: {module}.{attribute} \(1 in all\)"):
            run.proof.check(NUM_UPDATES)
        run.proof.check(NUM_UPDATES)


WAYS = ("lowest_bit", "sign", "exponent", "last", "zeros", "rows", "columns", "scaled")


NUM_SPOILED = 100


class SpoilingSender:
    """A sender of which one message is spoiled on its way.

    Args:
        sender: The real one.
    """

    def __init__(self, sender: Any):
        self._sender, self.begin, self.finish, self.close = sender, sender.begin, sender.finish, sender.close
        self.before: dict[Place, torch.Tensor] = {}
        self.spoil: tuple[Spoil, Place, random.Random] | None = None

    def pack(self, number: int, pieces: Any) -> Any:
        messages = self._sender.pack(number, pieces)
        for (_, to), message in messages.items():
            sent = message.clone()
            if self.spoil and self.spoil[1] == (number, to):
                spoiled = self.spoil[0](sent.clone(), (number, to), self.before, self.spoil[2])
                message.copy_(F.pad(message.new_zeros(0) if spoiled is None else spoiled, (0, len(sent)))[: len(sent)])
            self.before[number, to] = sent
        return messages


@pytest.mark.faults("transfer")
@pytest.mark.timeout(3600)
def test_spoiled_messages_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version whose proof fails is nobody's, and the next update that comes as it was sent is right again."""
    drawn, harmless, failures = random.Random(4), 0, list[str]()
    with served(tmp_path, "qwen3", 1, monkeypatch) as run:
        run.publisher.publish(version := 1)
        run.publisher._sharded._sender = sender = SpoilingSender(run.publisher._sharded._sender)
        change_all(run, version := 2)
        run.publisher.publish(version)
        for number in range(NUM_SPOILED):
            change_all(run, version := version + 1)
            sender.spoil = SPOILED[number % len(SPOILED)], drawn.choice([*sender.before]), drawn
            try:
                run.publisher.publish(version)
                harmless += 1
            except RuntimeError as error:
                failures.append(str(error))
            sender.spoil = None
            if number % 10 == 9:
                change_all(run, version := version + 1)
                run.publisher.publish(version)
        change_all(run, version := version + 1)
        run.publisher.publish(version)
    assert harmless <= NUM_SPOILED // 20, "what lies between pieces"
    assert all("engine 0: model." in failure for failure in failures), failures


def change_all(run: Served, version: int) -> None:
    """Give every weight another value."""
    for shard in run.weights.shards:
        shard.values.mul_(-1.01 if version % 2 else -1 / 1.01)


@pytest.mark.faults("slow")
def test_memory_is_given_back_right_after_requests_were_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 times with 32 requests in flight: SGLang, asked at once, would end itself, since it is not idle yet."""
    with served(tmp_path, "qwen3", 1, monkeypatch) as it:
        it.publisher.publish(1)
        for number in range(NUM_RELEASES):
            aborted = it.runner.run(_aborted_and_released(it.client, number, IN_FLIGHT))
            assert aborted == IN_FLIGHT, "all were in flight"
            with pytest.raises(RuntimeError, match="given back their weights"):
                it.runner.run(it.client.generate(_requests(1), 0))
            it.runner.run(it.client.resume_memory([ENGINE_WEIGHTS]))
            it.publisher.publish(number + 2)
            with pytest.raises(RuntimeError, match="engine_cache asleep"):
                it.runner.run(it.client.generate(_requests(1), 0))
            it.runner.run(it.client.resume_memory([ENGINE_CACHE]))
            (answer,) = it.runner.run(it.client.generate(_requests(1, max_new_tokens=3), 0))
            assert answer.weight_version == number + 2
            assert len(answer.output_ids) == 3


async def _aborted_and_released(client: EngineClient, number: int, count: int) -> int:
    """Abort requests that are being answered, and have the engine give back everything; return how many there were."""
    running = asyncio.create_task(client.generate(_requests(count, max_new_tokens=240, ignore_eos=True), 0))
    await asyncio.sleep(0.2 + 0.005 * number)  # all tokens take a second
    await client.abort_all()
    await client.release_memory([ENGINE_WEIGHTS, ENGINE_CACHE])
    with pytest.raises(RuntimeError, match="abort"):
        await running
    return count


def _requests(count: int, max_new_tokens: int = 100, ignore_eos: bool = False) -> list[GenerateRequest]:
    return [GenerateRequest([5 + place], place, max_new_tokens, ignore_eos=ignore_eos) for place in range(count)]
