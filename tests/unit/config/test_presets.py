"""`algorithm.preset`, the table of presets in the configuration and in the docs, and the names of older experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.load import merge, read_yaml
from posttrain.config.presets import ratios_in_words
from posttrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
CONFIG_DIR = ROOT / "config"
PRESETS = read_yaml(CONFIG_DIR / "algorithms.yaml")
# What version 0.1 called these runs, printed by its `resolve`; but for GLM-4.5-Air, whose dense layer keeps its
# precision since no engine took it in FP8.
NAMES = {
    "glm4.5_air": "glm4.5_air-2aefd277",
    "glm5.1": "glm5.1-06346fae",
    "glm5": "glm5-62e2cddc",
    "glm5_20layer": "glm5_20layer-0fc5bb4c",
    "glm5_4layer": "glm5_4layer-1e660218",
    "qwen3_30b_a3b": "qwen3_30b_a3b-a97c1e6a",
    "qwen3_4b": "qwen3_4b-8bf5fed2",
    "tiny": "tiny-508c9f64",
}
DR_GRPO = "tiny-ff68398a"


def resolved(words: str = "", model: str = "tiny"):
    return merge({"model": model, "site": "local", "set": words}, CONFIG_DIR)


def problem_of(words: str):
    with pytest.raises(ConfigError) as caught:
        resolved(words)
    (problem,) = caught.value.problems
    return problem


def table() -> dict[str, dict[str, str]]:
    """Return preset -> {column: cell} of the page."""
    lines = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    columns = [cell.strip("`") for cell in rows[0]]
    found = {}
    for row in rows[2:]:
        if len(row) != len(columns):
            break
        found[row[0].strip("`")] = dict(zip(columns[1:], row[1:], strict=True))
    return found


def test_the_page_has_the_table_of_the_configuration() -> None:
    page = table()
    assert list(page) == list(PRESETS)
    for name, parts in PRESETS.items():
        told = " ".join(page[name].values())
        for key, value in parts.items():
            if key in page[name]:
                assert page[name][key].startswith(f"`{value}`"), (name, key)
            elif key == "normalize_by_std":
                assert ("`normalize_by_std: false`" in told) is not value
            else:
                assert f"`{key}: {value}`" in told, (name, key)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_beneath_what_is_set(name: str) -> None:
    chosen = resolved(f"algorithm.preset={name}")
    for key, value in PRESETS[name].items():
        assert getattr(chosen.config.algorithm, key) == value
        assert chosen.origins[f"algorithm.{key}"] == f"config/algorithms.yaml: {name}"
    other = resolved(f"algorithm.loss_aggregation=token_mean algorithm.preset={name}")
    assert other.config.algorithm.loss_aggregation == "token_mean"
    assert other.origins["algorithm.loss_aggregation"] == "set="


def test_what_no_part_uses_and_what_no_line_is_called_are_refused() -> None:
    unused = problem_of("algorithm.correction_level=token")
    assert unused.key == "algorithm.correction_level"
    assert "algorithm.correction=none" in unused.allowed
    unknown = problem_of("algorithm.preset=dapoo")
    assert unknown.remedy == "did you mean 'dapo'?"
    for name in PRESETS:
        assert name in unknown.allowed


@pytest.mark.parametrize(
    ("words", "key", "allowed"),
    [
        ("algorithm.preset=tis algorithm.old_logprobs=engine", "algorithm.correction", "ratio itself compares"),
        ("algorithm.preset=mis algorithm.correction_low=2", "algorithm.correction_low", "correction_high=2.0"),
        ("algorithm.preset=dual_clip algorithm.clip_ratio_dual=1.28", "algorithm.clip_ratio_dual", "1.28"),
        ("algorithm.kl_coef=0", "algorithm.kl_coef", "a key of this version"),
        ("rollout.top_p=0.9", "rollout.top_p", "a key of this version"),
    ],
)
def test_what_could_not_work_or_is_gone_is_refused(words: str, key: str, allowed: str) -> None:
    problem = problem_of(words)
    assert problem.key == key
    assert allowed in problem.allowed
    assert "did you mean" not in problem.remedy


def test_what_an_algorithm_is_called() -> None:
    assert resolved().algorithm == "grpo"
    assert resolved("algorithm.clip_ratio_high=0.3").algorithm == "grpo", "a number is no part"
    by_hand = "algorithm.normalize_by_std=false algorithm.loss_aggregation=constant"
    assert resolved(by_hand).algorithm == "dr_grpo"
    own = "grpo with loss_aggregation=constant: no published combination"
    assert resolved("algorithm.loss_aggregation=constant").algorithm == own


@pytest.mark.parametrize("model", NAMES)
def test_experiments_of_the_first_version_keep_their_names(model: str) -> None:
    assert resolved("algorithm.zero_advantages=update", model).run == NAMES[model]
    assert resolved(model=model).run != NAMES[model], "an update without signal moves no weight any more"


def test_an_experiment_is_named_by_its_parts_however_they_were_chosen() -> None:
    by_hand = "algorithm.normalize_by_std=false algorithm.loss_aggregation=constant"
    assert resolved(by_hand).run == resolved("algorithm.preset=dr_grpo").run
    assert resolved(f"{by_hand} algorithm.zero_advantages=update").run == DR_GRPO


BEFORE = "trainer now / trainer before the step, per token"
OUTER = {
    "tis": "per token, truncated at 2",
    "icepop": "per token, 0 outside of 0.5 to 5",
    "mis": "per sequence, 0 above 2",
}
LEVELS = {
    "gspo": "per sequence, geometric mean of its tokens",
    "rloo": "per sequence",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_ratios_of_a_run_whose_engines_run_ahead(preset: str) -> None:
    """A preset with a correction has two ratios; the others compare with the sampler."""
    words = f"rollout.max_staleness=1 algorithm.preset={preset}"
    if preset in OUTER:
        told = {"clipped ratio": BEFORE, "outer ratio": f"trainer before the step / sampler, {OUTER[preset]}"}
    else:
        words += " algorithm.old_logprobs=engine"
        told = {"clipped ratio": f"trainer now / sampler, {LEVELS.get(preset, 'per token')}", "outer ratio": "none"}
    assert ratios_in_words(resolved(words).config) == told


def test_ratios_of_changed_parts() -> None:
    changed = "rollout.max_staleness=1 algorithm.preset=tis algorithm.correction_high=3 algorithm.correction_level="
    told = ratios_in_words(resolved(f"{changed}geometric").config)["outer ratio"]
    assert told == "trainer before the step / sampler, per sequence, geometric mean of its tokens, truncated at 3"


def test_a_synchronous_run_has_no_such_ratios() -> None:
    assert ratios_in_words(resolved("algorithm.preset=tis").config) == {}
