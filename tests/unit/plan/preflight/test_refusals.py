from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pytest
from tests.support.published_layout import PUBLISHED_LAYOUT
from tests.support.rejections import rejected

from posttrain.config.rules import check_trainable
from posttrain.plan.preflight.refusals import _changes, find_refusals, nearest_request, refusal
from posttrain.plan.problems import find_problems
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[4] / "config"
EVERYTHING = {"list_hf_checkpoint", "resolve_config", "train", "evaluate", "render_report"}
SLURM = "example_slurm"
SMALL = f"{PUBLISHED_LAYOUT} hardware.memory_gib_per_gpu=126 rollout.max_prompt_tokens=16000"


def keys_of(rules: set[str], **workflow: str | int) -> list[str]:
    return [problem.key for problem in find_refusals(resolve(workflow, CONFIG_DIR).config, rules)]


def nearest(**workflow: str | int) -> str:
    return nearest_request(workflow, CONFIG_DIR, resolve(workflow, CONFIG_DIR).config)


def test_nothing_is_refused_of_what_runs() -> None:
    assert keys_of(EVERYTHING, model="tiny", site="local") == []
    assert nearest(model="tiny", site="local") == ""
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    assert refusal({"model": "tiny", "site": "local"}, CONFIG_DIR, config, EVERYTHING) == ""


def sorted_text(value: Collection[str]) -> str:
    """Return the same name of a test in every process."""
    return "-".join(sorted(value)) or "nothing"


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"list_hf_checkpoint"}, ["model.source.revision"]),
        ({"train"}, ["model.source.revision", "nodes"]),
        ({"resolve_config"}, ["model.source.revision", "nodes"]),
        ({"evaluate"}, []),
        ({"plan", "status", "finalize_torch_dist"}, []),
    ],
    ids=sorted_text,
)
def test_each_rule_is_refused_for_what_it_lacks_itself(rules: set[str], expected: list[str]) -> None:
    """A pruned GLM-5 that nobody has published: one node can serve it, and one machine is too few to train it."""
    assert keys_of(rules, model="glm5_20layer", site="local") == expected


def test_a_problem_of_two_rules_is_told_once() -> None:
    found = keys_of(EVERYTHING, model="glm5_20layer", site="local")
    assert found == ["model.source.revision", "nodes"]


def test_an_evaluation_that_needs_more_than_one_node_says_how_many() -> None:
    """On one machine; a cluster has them."""
    asked = {"model": "glm5", "site": "local", "set": "evaluation.precision=source"}
    config = resolve(asked, CONFIG_DIR).config
    (found,) = find_refusals(config, {"evaluate"})
    assert (found.key, found.value) == ("evaluate", "2 nodes of 8 h200 hold the model")
    assert found.code == "one-machine"
    assert "evaluation.precision=fp8" in found.remedy
    for change in ({"set": ""}, {"site": SLURM}, {"site": SLURM, "set": "", "hardware": "h100"}):
        assert find_refusals(resolve({**asked, **change}, CONFIG_DIR).config, {"evaluate"}) == []
    (found_too,) = find_refusals(resolve({**asked, "set": "", "hardware": "h100"}, CONFIG_DIR).config, {"evaluate"})
    assert "evaluation.precision=fp8" not in found_too.remedy, "FP8 takes two, too"
    assert "finalize_export_hf" in found_too.remedy
    assert find_refusals(config, {"benchmark_serving"}) == [found]
    assert find_refusals(config, {"plan", "finalize_export_hf"}) == []


def test_each_precision_is_compared_on_the_nodes_that_hold_it() -> None:
    asked = {"model": "glm5", "site": SLURM}
    assert find_refusals(resolve(asked, CONFIG_DIR).config, {"ask_precision", "compare_precisions"}) == []
    here = resolve({**asked, "site": "local"}, CONFIG_DIR).config
    (found,) = find_refusals(here, {"ask_precision", "compare_precisions"})
    assert found.key == "compare_precisions: original", "FP8 takes one node"
    assert found.value.startswith("2 nodes of 8 h200")
    in_four_bits = resolve({"model": "glm4.5_air", "site": SLURM, "set": "serving.weights=trained"}, CONFIG_DIR).config
    (found,) = find_refusals(in_four_bits, {"compare_precisions"})
    assert found.value == "sglang with nvfp4 weights"


def test_what_no_number_of_nodes_holds_is_not_evaluated() -> None:
    asked = {"model": "glm5", "site": SLURM, "set": "engine.mem_fraction_static=0.1"}
    (found,) = find_refusals(resolve(asked, CONFIG_DIR).config, {"evaluate"})
    assert found.value.startswith("more than 64 nodes of 8 h200")
    assert found.code == "evaluation-exceeds-nodes"


def test_engines_of_others_need_their_secret_and_no_room_here(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"model": "glm5", "site": "local", "set": "evaluation.precision=source evaluation.addresses=[gpu7:30000]"}
    config = resolve(asked, CONFIG_DIR).config
    monkeypatch.delenv("POSTTRAIN_ENGINE_SECRET", raising=False)
    assert [problem.key for problem in find_refusals(config, {"evaluate"})] == ["POSTTRAIN_ENGINE_SECRET"]
    assert find_refusals(config, {"finalize_export_hf"}) == []
    monkeypatch.setenv("POSTTRAIN_ENGINE_SECRET", "known to both")
    assert find_refusals(config, {"evaluate", "benchmark_serving"}) == []


def test_what_the_hardware_rules_out_is_told_with_training() -> None:
    """A target asked for beside the plan passes the Snakefile; it must not train what does not fit."""
    assert keys_of({"train"}, model="tiny", site="local", set="hardware.memory_gib_per_gpu=0.1") == ["parallel"]


def test_a_missing_key_of_wandb_is_told_before_the_first_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    online = "logging.wandb_mode=online"
    assert keys_of({"train"}, model="tiny", site="local", set=online) == ["logging.wandb_mode"]
    assert keys_of({"evaluate"}, model="tiny", site="local", set=online) == []


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [
        ({"model": "glm5", "site": SLURM}, ""),
        # What the user has set stays, but what has to be less: activations of a row as long do not fit.
        (
            {
                "model": "glm5",
                "site": SLURM,
                "set": f"{SMALL} rollout.max_response_tokens=32000",
            },
            f"set='{SMALL} rollout.max_response_tokens=16000'",
        ),
        ({"model": "glm5_4layer", "site": "local"}, "set='model.source.revision=COMMIT'"),
        (
            {"model": "glm5_20layer", "site": "local"},
            "site=NAME, of a site with launcher slurm or kubernetes, and set='model.source.revision=COMMIT'",
        ),
    ],
    ids=str,
)
def test_the_nearest_that_can_be_trained(workflow: dict[str, str], expected: str) -> None:
    assert nearest(**workflow) == expected


def test_the_nearest_can_be_trained() -> None:
    """Whoever types it is not refused again."""
    words = nearest(model="glm5", site=SLURM, set=f"{SMALL} rollout.max_response_tokens=32000")
    config = resolve({"model": "glm5", "site": SLURM, "set": words.removeprefix("set='")[:-1]}, CONFIG_DIR).config
    assert [*check_trainable(config), *find_problems(config)] == []


def test_where_only_the_evaluation_or_a_key_is_wrong_no_other_training_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "POSTTRAIN_ENGINE_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for workflow in (
        {"model": "glm5", "site": SLURM, "set": "evaluation.addresses=[gpu7:30000]"},
        {"model": "tiny", "site": "local", "set": "logging.wandb_mode=online"},
    ):
        words = refusal(workflow, CONFIG_DIR, resolve(workflow, CONFIG_DIR).config, EVERYTHING)
        assert words.startswith("this version cannot run what is asked for:")
        assert "nearest" not in words


def test_two_nodes_need_a_site_that_has_them() -> None:
    words = nearest(model="glm5_4layer", site="local", nodes=2, set="engine.pd.num_prefill_engines=0")
    assert words.startswith("site=NAME, of a site with launcher slurm or kubernetes")


def test_where_nothing_near_can_be_trained_nothing_is_said() -> None:
    assert nearest(model="tiny", site="local", set="hardware.memory_gib_per_gpu=0.001") == ""


@pytest.mark.parametrize(
    ("longest", "tried"),
    [(8192, [None, 4096, 2048, 1024]), (2048, [None, 1024]), (2047, [None]), (6000, [None, 3000, 1500])],
)
def test_what_is_changed_least_is_tried_first(longest: int, tried: list[int | None]) -> None:
    config = resolve({"model": "tiny", "site": "local"}, CONFIG_DIR).config
    rollout = dataclasses.replace(config.rollout, max_response_tokens=longest)
    changes = list(_changes(dataclasses.replace(config, rollout=rollout)))
    assert [change.get("rollout.max_response_tokens") for change in changes] == tried


def test_the_words_have_problems_first_and_the_nearest_last() -> None:
    workflow = {"model": "glm5_4layer", "site": "local"}
    words = refusal(workflow, CONFIG_DIR, resolve(workflow, CONFIG_DIR).config, EVERYTHING).splitlines()
    assert words[0] == "this version cannot run what is asked for:"
    assert words[1] == "  - model.source.revision = unpinned [revision-not-pinned]"
    assert words[-2] == "  nearest that it can train: set='model.source.revision=COMMIT'"
    assert words[-1].startswith("`snakemake plan`")


def test_a_benchmark_asks_for_no_more_than_the_model_has_positions() -> None:
    asked = {"model": "tiny", "site": "local", "set": "evaluation.serving.input_tokens=241"}
    config = resolve(asked, CONFIG_DIR).config
    (found,) = find_refusals(config, {"benchmark_serving"})
    assert (found.value, found.allowed) == ("257", "at most 256, the positions of the model")
    assert find_refusals(config, {"evaluate"}) == []
    asked["set"] = "evaluation.serving.input_tokens=240"
    assert find_refusals(resolve(asked, CONFIG_DIR).config, {"benchmark_serving"}) == []


@pytest.mark.parametrize("rows", ["[]", "[0]", "[1,1]", "[many]"])
def test_a_benchmark_has_rows(rows: str) -> None:
    with rejected("not-concurrencies", key="evaluation.serving.concurrency"):
        resolve({"model": "tiny", "site": "local", "set": f"evaluation.serving.concurrency={rows}"}, CONFIG_DIR)
