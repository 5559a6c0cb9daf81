import dataclasses
import json
import shutil

import pytest
import torch
from tests.support.checkpoint_store import make_store, make_torch_dist
from tests.support.synthetic_run import make_run, remake_receipt

from posttrain.checkpoint import verification
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.verification import find_uncovered, raise_bad_files, verify
from posttrain.errors import CheckpointError
from posttrain.report.provenance import record_run
from posttrain.store import (
    Receipt,
    manifest_of,
    part_receipt_of,
    read_receipt,
    receipt_of,
    record_files,
    records_of,
    write_receipt,
)


@pytest.fixture
def paths(tmp_path):
    return make_run(tmp_path, num_steps=4).paths


def problems_of(paths, content=True):
    return {verdict.artefact.name: verdict.problems for verdict in verify(paths, content) if verdict.problems}


def test_an_untouched_run_is_proven_from_the_source_to_the_evaluation(paths):
    verdicts = verify(paths)
    raise_bad_files(verdicts)
    assert [verdict.artefact.name for verdict in verdicts] == [
        "made model",
        "dataset",
        "hf",
        "hf_patched",
        "torch_dist",
        "rollout_fp8",
        "train",
        "checkpoint step_000003",
        "run: hf",
        "run: records",
        "node0: torch_dist",
        "node0: rollout_fp8",
        "node1: torch_dist",
        "node1: rollout_fp8",
        "evaluation before",
        "evaluation after",
    ]


# What people read, or a fork begins with, below the run's folder.
BELIEVED = (
    *("experiment.yaml", "train/metrics.jsonl", "train/attempts.jsonl", "train/checkpoints/begun_from.json"),
    *(
        "train/wandb/offline-run-1/run-1.wandb",
        "evaluation/before.json",
        "evaluation/after.json",
        "node_local/node0.json",
    ),
    *("train/checkpoints/step_000003/common.pt", "train/checkpoints/step_000003/manifest.json", "train/done.json"),
    *("train/checkpoints/step_000004/manifest.json", "records.receipt.json", "evaluation/after.json.receipt.json"),
)


def names_of_bad_files(paths):
    return [problem for problems in problems_of(paths).values() for problem in problems]


def test_a_changed_byte_in_what_people_believe_is_found(paths):
    for path in (paths.run / name for name in BELIEVED):
        content = path.read_bytes()
        for position in (0, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            assert any(str(path) in problem for problem in names_of_bad_files(paths)), (path, position)
        path.write_bytes(content)
    assert problems_of(paths) == {}


def test_a_manifest_that_lists_another_hash_is_named_with_the_file(paths):
    """It has no digest of its own: either may be the damaged one."""
    manifest = paths.run / "train/checkpoints/step_000003/manifest.json"
    record = json.loads(manifest.read_text())[0]
    digest = record["xxh3_128"]
    manifest.write_text(manifest.read_text().replace(digest, f"{int(digest, 16) ^ 1:032x}"))
    found = names_of_bad_files(paths)
    assert found[0].startswith(f"{manifest.parent}/{record['path']}: content differs")
    assert found[1:] == [f"{manifest}: either this was changed, or what differs from it"]


def test_a_file_name_makes_no_lines(paths):
    (paths.hf / "x\n  all is well\x1b[2J").write_text("from nowhere")
    (problem,) = problems_of(paths)["hf"]
    assert problem == f"{paths.hf}/x\\n  all is well\\x1b[2J: not in the receipt"


def test_a_better_pass_rate_is_found(paths):
    path = paths.evaluation("after")
    path.write_text(path.read_text().replace("0.931", "0.9999"))
    (problem,) = problems_of(paths)["evaluation after"]
    assert problem.startswith(f"{path}: ")
    path.write_text(path.read_text().replace("0.9999", "0.999"))
    assert "content differs" in problems_of(paths)["evaluation after"][0]


def test_an_evaluation_between_steps_is_vouched_for(paths):
    result = paths.train / "evaluations" / "step_000002.json"
    result.parent.mkdir()
    result.write_text('{"finished": 2, "exams": {}}')
    before = read_receipt(records_of(paths.run))
    write_receipt(records_of(paths.run), dataclasses.replace(before, files=record_run(paths.run)))
    assert problems_of(paths) == {}
    assert "train/evaluations/step_000002.json" not in find_uncovered(paths, verify(paths))
    result.write_text('{"finished": 3, "exams": {}}')
    assert "train/evaluations/step_000002.json" in problems_of(paths)["run: records"][0]


def test_only_what_nothing_vouches_for_is_not_looked_at(paths):
    assert find_uncovered(paths, verify(paths)) == [
        "config.resolved.yaml",  # until there is a report
        "evaluation/after.history.jsonl",
        "evaluation/before.history.jsonl",
        "hf.history.jsonl",
        "records.history.jsonl",
        "train/done.history.jsonl",
        "train/wandb/offline-run-1/logs/debug.log",
    ]


def test_a_run_of_an_earlier_version_is_proven_as_far_as_it_has_receipts(paths):
    for receipt in (records_of(paths.run), *paths.run.glob("evaluation/*.receipt.json")):
        receipt.unlink()
    assert problems_of(paths) == {}
    assert "evaluation after" in [verdict.artefact.name for verdict in verify(paths)]
    uncovered = find_uncovered(paths, verify(paths))
    assert {"train/metrics.jsonl", "train/attempts.jsonl", "train/wandb/offline-run-1/files/config.yaml"} <= set(
        uncovered
    )
    assert {"evaluation/before.json", "evaluation/after.json", "node_local/node1.json"} <= set(uncovered)


def test_a_run_that_is_not_exported_yet_is_looked_at(paths):
    folder = paths.hf_export
    files = record_files(folder, ["config.json"])
    write_receipt(part_receipt_of(folder, 0), Receipt("export_hf", files, {}, {"part": 0}))
    receipt_of(folder).unlink()
    assert "checkpoint step_000003" in [verdict.artefact.name for verdict in verify(paths)]
    assert "run: hf part 0" in [verdict.artefact.name for verdict in verify(paths)]


WRONG_JSON = ["", "null", "[]", '{"a": 1}', "[" * 100_000, '["\\ud800"]']


def test_what_cannot_be_parsed_is_named_and_nothing_is_raised(paths):
    """Whatever verify reads: receipts, manifests, the experiment, evaluations, records of nodes."""
    parsed = [paths.run / name for name in BELIEVED if not name.endswith((".pt", ".wandb"))]
    for path in (*parsed, receipt_of(paths.hf), receipt_of(paths.dataset)):
        before = path.read_bytes()
        for content in WRONG_JSON:
            path.write_text(content)
            assert any(str(path) in problem for problem in names_of_bad_files(paths)), (path, content[:9])
        path.write_bytes(before)
    remake_receipt(paths.hf, inputs={})
    for receipt in (records_of(paths.run), *paths.run.glob("evaluation/*.receipt.json")):
        receipt.unlink()
    for content in WRONG_JSON:  # of earlier versions; and the Hub's list, from which no receipt is made
        for path in (paths.evaluation("after"), paths.node_record("node1"), manifest_of(paths.hf)):
            path.write_text(content)
            assert any(str(path) in problem for problem in names_of_bad_files(paths)), (path, content[:9])


def test_one_flipped_bit_is_found_and_named_by_its_file(paths):
    path = paths.hf_export / "model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    found = problems_of(paths)
    assert list(found) == ["run: hf"]
    assert found["run: hf"][0].startswith(f"{path}: content differs")
    assert problems_of(paths, content=False) == {}


def test_every_bad_file_is_named_at_once(paths):
    (paths.hf / "config.json").unlink()
    with open(paths.torch_dist / "__1_0.bin", "ab") as file:
        file.write(b"!")
    (paths.dataset / "notes.txt").write_text("from nowhere")
    with pytest.raises(CheckpointError) as caught:
        raise_bad_files(verify(paths))
    text = str(caught.value)
    assert f"{paths.hf / 'config.json'}: missing" in text
    assert f"{paths.torch_dist / '__1_0.bin'}: " in text
    assert f"{paths.dataset / 'notes.txt'}: not in the receipt" in text
    assert "(3)" in text


def test_a_step_that_was_made_again_breaks_the_chain_of_what_was_made_from_it(paths):
    remake_receipt(paths.hf, settings={"revision": "another"})
    found = problems_of(paths)
    assert sorted(found) == ["hf_patched"]
    assert "made from hf" in found["hf_patched"][0]


def test_a_changed_receipt_is_refused_by_its_digest(paths):
    path = receipt_of(paths.hf_patched)
    path.write_text(path.read_text().replace('"patch_hf_config"', '"download_hf_checkpoint"'))
    found = problems_of(paths)
    assert "[receipt-changed]" in found["hf_patched"][0]
    assert "torch_dist" in found
    assert "evaluation before" in found


def test_another_training_run_breaks_the_link_to_the_export(paths):
    receipt = read_receipt(paths.train_done)
    write_receipt(paths.train_done, dataclasses.replace(receipt, settings={**receipt.settings, "num_steps": 3}))
    found = problems_of(paths)
    assert list(found) == ["run: hf", "run: records"]
    assert "made from train" in found["run: hf"][0]


def test_a_changed_checkpoint_of_training_is_named(paths):
    path = paths.train / "checkpoints/step_000004/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in problems_of(paths)["train"][0]


def test_another_experiment_than_the_one_trained_is_told(paths):
    paths.experiment.write_text(paths.experiment.read_text().replace("0.0002", "0.0003"))
    (problem,) = problems_of(paths)["train"]
    assert "trained with another experiment" in problem


def test_a_wrong_copy_on_one_node_is_that_nodes_problem(paths):
    target = paths.node_local("node1") / paths.rollout_fp8.name / "metadata.json"
    target.write_bytes(b"x" * target.stat().st_size)
    assert list(problems_of(paths)) == ["node1: rollout_fp8"]


def test_a_node_whose_disk_is_not_here_is_left_out(paths):
    shutil.rmtree(paths.node_local("node0"))
    names = [verdict.artefact.name for verdict in verify(paths)]
    assert "node1: torch_dist" in names
    assert "node0: torch_dist" not in names


def test_finished_parts_of_an_unfinished_folder_are_checked(paths):
    folder = paths.serving
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors").write_bytes(b"abc")
    receipt = Receipt("quantize_serving", record_files(partial), {}, {"part": 0})
    write_receipt(part_receipt_of(folder, 0), receipt)
    assert "serving part 0" in [verdict.artefact.name for verdict in verify(paths)]
    (partial / "model-00001-of-00002.safetensors").write_bytes(b"abd")
    assert list(problems_of(paths)) == ["serving part 0"]


def test_a_folder_that_is_finished_meanwhile_is_looked_at_again(paths, monkeypatch):
    folder, inputs = paths.serving, {"hf_patched": read_receipt(receipt_of(paths.hf_patched)).digest}
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir()
    (partial / "model-00001-of-00001.safetensors").write_bytes(b"abc")
    write_receipt(part_receipt_of(folder, 0), Receipt("quantize_serving", record_files(partial), inputs, {"part": 0}))
    check, looked_at = verification._check_files, []

    def finish(verdicts, content):
        looked_at.append([verdict.artefact.name for verdict in verdicts])
        if partial.exists():
            partial.rename(folder)
            write_receipt(receipt_of(folder), Receipt("finalize_serving", record_files(folder), inputs, {}))
        check(verdicts, content)

    monkeypatch.setattr(verification, "_check_files", finish)
    assert problems_of(paths) == {}
    assert ["serving part 0" in names for names in looked_at] == [True, False]


def test_leftover_parts_beside_a_finished_folder_do_not_count(paths):
    stale = dataclasses.replace(Receipt("convert_hf_to_torch_dist", (), {"hf_patched": "0" * 64}, {"part": 7}))
    write_receipt(part_receipt_of(paths.torch_dist, 7), stale)
    assert problems_of(paths) == {}


def test_a_flipped_bit_in_a_distributed_checkpoint_is_named_by_its_tensor(paths, tmp_path):
    store = make_store(tmp_path / "small")
    make_torch_dist(store)
    shutil.rmtree(paths.torch_dist)
    shutil.copytree(store.folder("torch_dist"), paths.torch_dist)
    remake_receipt(paths.torch_dist, files=record_files(paths.torch_dist))
    assert "torch_dist" not in problems_of(paths)
    path = paths.torch_dist / "__1_0.distcp"
    raw = bytearray(path.read_bytes())
    values = CheckpointReader(store.source).tensor("lm_head.weight").view(torch.uint8).numpy().tobytes()
    raw[raw.index(values)] ^= 1
    path.write_bytes(raw)
    (problem,) = problems_of(paths)["torch_dist"]
    assert problem.startswith(f"{path}: content differs")
    assert problem.endswith(": output_layer.weight")


def test_what_has_no_receipt_is_a_gap_and_not_left_out(paths):
    for path in (receipt_of(paths.hf_patched), receipt_of(paths.rollout_fp8), paths.train_done):
        path.unlink()
    found = problems_of(paths)
    assert all("missing: nothing proves" in found[name][0] for name in ("train", paths.hf_patched.name))
    assert "made from hf_patched" in found["torch_dist"][0]
    store_only = {verdict.artefact.name for verdict in verify(paths, whole_run=False) if verdict.problems}
    parts = {"rollout_fp8 part 0", "rollout_fp8 part 1"}
    assert store_only == {paths.hf_patched.name, paths.rollout_fp8.name, "torch_dist", *parts}


def test_every_link_is_listed_up_to_the_seed(paths):
    links = {verdict.artefact.name: verdict.made_from for verdict in verify(paths)}
    digest = read_receipt(receipt_of(paths.hf_patched)).digest[:12]
    assert links["torch_dist"] == [f"hf_patched {digest} = hf_patched"]
    assert links["made model"] == ["make_tiny_model"]


def test_a_file_with_several_names_is_read_once_and_reported_under_each(paths):
    (paths.hf_patched / "model.bin").unlink()
    (paths.hf_patched / "model.bin").hardlink_to(paths.hf / "model.bin")
    remake_receipt(paths.hf_patched, files=record_files(paths.hf_patched))
    path = paths.hf / "model.bin"
    path.write_bytes(path.read_bytes()[::-1])
    found = problems_of(paths)
    assert f"{path}: content differs" in found["hf"][0]
    assert f"{paths.hf_patched / 'model.bin'}: content differs" in found["hf_patched"][0]
