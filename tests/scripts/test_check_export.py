"""The step that loads an export with transformers: its record, its end, and a tied model from training to export."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.support.checkpoint_store import Store, make_export, make_store, make_torch_dist, run_here
from tests.support.fault_record import FaultRecord
from tests.support.killing import LAYER_BY_LAYER, run_killed
from tests.support.rejections import rejected
from tests.support.resolved_words import words_with
from tests.support.tiny_checkpoint import TINY
from tests.support.workflow_runs import WorkflowFolder

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.store import read_json, read_receipt, receipt_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The export is there."""
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    make_export(store)
    return store


def arguments(store: Store, check: str = "layers") -> list[object]:
    folder = store.folder("hf")
    given = ["--export", folder, "--export-receipt", receipt_of(folder), "--check", check]
    return [*words_with(TINY), *given, "--output", store.root / "export_check.json"]


def test_it_survives_kills_and_ends_with_the_same_bytes(tmp_path: Path, store: Store) -> None:
    output = store.root / "export_check.json"
    endings = run_killed("check_export", arguments(store, "off"), tmp_path, [1, 2, 3, 4, 10**9])
    assert endings[-1] == 0
    assert -9 in endings
    assert read_receipt(receipt_of(output)).settings == {"check": "off"}
    run_here("check_export", arguments(store))
    receipt = read_receipt(receipt_of(output))
    assert receipt.inputs == {"export": read_receipt(receipt_of(store.folder("hf"))).digest}
    assert (receipt.step, receipt.settings) == ("check_export", {"check": "layers"})
    found = read_json(output)
    assert (found["check"], found["canary"]) == ("layers", None)
    assert found["num_tensors"] == len(CheckpointReader(store.folder("hf")))


@pytest.mark.faults("kills")
def test_a_check_layer_by_layer_that_is_killed_leaves_what_was_found_before_or_nothing(
    tmp_path: Path, store: Store, faults: FaultRecord
) -> None:
    """Killed at every change of a file: where nothing was found yet, and over what was."""
    output, started, kills = store.root / "export_check.json", time.monotonic(), 0
    claim = output.parent, receipt_of(output)
    run_here("check_export", arguments(store))
    files = {path: path.read_bytes() for path in (output, receipt_of(output))}
    while kills < 20:
        for path in files if kills == 0 else ():
            path.unlink()
        points = [*range(1, 20), 10**9]
        endings = run_killed("check_export", arguments(store), tmp_path, points, claim=claim, imports=LAYER_BY_LAYER)
        assert (set(endings), endings[-1]) == ({0, -9}, 0)
        assert {path: path.read_bytes() for path in files} == files
        kills += endings.count(-9)
    faults.add_counts("kills", {"check_export, layer by layer": kills}, time.monotonic() - started)
    faults.equal = True


def test_an_export_that_fails_leaves_no_receipt_of_the_one_before(store: Store) -> None:
    run_here("check_export", arguments(store, "whole"))
    shard = sorted(store.folder("hf").glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    name, widened = next((name, tensor) for name, tensor in tensors.items() if name.endswith("norm.weight"))
    # The same bytes in all, so that its receipt still holds: what is wrong is in the tensors.
    renamed = {f"{name[:-1]}T" if other == name else other: tensor for other, tensor in tensors.items()}
    save_file(renamed, shard, metadata={"format": "pt"})
    index = store.folder("hf") / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(f'"{name}"', f'"{name[:-1]}T"'))
    assert widened.numel()
    with rejected("tensors-not-loaded", name):
        run_here("check_export", arguments(store, "whole"))
    assert not receipt_of(store.root / "export_check.json").exists()


def test_a_check_that_is_off_is_recorded(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run_here("check_export", arguments(store, "off"))
    said = "not checked (export.check=off)"
    assert read_json(store.root / "export_check.json") == {"check": "off", "said": said}
    assert read_receipt(receipt_of(store.root / "export_check.json")).settings == {"check": "off"}
    assert said in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.faults("slow")
def test_a_tied_model_with_a_head_of_its_own_is_trained_and_exported(workflow: WorkflowFolder, tmp_path: Path) -> None:
    """Until this step there was one, the export had the source's head: 0.15 nats from the trainer after three steps."""
    workflow.run("make_tiny_model", config={"model": "tiny_qwen3"})
    (made,) = workflow.store.glob("made/tiny_qwen3-*/config.json")
    source = tmp_path / "tied"
    source.mkdir()
    for path in made.parent.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    reader = CheckpointReader(source)
    shard = source / reader.file_of("model.norm.weight")
    embedding = reader.tensor("model.embed_tokens.weight").clone()
    save_file(load_file(shard) | {"lm_head.weight": embedding}, shard, metadata={"format": "pt"})
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = shard.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    given = {"model.source.kind": "folder", "model.source.folder": source, "training.num_steps": 2}
    for check in ("whole", "layers"):
        workflow.settings |= {**given, "optimizer.lr": 2e-3, "export.check": check}
        workflow.run("check_export", config={"model": "tiny_qwen3", "run": "tied"})
        found = read_json(workflow.results / "tied" / "export_check.json")
        assert found["check"] == check
        assert found["canary"]["difference"] < 0.02
    after = CheckpointReader(workflow.results / "tied" / "hf")
    assert not after.tensor("lm_head.weight").equal(embedding)
    assert after.tensor("lm_head.weight").equal(after.tensor("model.embed_tokens.weight"))
