import json
import os
from pathlib import Path

import pytest
from tests.support.engines_of_others import SECRET, engines_of_others
from tests.support.evaluation_inputs import NUM_PROMPTS, make_inputs
from tests.support.folders_in_parts import make_folder
from tests.support.forked_programs import run_step
from tests.support.rejections import assert_rejected

from posttrain.checkpoint.parts.converted_folder import RecodedFolder
from posttrain.checkpoint.quantization.quantize import Quantization
from posttrain.checkpoint.reference_logprobs import ReferenceLogprobs, ReferencePrompt, write_reference_logprobs
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain.store import Receipt, read_receipt, receipt_of, record_files, write_receipt
from posttrain.store.resolved_file import read_resolved

# 20 prompts x 3 samples in requests of 16 samples: batches that cut through the samples of a prompt.
OVERRIDES = (
    "evaluation.num_samples_per_prompt=3 engine.groups_per_request=1 rollout.max_response_tokens=6 engine.num_threads=1"
)


def run(arguments, folder, when, **environment):
    output = folder / "evaluation" / f"{when}.json"
    more = ["--dataset-receipt", receipt_of(folder / "dataset"), "--when", when, "--output", output]
    return run_step("evaluate", [*arguments, *more], **environment), output


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return folder, make_inputs(folder, OVERRIDES)


@pytest.fixture(scope="module")
def results(inputs):
    """The same checkpoint, measured twice."""
    folder, arguments = inputs
    found = []
    for when in ("before", "after"):
        ended, output = run(arguments, folder, when)
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(output.read_text()))
    return found


def test_the_result_counts_every_response(inputs, results):
    folder, _ = inputs
    before, _ = results
    assert (before["num_prompts"], before["num_samples"], before["num_responses"]) == (NUM_PROMPTS, 3, 60)
    assert 0 <= before["pass_rate"] <= before["pass_at_k"] <= 1
    assert 0 < before["response_tokens_mean"] <= before["response_tokens_max"] <= 6
    assert before["truncated_fraction"] > 0
    assert before["tokens_per_second"] > 0
    assert before["inputs"]["checkpoint"] == read_receipt(receipt_of(folder / "hf")).digest
    first = before["examples"][0]
    row = json.loads((folder / "dataset" / "heldout.jsonl").read_text().splitlines()[0])
    assert len(before["examples"]) == 20
    assert first["label"] == row["label"]
    assert row["prompt"][-1]["content"] in first["prompt"]
    assert first["reward"] in (0.0, 1.0)


def test_the_same_checkpoint_gives_the_same_result_but_for_timings(results):
    before, after = results
    for result in (before, after):
        del result["tokens_per_second"], result["when"]
    assert before == after
    texts = [example["response"] for example in before["examples"]]
    assert len(set(texts)) > len(texts) / 2


def test_engines_of_somebody_else_load_what_is_measured(tmp_path, inputs, results):
    """They have other weights before; without their secret they are not asked."""
    config = read_resolved(Path(str(inputs[1][1]))).config
    with engines_of_others(config, tmp_path, count=1) as engines:
        address = engines[0].url.removeprefix("http://")
        arguments = make_inputs(tmp_path, f"{OVERRIDES} evaluation.addresses=[{address}]")
        ended, output = run(arguments, tmp_path, "before", **{SECRET_VARIABLE: "another"})
        assert "obeys somebody else" in ended.stderr
        assert not output.exists()
        ended, output = run(arguments, tmp_path, "before", **{SECRET_VARIABLE: SECRET})
        assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "evaluation" / "before.engines").exists(), "none was started"
    measured = [json.loads(output.read_text()), {**results[0]}]
    for result in measured:
        result.pop("tokens_per_second", None), result.pop("when", None)
    assert measured[0] == measured[1]


def test_the_engines_log_is_kept(inputs, results):
    folder, _ = inputs
    assert "ready on" in (folder / "evaluation" / "before.engines" / "engine0.log").read_text()


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("config.json", lambda path: path.write_text("{}"), "config.json: 2 bytes, expected"),
        ("*.safetensors", flip_a_bit, "safetensors: content differs from its receipt"),
    ],
)
def test_a_checkpoint_that_is_not_as_its_receipt_says_is_refused(tmp_path, file, damage, said):
    arguments = make_inputs(tmp_path, OVERRIDES)
    damage(next((tmp_path / "hf").glob(file)))
    ended, output = run(arguments, tmp_path, "before")
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert said in ended.stderr
    assert not output.exists()


def made_anew(checkpoint):
    """Let its receipt say what lies there now."""
    write_receipt(receipt_of(checkpoint), Receipt("patch_hf_config", record_files(checkpoint), {}, {}))


def test_engines_that_serve_something_else_are_refused(tmp_path):
    arguments = make_inputs(tmp_path, OVERRIDES)
    nobodys = ReferencePrompt([{"role": "user", "content": "1"}], None, [5, 6, 7], [8, 9], [-0.01, -0.01])
    write_reference_logprobs(tmp_path / "hf", ReferenceLogprobs("fp32", {}, [nobodys]))
    made_anew(tmp_path / "hf")
    ended, output = run(arguments, tmp_path, "after")
    assert ended.returncode == 1
    assert_rejected(ended.stderr, "logprobs-differ", "2 tokens")
    assert "http://127.0.0.1:" in ended.stderr
    assert not output.exists()


@pytest.mark.parametrize(("whose", "said"), [("ours", " bytes, expected "), ("another's", "truncated: ")])
def test_a_truncated_shard_in_four_bits_is_refused(tmp_path, whose, said):
    """By its receipt; one that came so, with its receipt, by the engine."""
    arguments, checkpoint = make_inputs(tmp_path, OVERRIDES), tmp_path / "hf"
    source = checkpoint.rename(tmp_path / "source")
    make_folder(RecodedFolder(Quantization(source, {"format": "nvfp4"}), "s1"), checkpoint)
    made_anew(checkpoint)
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - 8)
    if whose == "another's":
        made_anew(checkpoint)
    ended, output = run(arguments, tmp_path, "after")
    assert ended.returncode == 1
    assert f"{shard}: " in ended.stderr
    assert said in ended.stderr
    assert "remedy" in ended.stderr
    assert not output.exists()
