"""What training loads: what an older version wrote, bit by bit; of what somebody else put there no code runs."""

from __future__ import annotations

import pickle
import re
import shutil
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.payload import Payload
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import TRAINED
from tests.unit.rl.megatron_backend.test_families import convert_family
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from posttrain.checkpoint.formats.torch_dist_format import METADATA_NAME, read_metadata
from posttrain.config.load import read_yaml
from posttrain.config.schema import Architecture
from posttrain.rl.megatron_backend.checkpoint import load_training_state, load_weights, prepare_save
from posttrain.rl.megatron_backend.model import build_policy
from posttrain.rl.megatron_backend.optimizer_state import allocate_state, count_steps

OLDER = Path(__file__).parents[3] / "fixtures" / "version_0_1.tar.xz"
EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.")
WEIGHT = "decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def policy(make_policy):
    """One of this module's own: other weights are loaded into it."""
    return make_policy(test_config(TRAINED))


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory) -> Path:
    """A training checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    allocate_state(policy.optimizer)
    prepare_save(policy, 6, folder)()
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory) -> Path:
    """A converted checkpoint of the same model."""
    return convert_family(tmp_path_factory.mktemp("converted"), TRAINED) / "torch_dist"


@pytest.fixture
def payload(tmp_path: Path) -> Iterator[Payload]:
    payload = Payload(tmp_path / "ran")
    yield payload
    assert not payload.has_run


def test_the_doors_are_open_for_what_we_wrote(policy, saved, converted):
    assert load_training_state(policy, saved) == 6
    load_weights(policy.chunks, converted)


def test_what_megatron_0_16_wrote_is_loaded_bit_by_bit(tmp_path):
    """torch's own reader is the witness; `tests/end_to_end/test_older_run.py` tells where the folder comes from."""
    with tarfile.open(OLDER) as archive:
        archive.extractall(tmp_path, filter="data")
    (run,) = (tmp_path / "results").glob("tiny-*")
    folder = run / "train" / "checkpoints" / "step_000002"
    dcp_to_torch_save(folder, tmp_path / "written.pt")
    written = torch.load(tmp_path / "written.pt", weights_only=True)
    dimensions = read_yaml(run / "config.resolved.yaml")["model"]["architecture"]
    config = test_config(Architecture(**dimensions))
    initialize_single_rank(config)
    policy = build_policy(config)
    assert load_training_state(policy, folder) == 2
    assert count_steps(policy.optimizer) == 4, "two updates a step"
    loaded = {name: weight for name, weight in policy.chunks[0].state_dict().items() if weight is not None}
    weights = {weight: name for name, weight in policy.chunks[0].named_parameters()}
    for part in policy.optimizer.chained_optimizers:
        for weight in part.model_param_group_index_map:
            for kind, values in part._get_main_param_and_optimizer_states(weight).items():
                loaded[f"optimizer.state.{kind}.{weights[weight]}"] = values.view(weight.shape)
    assert {EXPERT.sub("experts.experts.", name) for name in loaded} == set(written)
    for name, values in loaded.items():
        there, expert = written[EXPERT.sub("experts.experts.", name)], EXPERT.search(name)
        assert torch.equal(values, there[int(expert[1])] if expert else there), name
    assert sum(".exp_avg_sq." in name and bool(values.any()) for name, values in loaded.items()) > 30


def moments_of(policy):
    # Reading the state of a weight that has none leaves an empty one there.
    return [state for part in policy.optimizer.chained_optimizers for state in part.optimizer.state.values() if state]


def test_a_state_from_before_the_first_update_is_one_to_go_on_from(make_policy, tmp_path):
    """Steps whose rewards are all alike teach nothing: then there are no moments yet, and nothing else is missing."""
    one, other = make_policy(test_config(TRAINED)), make_policy(test_config(TRAINED))
    assert not moments_of(one)
    prepare_save(one, 3, tmp_path)()
    for tensor in other.parameters():
        tensor.data.fill_(7.0)
    assert load_training_state(other, tmp_path) == 3
    assert count_steps(other.optimizer) == 0
    assert not moments_of(other)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    for policy in (one, other):
        for part in policy.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for number, weight in enumerate(group["params"]):
                    weight.grad = torch.full_like(weight, 1e-3 * (1 + number))
            part.optimizer.step()
    ends = [
        [w for part in p.optimizer.chained_optimizers for g in part.optimizer.param_groups for w in g["params"]]
        for p in (one, other)
    ]
    assert all(map(torch.equal, *ends))


def test_an_optimizer_that_makes_its_own_state_is_filled_where_it_is(make_policy, tmp_path, monkeypatch):
    """As Transformer Engine's is; handed a state, it would make all of it once more."""
    policy = make_policy(test_config(TRAINED))

    def own_state(inner, weight, store_param_remainders):
        inner.state[weight] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        inner.state[weight]["step"] = torch.tensor(7.0)

    inner = [part.optimizer for part in policy.optimizer.chained_optimizers]
    for optimizer in inner:
        monkeypatch.setattr(optimizer, "initialize_state", partial(own_state, optimizer), raising=False)
    allocate_state(policy.optimizer)
    tensors = [
        tensor
        for optimizer in inner
        for group in optimizer.param_groups
        for weight in group["params"]
        for tensor in (weight.data, optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"])
    ]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    written = [tensor.clone() for tensor in tensors]
    groups = [group for optimizer in inner for group in optimizer.param_groups]
    for group in groups:
        group["step"] = 7  # there it counts
    prepare_save(policy, 6, tmp_path)()
    for tensor in tensors:
        tensor.zero_()
    for group in groups:
        del group["step"]
    for optimizer in inner:
        monkeypatch.setattr(optimizer, "load_state_dict", None)
        monkeypatch.setattr(optimizer, "initialize_state", lambda weight, store_param_remainders: None)
    assert load_training_state(policy, tmp_path) == 6
    assert all(map(torch.equal, tensors, written))
    assert {group["step"] for group in groups} == {7}


@pytest.mark.parametrize("kind", ["saved", "converted"])
@pytest.mark.parametrize(
    ("plant", "code", "data"),
    [
        ("metadata", "metadata-invalid", [".metadata", "posix.mkdir"]),
        ("common", "metadata-invalid", ["common.pt", "GLOBAL posix.mkdir"]),
        ("object", "model-does-not-fit", [f"['{WEIGHT}']"]),
        ("chunk", "model-does-not-fit", ["GLOBAL posix.mkdir"]),
    ],
)
def test_no_payload_runs(policy, request, tmp_path, payload, kind, plant, code, data):
    folder = tmp_path / "planted"
    shutil.copytree(request.getfixturevalue(kind), folder)
    PLANTS[plant](folder, payload)
    load = load_training_state if kind == "saved" else lambda policy, folder: load_weights(policy.chunks, folder)
    if (kind, plant) == ("converted", "common"):
        load(policy, folder)  # nothing of it is needed: it is not opened
    else:
        with rejected(code, *data) as refused:
            load(policy, folder)
        assert "weights_only" not in str(refused.value), "torch's advice to run it all the same"


def plant_metadata(folder: Path, payload: Payload) -> None:
    (folder / METADATA_NAME).write_bytes(payload.content)


def plant_common(folder: Path, payload: Payload) -> None:
    torch.save({"step": payload, "optimizer_steps": payload}, folder / "common.pt")


def plant_chunk(folder: Path, payload: Payload, is_object: bool = False) -> None:
    """Let the payload lie where a tensor does; torch's planner unpickles an object without a look at what it is."""
    torch.save(payload, folder / "__9_0.distcp")
    metadata = read_metadata(folder)
    index = next(index for index in metadata.storage_data if index.fqn == WEIGHT)
    place = metadata.storage_data.pop(index)
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, (folder / "__9_0.distcp").stat().st_size
    if is_object:
        row = BytesStorageMetadata()
        row.size = metadata.state_dict_metadata[WEIGHT].size  # by which Megatron compares shapes
        metadata.state_dict_metadata[WEIGHT] = row
    metadata.storage_data[MetadataIndex(WEIGHT) if is_object else index] = place
    (folder / METADATA_NAME).write_bytes(pickle.dumps(metadata))


PLANTS = {
    "metadata": plant_metadata,
    "common": plant_common,
    "chunk": plant_chunk,
    "object": partial(plant_chunk, is_object=True),
}


@pytest.mark.parametrize(
    ("counts", "code"),
    [
        ({"step": 6}, "counts-invalid"),
        ({"step": "6", "optimizer_steps": 1}, "counts-invalid"),
        ([6, 1], "metadata-invalid"),
    ],
)
def test_a_state_without_its_counts_is_refused(policy, saved, tmp_path, counts, code):
    shutil.copytree(saved, tmp_path / "saved")
    torch.save(counts, tmp_path / "saved" / "common.pt")
    with rejected(code, "common.pt"):
        load_training_state(policy, tmp_path / "saved")
