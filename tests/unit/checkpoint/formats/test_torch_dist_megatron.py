"""The converted checkpoint in the hands of Megatron itself, and Megatron's own in the hands of our reader."""

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.support.exporting import export_in_parts
from tests.support.folders_in_parts import make_folder
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TINY, make_random_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from posttrain.checkpoint.formats.adopted_torch_dist import check_adoptable, place_torch_dist
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.formats.torch_dist import Conversion, verify_torch_dist
from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
from posttrain.checkpoint.param_names import by_key

EXPERTS_FC1 = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
DENSE_FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron's dist_checkpointing in one process; what it asks of CUDA is answered where there is none."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        from megatron.core import dist_checkpointing

        ours = not dist.is_initialized()
        if ours:
            rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
        yield dist_checkpointing
        if ours:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    make_random_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def converted(tmp_path_factory, source):
    folder = tmp_path_factory.mktemp("store") / "torch_dist"
    make_folder(Conversion(source, "s1", TINY), folder, num_parts=2)
    return folder


def test_the_whole_model_loads_with_megatrons_strictest_check(megatron, converted):
    """`raise_all` refuses a key too many as well as one too few, on either side."""
    reader = TorchDistReader(converted)
    wanted = {
        key: megatron.ShardedTensor.from_rank_offsets(key, torch.empty(placements[0].global_shape))
        for key, placements in by_key(TINY).items()
    }
    loaded = megatron.load(wanted, str(converted), strict="raise_all")
    assert loaded.pop("content_metadata") == megatron.load_content_metadata(str(converted))
    assert set(loaded) == set(by_key(TINY))
    for key, tensor in loaded.items():
        assert torch.equal(tensor, reader.read(key).float()), key


def test_another_layout_than_it_was_written_in_loads(megatron, converted, source):
    """Two tensor-parallel ranks: columns of fc2, gate and up rows of fc1, experts on a prepended axis."""
    hf = CheckpointReader(source)
    half = TINY.intermediate_size // 2
    inner = TINY.moe_intermediate_size // 2
    wanted = {}
    for rank in range(2):
        for name, piece in (("gate", rank), ("up", 2 + rank)):
            wanted[f"dense {name} {rank}"] = megatron.ShardedTensor.from_rank_offsets(
                DENSE_FC1, torch.empty(half, TINY.hidden_size), (0, piece, 4)
            )
            for expert in range(TINY.n_routed_experts):
                wanted[f"expert {expert} {name} {rank}"] = megatron.ShardedTensor.from_rank_offsets(
                    EXPERTS_FC1,
                    torch.empty(inner, TINY.hidden_size),
                    (0, expert, TINY.n_routed_experts),
                    (1, piece, 4),
                    prepend_axis_num=1,
                )
        wanted[f"fc2 {rank}"] = megatron.ShardedTensor.from_rank_offsets(
            DENSE_FC1.replace("fc1", "fc2"), torch.empty(TINY.hidden_size, half), (1, rank, 2)
        )
    loaded = megatron.load(wanted, str(converted))
    for rank in range(2):
        rows, columns = slice(rank * half, (rank + 1) * half), slice(rank * inner, (rank + 1) * inner)
        for name in ("gate", "up"):
            dense = hf.tensor(f"model.layers.0.mlp.{name}_proj.weight")[rows].float()
            assert torch.equal(loaded[f"dense {name} {rank}"], dense)
            for expert in range(TINY.n_routed_experts):
                whole = hf.tensor(f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight")
                assert torch.equal(loaded[f"expert {expert} {name} {rank}"], whole[columns].float())
        down = hf.tensor("model.layers.0.mlp.down_proj.weight")[:, rows].float()
        assert torch.equal(loaded[f"fc2 {rank}"], down)


def test_megatron_names_a_shape_that_does_not_fit(megatron, converted):
    wrong = {"x": megatron.ShardedTensor.from_rank_offsets(DENSE_FC1, torch.empty(6, TINY.hidden_size))}
    with pytest.raises(CheckpointException, match=DENSE_FC1.replace(".", r"\.")):
        megatron.load(wrong, str(converted))


def training_state(megatron, values):
    """Every tensor in two shards where it can be, with an optimizer's state beside it."""
    state = {"step": 3, "rng": megatron.ShardedObject("rng_state", {"seed": [1, 2]}, (1,), (0,))}
    for key, value in values.items():
        fragments = 2 if value.shape[-1] % 2 == 0 else 1
        for rank, piece in enumerate(value.chunk(fragments, dim=-1)):
            place = (value.dim() - 1, rank, fragments)
            for prefix in ("", "optimizer.state.exp_avg."):
                state[f"{prefix}{key} {rank}"] = megatron.ShardedTensor.from_rank_offsets(
                    prefix + key, piece.clone() if not prefix else torch.ones_like(piece), place
                )
    return state


def test_a_training_checkpoint_of_megatron_is_exported(megatron, converted, source, tmp_path):
    """FP32, another split than the Hub's, no MTP layer: exported in the origin's precision and shards."""
    reader = TorchDistReader(converted)
    values = {key: reader.read(key).float() * 1.25 for key in reader.keys if not key.startswith("mtp.")}
    checkpoint = tmp_path / "step_3"
    checkpoint.mkdir()
    megatron.save(training_state(megatron, values), str(checkpoint))

    trained = TorchDistReader(checkpoint)
    assert len(trained.keys) == 2 * len(values)
    for key, value in values.items():
        assert torch.equal(trained.read(key), value)

    folder = export_in_parts(checkpoint, source, TINY, tmp_path / "hf")
    exported, origin = CheckpointReader(folder), CheckpointReader(source)
    assert exported.index.weight_map == origin.index.weight_map
    for name in origin:
        before, after = origin.tensor(name), exported.tensor(name)
        trained_value = (before.float() * 1.25).to(before.dtype)
        assert torch.equal(after, before if name.startswith("model.layers.3.") else trained_value), name


@pytest.fixture(scope="module")
def of_megatron(tmp_path_factory, megatron, converted):
    """The converted weights as Megatron's own `save` writes them: what is no tensor is among the shards."""
    reader, folder = TorchDistReader(converted), tmp_path_factory.mktemp("megatron")
    state = {key: megatron.ShardedTensor.from_rank_offsets(key, reader.read(key).clone()) for key in reader.keys}
    megatron.save({**state, "iteration": 7, "args": {"lr": 1e-6}}, str(folder))
    return folder


def test_both_layouts_of_megatron_are_adopted(converted, of_megatron, source, tmp_path):
    """0.19 has `common_state/shard_0_1`, older versions `common.pt`."""
    assert not (of_megatron / "common.pt").exists()
    assert (converted / "common.pt").exists()
    for folder in (converted, of_megatron):
        names = check_adoptable(folder, TINY)
        assert set(names) == {path.name for path in folder.iterdir()}
        placed = tmp_path / folder.name
        placed.mkdir()
        place_torch_dist(folder, placed, names, 1)
        verify_torch_dist(source, placed, TINY, 1)


def test_an_adopted_folder_of_megatron_loads_and_exports(megatron, of_megatron, converted, source, tmp_path):
    reader = TorchDistReader(converted)
    wanted = {key: megatron.ShardedTensor.from_rank_offsets(key, torch.empty(reader.shape(key))) for key in reader.keys}
    loaded = megatron.load(wanted, str(of_megatron))
    assert loaded["iteration"] == 7
    assert all(torch.equal(loaded[key], reader.read(key).float()) for key in reader.keys)
    folder = export_in_parts(of_megatron, source, TINY, tmp_path / "hf")
    exported, origin = CheckpointReader(folder), CheckpointReader(source)
    assert all(torch.equal(exported.tensor(name), origin.tensor(name)) for name in origin)


def test_a_folder_without_any_common_state_is_refused(of_megatron, converted, tmp_path):
    shutil.copytree(converted, tmp_path / "old")
    (tmp_path / "old" / "common.pt").unlink()
    with rejected("files-missing", "common.pt"):
        check_adoptable(tmp_path / "old", TINY)
    shutil.copytree(of_megatron, tmp_path / "new")
    (tmp_path / "new" / "metadata.json").unlink()
    with rejected("files-missing", "metadata.json"):
        check_adoptable(tmp_path / "new", TINY)
