import dataclasses
import hashlib
import json

import pytest
import torch
from tests.support.anonymous_memory import growth_of_anonymous_memory
from tests.support.exporting import export_in_parts
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import (
    ALL,
    QWEN3_5,
    TINY,
    TINY_QWEN3,
    TINY_QWEN3_5,
    make_random_checkpoint,
    random_tensors,
    write_shards,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as torch_save

from posttrain.checkpoint.export import (
    HubExport,
    TrainedModel,
    checkpoint_of,
    final_weights_sha256,
    open_trained,
    refuse_foreign_folder,
)
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, read_header
from posttrain.checkpoint.formats.torch_dist import Conversion
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.param_names import KEY_VISION, by_key, optional_copies
from posttrain.errors import CheckpointError
from posttrain.store import Receipt, partial_of, receipt_of, write_receipt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A checkpoint with copies of embedding and head in its MTP layer, and a tokenizer."""
    folder = tmp_path_factory.mktemp("hf")
    tensors = make_random_checkpoint(folder)
    copies = {copy: tensors[original].clone() for copy, original in optional_copies(TINY).items()}
    write_shards(folder, tensors | copies, 3)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory, origin):
    folder = tmp_path_factory.mktemp("store") / "torch_dist"
    make_folder(Conversion(origin, "s1", TINY), folder)
    return folder


def trained_values(converted, change=lambda key, value: value):
    """Return the decoder's weights in FP32, as a trainer with FP32 parameters holds them."""
    reader = TorchDistReader(converted)
    return {key: change(key, reader.read(key).float()) for key in reader.keys if not key.startswith("mtp.")}


def save_training(folder, values):
    """Write weights and optimizer state as torch's checkpoint format does."""
    optimizer = {f"optimizer.state.exp_avg.{key}": torch.zeros_like(value) for key, value in values.items()}
    torch_save({**values, **optimizer, "step": 3}, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def export(checkpoint, origin, folder, **options):
    return export_in_parts(checkpoint, origin, TINY, folder, **options)


def test_there_and_back_is_the_same_folder_byte_by_byte(tmp_path, origin, converted):
    """MTP layer, shards, index and tokenizer included; only the index may be written with other spaces."""
    folder = export(converted, origin, tmp_path / "hf", num_threads=2)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in origin.iterdir())
    for path in folder.iterdir():
        if path.name == "model.safetensors.index.json":
            assert json.loads(path.read_text()) == json.loads((origin / path.name).read_text())
        else:
            assert path.read_bytes() == (origin / path.name).read_bytes(), path.name
    assert final_weights_sha256(folder) == final_weights_sha256(origin)


@pytest.mark.parametrize("family", ALL | QWEN3_5)
def test_every_family_comes_back_bit_by_bit(tmp_path, family):
    """What was trained comes from the checkpoint, the rest from the origin; a tied output matrix is not written out."""
    arch = (ALL | QWEN3_5)[family]
    tensors = make_random_checkpoint(tmp_path / "hf", arch, seed=5)
    make_folder(Conversion(tmp_path / "hf", "s1", arch), tmp_path / "torch_dist")
    exported = export_in_parts(tmp_path / "torch_dist", tmp_path / "hf", arch, tmp_path / "back")
    back = CheckpointReader(exported)
    assert sorted(back.names) == sorted(tensors)
    assert all(torch.equal(back.tensor(name), tensor) for name, tensor in tensors.items())
    assert final_weights_sha256(exported) == final_weights_sha256(tmp_path / "hf")


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_each_tensor_is_in_one_part_whatever_their_number(origin, num_parts):
    reader = CheckpointReader(origin)
    making = HubExport(reader, {}, TrainedModel(None, reader, {}))
    shares = [[file.path for file in making.files(part, num_parts)] for part in range(num_parts)]
    assert len(shares) == num_parts
    assert [name for share in shares for name in share] == reader.index.files
    held = [name for share in shares for file in share for name in read_header(origin / file)]
    assert sorted(held) == sorted(reader)


def test_in_parts_or_at_once_the_folder_is_the_same(tmp_path, origin, converted):
    once = export(converted, origin, tmp_path / "once", num_parts=1)
    parts = export(converted, origin, tmp_path / "parts", num_parts=3, num_threads=2)
    for path in once.iterdir():
        assert path.read_bytes() == (parts / path.name).read_bytes(), path.name


def test_the_parts_know_the_hash_of_what_they_wrote(tmp_path, origin, converted):
    values = trained_values(converted, lambda key, value: value * 1.5)
    opened = open_trained(save_training(tmp_path / "step_3", values), origin, TINY)
    making = HubExport(opened.origin, {"train": "t1"}, opened)
    made = {item.record.path: item for item in making.make(0, 1, tmp_path / "hf")}
    for name in ("config.json", "model.safetensors.index.json"):
        (partial_of(tmp_path / "hf") / name).write_bytes((origin / name).read_bytes())
    expected = final_weights_sha256(partial_of(tmp_path / "hf"))
    assert making.settings(made) == {"final_weights_sha256": expected}


def test_trained_weights_replace_and_the_rest_is_the_origins(tmp_path, origin, converted):
    values = trained_values(converted, lambda key, value: value * 1.5 + 0.01)
    folder = export(save_training(tmp_path / "step_3", values), origin, tmp_path / "hf")
    before, after = CheckpointReader(origin), CheckpointReader(folder)
    assert after.index.weight_map == before.index.weight_map
    assert list(after) == list(before)
    for name in before:
        old, new = before.tensor(name), after.tensor(name)
        assert new.dtype == old.dtype
        is_frozen = name.startswith("model.layers.3.") and name not in optional_copies(TINY)
        assert torch.equal(new, old if is_frozen else (old.float() * 1.5 + 0.01).to(old.dtype)), name
    assert not torch.equal(after.tensor("lm_head.weight"), before.tensor("lm_head.weight"))


TIED_WITH_MTP = dataclasses.replace(TINY, tie_word_embeddings=True)


@pytest.mark.parametrize("has_mtp", [True, False])
@pytest.mark.parametrize("arch", [TINY, TINY_QWEN3, TIED_WITH_MTP], ids=["mtp", "tied", "tied_mtp"])
def test_every_copy_has_the_trained_value(tmp_path, arch, has_mtp):
    """Also where the trainer holds the MTP layer; the origin's copies lie in other shards than what they copy."""
    tensors = make_random_checkpoint(tmp_path / "hf", dataclasses.replace(arch, tie_word_embeddings=False))
    if arch.tie_word_embeddings:
        del tensors["lm_head.weight"]
    copies = optional_copies(arch)
    assert set(copies.values()) <= set(tensors)
    write_shards(tmp_path / "hf", {copy: tensors[copied].clone() for copy, copied in copies.items()} | tensors, 4)
    make_folder(Conversion(tmp_path / "hf", "s1", arch), tmp_path / "torch_dist")
    reader = TorchDistReader(tmp_path / "torch_dist")
    kept = [key for key in reader.keys if has_mtp or not key.startswith("mtp.")]
    save_training(tmp_path / "step", {key: reader.read(key).float() * 1.5 for key in kept})
    after = CheckpointReader(export_in_parts(tmp_path / "step", tmp_path / "hf", arch, tmp_path / "back"))
    for copy, copied in copies.items():
        assert torch.equal(after.tensor(copy), after.tensor(copied)), copy
        assert torch.equal(after.tensor(copy), (tensors[copied].float() * 1.5).bfloat16()), copy


def test_what_an_mtp_layer_has_of_its_own_stays_where_it_is_no_copy(tmp_path, origin, converted):
    values = trained_values(converted, lambda key, value: value * 1.5)
    opened = open_trained(save_training(tmp_path / "step_3", values), origin, TINY, keeps_mtp_copies=True)
    assert opened.placements.keys().isdisjoint(optional_copies(TINY))


def test_total_size_is_true(tmp_path, origin, converted):
    folder = export(converted, origin, tmp_path / "hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"]
        == sum(tensor.nbytes for tensor in random_tensors(TINY, seed=0).values()) + 2 * 64 * 64 * 2
    )


def test_a_second_call_writes_nothing_and_another_checkpoint_everything(tmp_path, origin, converted):
    folder = export(converted, origin, tmp_path / "hf")
    times = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    export(converted, origin, folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")} == times
    values = trained_values(converted, lambda key, value: value + 1)
    export(save_training(tmp_path / "step_3", values), origin, folder)
    assert all(path.stat().st_mtime_ns > times[path.name] for path in folder.glob("*.safetensors"))
    assert torch.equal(
        CheckpointReader(folder).tensor("model.norm.weight"),
        values["decoder.final_layernorm.weight"].bfloat16(),
    )


def test_no_tensor_is_held_in_memory_there_or_back(tmp_path):
    """An embedding and an output matrix of 128 MB each."""
    large = dataclasses.replace(TINY, vocab_size=1 << 20)
    make_random_checkpoint(tmp_path / "hf", large)
    folder = tmp_path / "torch_dist"
    there = growth_of_anonymous_memory(lambda: make_folder(Conversion(tmp_path / "hf", "s1", large), folder))
    back = growth_of_anonymous_memory(lambda: export_in_parts(folder, tmp_path / "hf", large, tmp_path / "x"))
    assert max(there, back) < 48 << 20
    for shard in (tmp_path / "hf").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "x" / shard.name).read_bytes()


# ---- what is refused ----


def test_missing_weights_are_all_named(tmp_path, origin, converted):
    values = trained_values(converted)
    del values["decoder.layers.1.mlp.router.weight"], values["output_layer.weight"]
    with pytest.raises(CheckpointError) as error:
        open_trained(save_training(tmp_path / "step_3", values), origin, TINY)
    assert "decoder.layers.1.mlp.router.weight: missing" in str(error.value)
    assert "output_layer.weight: missing" in str(error.value)
    assert "mtp" not in str(error.value)


def test_a_vision_tower_stays_as_it_was_and_half_of_one_is_refused(tmp_path):
    tensors = make_random_checkpoint(tmp_path / "hf", TINY_QWEN3_5)
    make_folder(Conversion(tmp_path / "hf", "s1", TINY_QWEN3_5), tmp_path / "torch_dist")
    reader = TorchDistReader(tmp_path / "torch_dist")
    values = {key: reader.read(key).float() * 1.5 for key in reader.keys if not key.startswith(("mtp.", KEY_VISION))}
    after = CheckpointReader(
        export_in_parts(save_training(tmp_path / "step", values), tmp_path / "hf", TINY_QWEN3_5, tmp_path / "back")
    )
    for name, before in tensors.items():
        is_kept = name.startswith(("mtp.", "model.visual."))
        assert torch.equal(after.tensor(name), before if is_kept else (before.float() * 1.5).to(before.dtype)), name
    values[f"{KEY_VISION}merger.norm.weight"] = reader.read(f"{KEY_VISION}merger.norm.weight")
    with rejected("not-exportable", f"{KEY_VISION}pos_embed.weight"):
        open_trained(save_training(tmp_path / "half", values), tmp_path / "hf", TINY_QWEN3_5)


def test_half_an_mtp_layer_is_refused(tmp_path, origin, converted):
    values = trained_values(converted)
    key = "mtp.layers.0.eh_proj.weight"
    values[key] = torch.zeros(by_key(TINY)[key][0].global_shape)
    with rejected("not-exportable", "mtp.layers.0.enorm.weight"):
        open_trained(save_training(tmp_path / "step_3", values), origin, TINY)


def test_a_weight_of_another_shape_is_named_with_both(tmp_path, origin, converted):
    values = trained_values(converted) | {"embedding.word_embeddings.weight": torch.zeros(96, 64)}
    with rejected("not-exportable", "word_embeddings.weight: [96, 64], expected [64, 64]"):
        open_trained(save_training(tmp_path / "step_3", values), origin, TINY)


def test_a_truncated_checkpoint_is_refused_before_anything_is_written(tmp_path, origin, converted):
    checkpoint = save_training(tmp_path / "step_3", trained_values(converted))
    path = next(checkpoint.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1000])
    with rejected("chunks-incomplete") as error:
        open_trained(checkpoint, origin, TINY)
    assert str(path) in str(error.value)


def test_a_folder_of_somebody_elses_is_left_alone(tmp_path):
    folder = tmp_path / "hf"
    refuse_foreign_folder(folder)
    folder.mkdir()
    (folder / "precious").write_text("x")
    with rejected("folder-not-ours", "export_hf"):
        refuse_foreign_folder(folder)
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", (), {}, {}))
    with rejected("folder-not-ours", "export_hf"):
        refuse_foreign_folder(folder)
    write_receipt(receipt_of(folder), Receipt("finalize_export_hf", (), {}, {}))
    refuse_foreign_folder(folder)


def test_our_own_folder_whose_receipt_was_not_written_yet_is_ours(tmp_path, origin, converted):
    refuse_foreign_folder(export(converted, origin, tmp_path / "hf"))


def test_a_receipt_names_the_checkpoint_or_is_about_it(tmp_path):
    trained = Receipt("train_grpo", (), {}, {"final_checkpoint": "checkpoints/step_000080"})
    assert checkpoint_of(tmp_path, trained) == tmp_path / "checkpoints" / "step_000080"
    assert checkpoint_of(tmp_path, Receipt("finalize_torch_dist", (), {}, {})) == tmp_path


# ---- identity ----


def test_the_hash_is_that_of_its_definition(tmp_path):
    tensors = {"b": torch.tensor([1.0, 2.0]), "a": torch.zeros(0, 3).bfloat16()}
    write_shards(tmp_path, tensors, 1)
    first = hashlib.sha256(b"").hexdigest()
    second = hashlib.sha256(bytes.fromhex("0000803f00000040")).hexdigest()
    text = f"a BF16 [0, 3] {first}\nb F32 [2] {second}\n"
    assert final_weights_sha256(tmp_path) == hashlib.sha256(text.encode()).hexdigest()


def test_the_hash_ignores_shards_and_sees_every_bit(tmp_path):
    def hash_of(tensors, num_shards, folder):
        folder.mkdir()
        write_shards(folder, tensors, num_shards)
        return final_weights_sha256(folder, num_threads=num_shards)

    tensors = random_tensors(TINY, seed=5)
    reference = hash_of(tensors, 1, tmp_path / "one")
    assert hash_of(dict(reversed(tensors.items())), 4, tmp_path / "four") == reference
    flipped = {name: tensor.clone() for name, tensor in tensors.items()}
    flipped["model.norm.weight"].view(torch.int16)[7] ^= 1
    assert hash_of(flipped, 1, tmp_path / "flipped") != reference
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    renamed = {name + "2" if old == name else old: tensor for old, tensor in tensors.items()}
    assert hash_of(renamed, 1, tmp_path / "renamed") != reference
    viewed = tensors | {name: tensors[name].view(torch.int32)}
    assert hash_of(viewed, 1, tmp_path / "viewed") != reference
