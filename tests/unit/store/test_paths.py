import pytest

from posttrain.config.load import digest8
from posttrain.store import Paths, receipt_of
from posttrain.store.durable import write_json

SHARDED = "engine.kind=sglang engine.python=/p rollout.fp8=true"
EMPTY, LOADED = SHARDED, f"{SHARDED} engine.weight_transport=tensor"


@pytest.fixture
def paths(resolved, tmp_path):
    """Return the paths of a run whose engines begin empty, or read a checkpoint."""
    roots = f"site.store={tmp_path}/store site.results={tmp_path}/results"
    return lambda words: Paths(resolved("tiny", run="one", set=f"{roots} {words}"))


def begin(paths, folder):
    write_json(paths.begun_from, {"torch_dist-1": "0" * 64, folder.name: "1" * 64, "dataset": "2" * 64})


def test_engines_begin_with_weights_or_with_what_they_need_without_any(paths, resolved):
    empty, loaded = paths(EMPTY), paths(LOADED)
    assert empty.rollout_weights == empty.rollout_start
    assert loaded.rollout_weights == loaded.rollout_fp8 == empty.rollout_fp8
    for words in (EMPTY, LOADED):
        source = paths(words.replace("fp8=true", "fp8=false"))
        assert source.rollout_weights == source.hf_patched
    plain, drafting = (Paths(resolved("glm5", set=f"engine.mtp_steps={steps}")) for steps in (0, 2))
    assert drafting.rollout_fp8 == plain.rollout_fp8
    assert drafting.rollout_weights != plain.rollout_weights


def test_a_run_keeps_fp8_weights_that_it_began_with(paths):
    """One of an older version, or whose engines did not sleep; what has no weights is not enough for the other way."""
    empty, loaded = paths(EMPTY), paths(LOADED)
    begin(empty, empty.rollout_fp8)
    assert empty.rollout_weights == empty.rollout_fp8
    begin(empty, empty.rollout_start)
    assert empty.rollout_weights == empty.rollout_start
    assert loaded.rollout_weights == loaded.rollout_fp8


def test_a_trained_run_keeps_what_it_had(paths):
    """Snakemake would train it again: its inputs would have changed."""
    empty, loaded = paths(EMPTY), paths(LOADED)
    begin(empty, empty.rollout_start)
    write_json(empty.train_done, {})
    assert loaded.rollout_weights == loaded.rollout_fp8, "there is no receipt, and what makes it may be gone"
    write_json(receipt_of(empty.rollout_start), {})
    assert loaded.rollout_weights == empty.rollout_start
    older = empty.rollout_start.with_name("rollout_start-older")
    write_json(receipt_of(older), {})
    begin(empty, older)
    assert loaded.rollout_weights == loaded.rollout_fp8, "what another format has made is made again"
    for damaged in ("[", "null", "[1]", "{}"):
        empty.begun_from.write_text(damaged)
        assert loaded.rollout_weights == loaded.rollout_fp8


def test_only_patched_copies_with_a_vision_tower_got_another_name(resolved):
    """Theirs got keys that SGLang reads; another name converts a model anew."""
    names = {model: Paths(resolved(model)).hf_patched.name for model in ("tiny", "qwen3.5_4b")}
    digests = [digest8({"format": version, "patch": {"target": "native"}}) for version in (1, 2)]
    assert names == {"tiny": f"hf_patched-{digests[0]}", "qwen3.5_4b": f"hf_patched-{digests[1]}"}
