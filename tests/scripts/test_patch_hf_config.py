import dataclasses
import random
import subprocess
import time
from pathlib import Path

import pytest
from tests.support.checkpoint_store import assert_same_folder, run_here
from tests.support.fault_record import FaultRecord
from tests.support.forked_programs import run_step
from tests.support.killing import run_killed
from tests.support.rejections import rejected
from tests.support.resolved_words import words_with
from tests.support.small_checkpoint import ARCHITECTURE, make_small_checkpoint
from tests.support.tiny_checkpoint import (
    QWEN3_5,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    fuse_experts,
    make_random_checkpoint,
    write_shards,
)

from posttrain.checkpoint.formats.safetensors_io import CheckpointReader
from posttrain.checkpoint.tiny.tokenizer import make_byte_level_tokenizer
from posttrain.config.schema import Patch
from posttrain.store import Receipt, read_json, read_receipt, receipt_of, record_files, require_files, write_receipt


@pytest.fixture
def source(tmp_path):
    folder = make_small_checkpoint(tmp_path / "hf")
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", record_files(folder), {}, {}))
    return folder


def _arguments(source: Path, target: str, destination: Path, **dimensions: int) -> list[object]:
    return [
        "--source",
        source,
        "--source-receipt",
        receipt_of(source),
        "--folder",
        destination,
        "--receipt",
        receipt_of(destination),
        *words_with(dataclasses.replace(ARCHITECTURE, **dimensions), model={"patch": Patch(target)}),
    ]


def _run(arguments) -> subprocess.CompletedProcess:
    return run_step("patch_hf_config", arguments)


@pytest.mark.parametrize("target", ["native", "deepseek_v32"])
def test_patching_survives_kills_and_ends_with_the_same_bytes(source, tmp_path, target):
    before = record_files(source)
    points = random.Random(3).sample(range(1, 40), 8)
    arguments = _arguments(source, target, tmp_path / "patched")
    claim = tmp_path / "patched", receipt_of(tmp_path / "patched")
    endings = run_killed("patch_hf_config", arguments, tmp_path, [*points, 10**9], claim=claim, again=[claim[1]])
    assert endings.count(-9) >= 5
    assert endings[-1] == 0
    receipt = require_files(tmp_path / "patched", receipt_of(tmp_path / "patched"), content=True)
    assert receipt.inputs == {"hf": read_receipt(receipt_of(source)).digest}
    assert sorted(path.name for path in (tmp_path / "patched").iterdir()) == [f.path for f in receipt.files]
    assert record_files(source) == before
    undisturbed = _arguments(source, target, tmp_path / "undisturbed")
    assert run_killed("patch_hf_config", undisturbed, tmp_path, [10**9]) == [0]
    assert read_receipt(receipt_of(tmp_path / "undisturbed")).digest == receipt.digest


@pytest.fixture
def fused(tmp_path):
    """A source in three shards whose experts are stacked, as transformers 5 saves them."""
    folder = tmp_path / "fused"
    tensors = make_random_checkpoint(folder, TINY_QWEN3_MOE)
    write_shards(folder, fuse_experts(tensors, TINY_QWEN3_MOE.n_routed_experts), 3)
    for path in make_small_checkpoint(tmp_path / "small").glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", record_files(folder), {}, {}))
    return folder


@pytest.mark.faults("kills")
def test_a_copy_whose_shards_are_written_again_survives_kills(fused, tmp_path, faults: FaultRecord):
    """Killed at changes that follow the ones before, until it ends; done so often that each change is met."""
    before, rng, started = record_files(fused), random.Random(12), time.monotonic()
    given = ["--source", fused, "--source-receipt", receipt_of(fused), *words_with(TINY_QWEN3_MOE)]
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    run_here("patch_hf_config", [*given, "--folder", calm, "--receipt", receipt_of(calm)])
    arguments = [*given, "--folder", killed, "--receipt", receipt_of(killed)]
    written = {path.name for path in calm.glob("*.safetensors") if not path.samefile(fused / path.name)}
    assert len(written) == 2, "the third is a link"
    points = [*range(1, 61), *(rng.randint(1, 30) for _ in range(60)), 10**9]
    claim = killed, receipt_of(killed)
    endings = run_killed(
        "patch_hf_config", arguments, tmp_path, points, claim=claim, again=[claim[1], killed], timeout=900
    )
    kills = endings.count(-9)
    assert (set(endings), endings[-1]) == ({0, -9}, 0)
    assert kills >= 60
    assert_same_folder(killed, calm)
    assert record_files(fused) == before
    faults.add_counts("kills", {"patch_hf_config, fused experts": kills}, time.monotonic() - started)
    faults.equal = True


def test_all_differences_are_one_message_before_anything_is_written(source, tmp_path):
    done = _run(_arguments(source, "native", tmp_path / "patched", hidden_size=64, index_topk=8))
    assert done.returncode == 1
    for words in (
        "3 problems",
        "config.json: hidden_size = 32",
        "allowed: 64",
        "config.json: index_topk = 4",
        "model.embed_tokens.weight: BF16 [64, 32], expected BF16 [64, 64]",
    ):
        assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "patched").exists()
    assert not (tmp_path / "patched.partial").exists()


def test_a_source_that_lost_a_shard(source, tmp_path):
    (source / "model-00003-of-00003.safetensors").unlink()
    done = _run(_arguments(source, "native", tmp_path / "patched"))
    assert done.returncode == 1
    assert "model-00003-of-00003.safetensors: missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_vision_tower_without_an_image_processor_is_rejected_for_sglang_only(tmp_path):
    arch = QWEN3_5["qwen3_5"]
    folder = tmp_path / "hf"
    make_random_checkpoint(folder, arch)
    make_byte_level_tokenizer(arch.max_position_embeddings).save_pretrained(folder)
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", record_files(folder), {}, {}))
    given = ["--source", folder, "--source-receipt", receipt_of(folder)]

    def patch(destination, engine):
        words = words_with(arch, engine={"kind": engine})
        run_here("patch_hf_config", [*given, "--folder", destination, "--receipt", receipt_of(destination), *words])

    with rejected("image-processor-missing", folder, key="preprocessor_config.json"):
        patch(tmp_path / "patched", "sglang")
    assert not (tmp_path / "patched").exists()
    patch(tmp_path / "embedded", "embedded")
    (folder / "preprocessor_config.json").write_text("{}\n")
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", record_files(folder), {}, {}))
    patch(tmp_path / "patched", "sglang")
    assert (tmp_path / "patched" / "preprocessor_config.json").samefile(folder / "preprocessor_config.json")
    for copy in ("embedded", "patched"):
        text = read_json(tmp_path / copy / "config.json")["text_config"]
        assert (text["full_attention_interval"], text["partial_rotary_factor"]) == (2, 0.5)


@pytest.fixture
def tied(tmp_path):
    """A tied model whose file has another output matrix, in another shard than the embedding."""
    folder = tmp_path / "tied"
    tensors = make_random_checkpoint(folder, TINY_QWEN3)
    write_shards(folder, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, 3)
    for path in make_small_checkpoint(tmp_path / "small").glob("*"):
        if path.name.startswith(("tokenizer", "chat_template")):
            (folder / path.name).write_bytes(path.read_bytes())
    write_receipt(receipt_of(folder), Receipt("download_hf_checkpoint", record_files(folder), {}, {}))
    return folder


def _patch_tied(tied: Path, destination: Path, is_tied: bool, copies: str) -> list[object]:
    arch = dataclasses.replace(TINY_QWEN3, tie_word_embeddings=is_tied)
    words = words_with(arch, model={"patch": Patch("native", copies=copies)})
    given = ["--source", tied, "--source-receipt", receipt_of(tied)]
    return [*given, "--folder", destination, "--receipt", receipt_of(destination), *words]


def test_a_tied_head_that_differs_is_rejected_before_anything_is_written(tied, tmp_path):
    for is_tied in (True, False):
        with rejected("copy-differs", "model.patch.copies=keep", "model.patch.copies=drop"):
            run_here("patch_hf_config", _patch_tied(tied, tmp_path / "patched", is_tied, "reject"))
    assert not (tmp_path / "patched").exists()


@pytest.mark.parametrize(("is_tied", "copies"), [(True, "drop"), (False, "keep")])
def test_each_reading_is_what_transformers_makes_of_the_patched_copy(tied, tmp_path, is_tied, copies):
    from transformers import AutoModelForCausalLM

    run_here("patch_hf_config", _patch_tied(tied, tmp_path / "patched", is_tied, copies))
    require_files(tmp_path / "patched", receipt_of(tmp_path / "patched"), content=True)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", output_loading_info=True)
    assert not any(told.values())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == is_tied
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    assert head.equal(CheckpointReader(tied).tensor(name))
    assert model.config.tie_word_embeddings == is_tied
