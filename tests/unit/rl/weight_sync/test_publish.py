"""What engines get: what is trained; those that started without weights, every tensor of their checkpoint."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY, TINY_QWEN3_5, make_random_checkpoint, random_tensors

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.quantization.quantize import make_fp8
from posttrain.config.derived import fp8_settings
from posttrain.plan.resolve import resolve
from posttrain.rl.engines.client import EngineClient
from posttrain.rl.engines.tensor_payload import deserialize_bucket
from posttrain.rl.weight_sync.engine_layout import EngineShards
from posttrain.rl.weight_sync.publish import WeightPublisher, served_format, untrained

CONFIG = Path(__file__).parents[4] / "config"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publish") / "hf"
    make_random_checkpoint(folder, TINY, seed=1)
    return folder


@pytest.fixture
def trained():
    """What a trainer has: all but the MTP layer."""
    prefix = f"model.layers.{TINY.num_hidden_layers}."
    return {name: tensor for name, tensor in random_tensors(TINY, 1).items() if not name.startswith(prefix)}


def test_what_is_not_trained_is_the_mtp_layer(folder, trained):
    everything = random_tensors(TINY, 1)
    assert len(trained) < len(everything)
    assert dict(untrained(trained, folder, TINY.num_hidden_layers, drafts=False)) == {}
    sent = trained | dict(untrained(trained, folder, TINY.num_hidden_layers, drafts=True))
    assert sent.keys() == everything.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in everything.items())


@pytest.mark.parametrize("drafts", [False, True])
def test_a_vision_tower_is_sent_to_engines_that_started_without_weights(tmp_path, drafts):
    everything = make_random_checkpoint(tmp_path, TINY_QWEN3_5)
    held = {name: tensor for name, tensor in everything.items() if not name.startswith(("mtp.", "model.visual."))}
    sent = dict(untrained(held, tmp_path, TINY_QWEN3_5.num_hidden_layers, drafts))
    assert {name.partition(".")[0] for name in sent} == ({"mtp", "model"} if drafts else {"model"})
    expected = {name for name in everything.keys() - held.keys() if drafts or not name.startswith("mtp.")}
    assert sent.keys() == expected
    assert all(torch.equal(tensor, everything[name]) for name, tensor in sent.items())


def test_what_is_missing_is_named(folder, trained):
    del trained["model.norm.weight"], trained["model.layers.1.mlp.gate.e_score_correction_bias"]
    with rejected("served-weights-differ", "e_score_correction_bias, model.norm.weight") as raised:
        untrained(trained, folder, TINY.num_hidden_layers, drafts=True)
    assert str(folder) in str(raised.value)


class Weights:
    """Tensors by Hub name, as the trainer gathers them on rank 0."""

    def __init__(self, tensors):
        self._tensors = tensors

    @property
    def sent_specs(self):
        return self._tensors

    def gather(self):
        for item in self._tensors.items():
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()  # which has requests to serve meanwhile
            yield item


class Engine:
    """Says which weights it has, and keeps the names and the version of those that it gets."""

    def __init__(self, version):
        self.version, self.names, self.files, self.paths = version, [], [], []

    async def handle(self, request):
        body = await request.json() if request.can_read_body else {}
        self.paths.append(request.path)
        if request.path == "/update_weights_from_tensor":
            self.names += [name for name, _ in deserialize_bucket(body["serialized_named_tensors"][0])]
            self.version = body["weight_version"] or self.version
        if request.path == "/update_weights_from_disk":
            given = Path(body["model_path"])
            self.names += [name for name in CheckpointReader(given).names if CheckpointReader(given).tensor(name).any()]
            self.files, self.version = sorted(path.name for path in given.iterdir()), body["weight_version"]
            assert [path.name for path in given.parent.iterdir()] == ["version_000004"], "what was left there is gone"
        return web.json_response({"success": True, "weight_version": self.version})


def publish(engine, folder, tensors, mtp_steps, architecture=TINY, then=lambda publisher: None, **settings):
    """Send the tensors under version 4 to one engine; then do something else with the publisher."""
    config = resolve({"model": "tiny", "site": "local", "set": "rollout.fp8=false"}, CONFIG).config
    model = dataclasses.replace(config.model, architecture=architecture)
    # Refused of the embedded engine, which does not draft; what is sent does not depend on the kind.
    config = dataclasses.replace(
        config, model=model, engine=dataclasses.replace(config.engine, mtp_steps=mtp_steps, **settings)
    )
    with asyncio.Runner() as runner:
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", engine.handle)
        server = TestServer(application)
        runner.run(server.start_server())
        client = EngineClient([str(server.make_url(""))], "", 10)
        runner.run(client.__aenter__())
        engine_shards = EngineShards(Weights(tensors), client, runner)
        publisher = WeightPublisher(config, engine_shards, folder.parent / "shared", folder)
        publisher.publish(4)
        assert not publisher.is_due_at_start, "that is for what goes from each rank to each"
        publisher.reverify()  # of nothing, where engines cannot
        then(publisher)
        runner.run(client.__aexit__(None, None, None))
        runner.run(server.close())


@pytest.mark.parametrize(
    ("version", "mtp_steps", "with_mtp"),
    [("none", 1, True), ("none", 0, False), ("3", 1, False), ("default", 1, False)],
    ids=["empty and drafting", "empty", "drafting", "as it started"],
)
def test_an_engine_that_drafts_gets_the_mtp_layer_once(folder, trained, version, mtp_steps, with_mtp):
    engine = Engine(version)
    publish(engine, folder, trained, mtp_steps)
    expected = random_tensors(TINY, 1) if with_mtp else trained
    assert sorted(engine.names) == sorted(expected)
    assert engine.version == "4"


def test_only_new_engines_are_queried_for_what_they_lack(folder, trained):
    engine, paths = Engine("3"), []

    def update_again(publisher):
        for version, is_new in ((5, False), (6, True)):
            engine.paths.clear()
            if is_new:
                publisher.reconnect()
            publisher.publish(version)
            paths.append([*engine.paths])

    publish(engine, folder, trained, 1, then=update_again)
    own = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    assert list(dict.fromkeys(paths[0])) == own
    assert paths[0].count(own[0]) == paths[0].count(own[2]) == 1
    assert "/get_model_info" in paths[1]


def test_a_model_whose_queries_have_no_latent_is_sent_whole(folder, trained):
    tensors = {name: tensor for name, tensor in trained.items() if ".q_a_" not in name}
    assert len(tensors) < len(trained)
    engine = Engine("3")
    publish(engine, folder, tensors, 0, dataclasses.replace(TINY, q_lora_rank=0))
    assert sorted(engine.names) == sorted(tensors)


def test_files_that_engines_load_are_a_checkpoint_and_gone_afterwards(folder, trained):
    engine, leftover = Engine("none"), folder.parent / "shared/version_000003"
    leftover.mkdir(parents=True)
    (folder / "generation_config.json").write_text("{}")
    publish(engine, folder, trained, 1, weight_transport="disk", weight_bucket_mib=1)
    assert sorted(engine.names) == sorted(name for name, tensor in random_tensors(TINY, 1).items() if tensor.any())
    assert engine.version == "4"
    shards = [name for name in engine.files if name.endswith(".safetensors")]
    assert shards == [f"model-{number:05d}.safetensors" for number in range(1, len(shards) + 1)]
    assert {*engine.files} - {*shards} >= {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert not leftover.parent.exists()


def test_only_engines_in_fp8_are_served_another_format():
    config = resolve({"model": "tiny", "site": "local", "set": "rollout.fp8=true"}, CONFIG).config
    assert served_format(config) == make_fp8(fp8_settings(config), config.model.architecture.num_hidden_layers)
    assert served_format(dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, fp8=False))) is None
