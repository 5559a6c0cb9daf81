"""Calibrations by real ranks: killed, in other layouts, over states that belong to something else."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.calibrating import PASSES, config_of, contents, prepare
from tests.support.fault_record import FaultRecord
from tests.support.megatron_single import run_gangs

from posttrain.checkpoint.quantization.calibration import Calibration
from posttrain.errors import ConfigError
from posttrain.rl.batching.packed_batch import build_packed_batch
from posttrain.rl.data.chat import ChatTokenizer
from posttrain.rl.training.calibration_samples import read_pass, read_passes
from posttrain.types import Trajectory

TP, EP, PP, CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "expert_model", "pipeline_model", "context"))
ONE = {"one": (1, {})}
TWO = {"experts": (2, {EP: 2}), "tensors": (2, {TP: 2})}
CUT = {TP: 2, "expert_tensor_parallel_size": 2}
OTHERS = {
    "experts_cut": (2, CUT),
    "context": (2, {CP: 2}),
    "stages": (2, {PP: 2}),
    "tensors_experts": (4, {TP: 2, EP: 4}),
    "data": (4, {EP: 2}),
    "all": (4, {PP: 2, CP: 2, EP: 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("calibrating")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def calibrated(folder: Path) -> Path:
    """Return the folder with what one rank has found, what two have, and what two have that were killed."""
    order = {"folder": str(folder), "layouts": ONE | TWO, "killed": "experts", "kills": 1}
    assert json.loads(run_gangs("calibrating", order).splitlines()[-1])["kills"] == 1
    return folder


def compare(folder: Path, layouts: dict[str, tuple[int, dict[str, int]]]) -> None:
    one = folder / "out" / "one"
    for name in layouts:
        other = folder / "out" / name
        for kind in PASSES:
            ours, theirs = load_file(one / f"{kind}.safetensors"), load_file(other / f"{kind}.safetensors")
            assert ours.keys() == theirs.keys(), (name, kind)
            assert len(ours) > 40
            worst = max(float((ours[key] - theirs[key]).abs() / ours[key]) for key in ours)
            assert worst <= 1e-3, (name, kind, worst)
        told, expected = (json.loads((path / "coverage.json").read_text()) for path in (other, one))
        for kind, row in expected["passes"].items():
            for layer, counts in row["layers"].items():
                assert told["passes"][kind]["layers"][layer]["tokens"] == counts["tokens"], (name, kind, layer)


def test_a_calibration_that_was_killed_has_the_bits_of_an_undisturbed_one(calibrated: Path) -> None:
    """The program has compared them; here, that there was something to compare."""
    (killed,) = (path for path in (calibrated / "out").glob("killed*") if path.is_dir())
    assert contents(killed) == contents(calibrated / "out" / "experts")
    assert set(contents(killed)) == {"coding.safetensors", "deep.safetensors", "coverage.json"}


def test_layouts_find_the_same(calibrated: Path) -> None:
    compare(calibrated, TWO)


def test_tokens_are_counted_once(calibrated: Path) -> None:
    told = json.loads((calibrated / "out" / "one" / "coverage.json").read_text())
    for kind, row in told["passes"].items():
        assert row["tokens"] == PASSES[kind].num_samples * PASSES[kind].max_tokens
        assert {sum(layer["tokens"]) for layer in row["layers"].values()} == {2 * row["tokens"]}


def test_what_was_found_is_what_the_quantiser_reads(calibrated: Path) -> None:
    files = [calibrated / "out" / "one" / f"{kind}.safetensors" for kind in PASSES]
    merged, name = Calibration(files), "model.layers.1.mlp.experts.0.up_proj.weight"
    seen = [load_file(file)[name.removesuffix(".weight") + ".input_quantizer._amax"] for file in files]
    assert merged.input_amax([name]) == torch.stack(seen).max()


@pytest.mark.timeout(1800)
@pytest.mark.faults("kills")
@pytest.mark.parametrize("killed", ["one", "experts", "tensors"])
def test_many_kills(folder: Path, killed: str, faults: FaultRecord) -> None:
    layouts, begun = {killed: (ONE | TWO)[killed]}, time.monotonic()
    order = {"folder": str(folder), "layouts": layouts, "killed": killed, "kills": 15, "seed": 8}
    assert json.loads(run_gangs("calibrating", order, timeout=1800).splitlines()[-1])["kills"] == 15
    faults.add_counts("kills", {f"ranks that calibrate, layout {killed}": 15}, time.monotonic() - begun)
    faults.equal = True


@pytest.mark.faults("layouts")
def test_other_layouts_find_the_same(folder: Path) -> None:
    run_gangs("calibrating", {"folder": str(folder), "layouts": ONE | OTHERS})
    compare(folder, OTHERS)


# ---- what is read ----


def test_conversations_that_are_too_short_are_passed_over(folder: Path) -> None:
    config = config_of(1, {})
    read = read_passes(config, ChatTokenizer(folder / "hf"), {name: folder / name for name in PASSES})
    assert {len(sample) for sample in read["deep"].samples} == {140}
    assert {len(sample) for sample in read["coding"].samples} == {90}
    texts = {name: dataclasses.replace(wanted, min_tokens=10**6) for name, wanted in PASSES.items()}
    config = dataclasses.replace(config, serving=dataclasses.replace(config.serving, passes=texts))
    with pytest.raises(ConfigError) as refused:
        read_passes(config, ChatTokenizer(folder / "hf"), {name: folder / name for name in PASSES})
    assert [problem.key for problem in refused.value.problems] == [
        f"serving.passes.{name}.min_tokens" for name in PASSES
    ]
    assert "the longest of 9 conversations" in str(refused.value)


def test_fewer_than_were_asked_for_are_counted(folder: Path) -> None:
    config = config_of(1, {})
    tokenizer = ChatTokenizer(folder / "hf")
    lengths = [len(sample) for sample in read_pass(config, "coding", tokenizer, folder / "coding").samples]
    more = {"coding": dataclasses.replace(PASSES["coding"], num_samples=100, max_tokens=256)}
    config = dataclasses.replace(config, serving=dataclasses.replace(config.serving, passes=more))
    assert len(read_pass(config, "coding", tokenizer, folder / "coding").samples) == len(lengths) == 9


def test_padding_is_told_from_tokens() -> None:
    from posttrain.rl.training.calibration import real_tokens

    samples = [Trajectory.of_response((5,) * (n - 1), (6,), prompt_id=i) for i, n in enumerate((3, 4))]
    batch = build_packed_batch(samples, [0, 1], multiple_of=10, sequence_multiple_of=4)
    expected = [1, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    assert real_tokens(batch, samples).int().tolist() == expected
    assert not real_tokens(build_packed_batch(samples, [], multiple_of=4), samples).any()


def test_all_that_decides_the_bits_is_in_the_key() -> None:
    from posttrain.rl.training.calibration import key_of

    config, samples = config_of(2, {EP: 2}), [(1, 2, 3)]
    shards = dataclasses.replace(config, serving=dataclasses.replace(config.serving, samples_per_shard=3))
    precise = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, params_dtype="bf16"))
    keys = [
        key_of(config, "weights", samples),
        key_of(config, "other weights", samples),
        key_of(config, "weights", [(1, 2, 4)]),
        key_of(config_of(2, {TP: 2}), "weights", samples),
        key_of(shards, "weights", samples),
        key_of(precise, "weights", samples),
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(config, "weights", samples) == keys[0]
