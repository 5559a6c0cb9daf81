"""Checkpoints as slime, miles and Megatron-LM write them, exported without them: the origin's bytes come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.exporting import export_in_parts
from tests.support.family_layouts import load
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import FAMILIES, TINY, make_random_checkpoint
from tests.unit.rl.megatron_backend.test_families import convert_family

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.param_names import newest_checkpoint


@pytest.fixture(scope="module")
def megatron():
    initialize_single_rank(test_config(TINY))
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def save_as_trainer(megatron, state, folder: Path, name: str = "iter_0000005") -> None:
    """Write what Megatron's `save_checkpoint` writes: weights beside optimizer state and scalars, and the tracker."""
    (folder / name).mkdir(parents=True)
    moments = {
        f"moment {key}": megatron.ShardedTensor.from_rank_offsets(
            f"optimizer.state.exp_avg.{tensor.key}", torch.zeros(2), replica_id=0
        )
        for key, tensor in list(state.items())[:2]
    }
    common = {"iteration": 5, "checkpoint_version": 3.0, "args": {"num_layers": 3}}
    megatron.save({"model": state, "optimizer": moments, **common}, str(folder / name))
    text = name if name == "release" else str(int(name.removeprefix("iter_")))
    (folder / "latest_checkpointed_iteration.txt").write_text(text)


def assert_same_bytes(made: CheckpointReader, expected: CheckpointReader) -> None:
    for file in expected.index.files:
        assert (made.folder / file).read_bytes() == (expected.folder / file).read_bytes(), file


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_layers_that_megatron_stacks_are_taken_apart(megatron, tmp_path, family):
    from tests.support.megatron_families import build_model

    arch = FAMILIES[family]
    root = convert_family(tmp_path / "ours", arch)
    config = test_config(arch)
    model = load(build_model(config), root / "torch_dist")
    stacked = build_model(config, stacked=True)
    stacked.load_state_dict(model.state_dict(), strict=False)
    state = {k: v for k, v in stacked.sharded_state_dict().items() if not k.endswith("_extra_state")}
    save_as_trainer(megatron, state, tmp_path / "theirs")
    keys = TorchDistReader(tmp_path / "theirs" / "iter_0000005").keys
    assert "decoder.layers.self_attention.linear_qkv.weight" in keys
    assert not [key for key in keys if key.startswith("decoder.layers.0.")]
    made = CheckpointReader(export_in_parts(tmp_path / "theirs", root / "hf", arch, tmp_path / "hf"))
    assert_same_bytes(made, CheckpointReader(root / "hf"))


def test_glm5_as_miles_writes_it(megatron, tmp_path):
    """Norms in linears, the indexer in the attention with its halves exchanged, a padded vocabulary, no MTP layer."""
    tensors = make_random_checkpoint(tmp_path / "hf", TINY)
    root = convert_family(tmp_path / "ours", TINY, seed=0)
    reader = TorchDistReader(root / "torch_dist")
    state = {}
    for key in reader.keys:
        if not key.startswith("mtp."):
            theirs, value = as_miles_has_it(key, reader.read(key).clone())
            state[theirs] = megatron.ShardedTensor.from_rank_offsets(theirs, value.contiguous())
    save_as_trainer(megatron, state, tmp_path / "theirs", "release")
    made = CheckpointReader(export_in_parts(tmp_path / "theirs", tmp_path / "hf", TINY, tmp_path / "exported"))
    assert set(made) == set(tensors)
    assert_same_bytes(made, CheckpointReader(tmp_path / "hf"))


def as_miles_has_it(key: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return key, torch.cat([value, torch.full((64, value.shape[1]), 7.0).to(value.dtype)])
    for ours, theirs in (
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        ("core_attention.indexer.linear_weights_proj", "weights_proj"),
    ):
        key = key.replace(ours, theirs)
    if ".layers.0." in key:  # a dense layer: its MLP's norm is part of the first linear
        key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    if "core_attention.indexer." in key:
        key = key.replace("core_attention.indexer.linear_", "").replace("core_attention.indexer.", "")
        heads = value.view(-1, TINY.index_head_dim, *value.shape[1:])
        rotated, rest = heads[:, : TINY.qk_rope_head_dim], heads[:, TINY.qk_rope_head_dim :]
        value = torch.cat([rest, rotated], dim=1).view(value.shape)
    return key, value


def test_the_tracker_names_the_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) == tmp_path
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for text, name in (("release", "release"), ("80\n", "iter_0000080")):
        tracker.write_text(text)
        assert newest_checkpoint(tmp_path) == tmp_path / name
    tracker.write_text("")
    with rejected("tracker-invalid"):
        newest_checkpoint(tmp_path)
