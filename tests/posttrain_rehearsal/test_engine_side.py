"""What SGLang itself says of the engines' command lines and of an update, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.requirements import require

from posttrain.checkpoint.formats.as_transformers import hub_config
from posttrain.checkpoint.formats.hf_config import check_config, fixed_values
from posttrain.checkpoint.formats.safetensors_io import TensorSpec
from posttrain.config.load import Resolved
from posttrain.plan.flags.sglang_flags import sglang_flags
from posttrain_rehearsal.engine_side import (
    VARIABLE,
    find_engine_problems,
    home,
    rehearse_engines,
    sent_tensors,
)
from posttrain_rehearsal.outcome import outcome, render
from posttrain_rehearsal.rank_subset import shallow
from posttrain_rehearsal.traces import Trace

Resolve = Callable[..., Resolved]
MODELS = ("glm5", "glm5.2", "deepseek_v3", "deepseek_v3.2", "moonlight", "glm4.5_air", "qwen3_4b", "qwen3_30b_a3b")
WELL = {
    **{"model": "M", "parameters": 9, "sent": 9, "elsewhere": 0, "drafted": 0, "spared": 0, "failed": None},
    **{kind: [] for kind in ("unknown", "never", "partly", "twice", "odd", "derived")},
}


def row_of(refused: str = "", **ranks: Any) -> dict[str, Any]:
    changed = [["--chunked-prefill-size", "chunked_prefill_size", "16384", "2048"]]
    numbered = {name.removeprefix("rank"): told for name, told in ranks.items()}
    return {"role": "unified", "world_size": 8, "refused": refused, "changed": changed, "ranks": numbered}


def told(row: dict[str, Any], resolve: Resolve) -> list[tuple[str, str]]:
    problems = find_engine_problems(row, sglang_flags(resolve("glm5_4layer").config))
    return [(problem.key, problem.value) for problem in problems]


def test_an_update_that_arrives_has_no_problem(resolved: Resolve) -> None:
    assert told(row_of(rank0=WELL, rank7=WELL), resolved) == []


def test_a_refusal_names_the_keys_of_the_flag(resolved: Resolve) -> None:
    words = "sglang serve: error: argument --moe-a2a-backend: invalid choice: 'x'"
    assert told(row_of(words), resolved) == [
        ("engine.deepep, rollout.fp8, hardware.name", f"SGLang refuses: {words}"),
    ]
    assert told(row_of("attn_dp_size does not divide it"), resolved)[0][0] == (
        "engine.gpus_per_engine, engine.dp_attention"
    )
    assert told(row_of("no"), resolved)[0][0] == "engine (unified)"


def test_ranks_that_miss_the_same_are_told_together(resolved: Resolve) -> None:
    bad = WELL | {"unknown": [f"w{i}" for i in range(7)], "never": ["v"]}
    assert told(row_of(rank0=bad, rank7=bad, rank3=WELL), resolved) == [
        ("weight transfer (unified, rank 0, 7)", "is sent and not loaded: w0, w1, w2, w3, w4 and 2 more"),
        ("weight transfer (unified, rank 0, 7)", "is never loaded: v"),
    ]


def test_a_class_that_cannot_be_built_here_is_no_problem_and_one_that_is_refused_is(resolved: Resolve) -> None:
    failed = {"kind": "AssertionError", "message": "64 % 7", "where": "sglang/x.py:1"}
    assert told(row_of(rank0={"not_built": failed | {"is_refused": False}}), resolved) == []
    refused = told(row_of(rank0={"not_built": failed | {"is_refused": True}}), resolved)
    assert refused == [("weight transfer (unified, rank 0)", "AssertionError: 64 % 7")]


@pytest.mark.parametrize("model", MODELS)
def test_its_config_is_one_that_the_check_of_checkpoints_takes(resolved: Resolve, model: str) -> None:
    arch = resolved(model).config.model.architecture
    problems = check_config(hub_config(arch, fixed_values(arch)), arch, {})
    assert [problem for problem in problems if problem.key.startswith("config.json")] == []


def test_codes_are_sent_with_their_scales_and_mtp_layers_to_those_who_draft(resolved: Resolve) -> None:
    config = resolved("glm5_4layer").config
    sent = dict(sent_tensors(config))
    assert sent["model.layers.0.mlp.down_proj.weight"].dtype == "F8_E4M3"
    assert sent["model.layers.0.mlp.down_proj.weight_scale_inv"] == TensorSpec((48, 96), "F32")
    assert not any(name.startswith("model.layers.4.") for name in sent)
    drafting = shallow(resolved("glm5", nodes=32).config)
    assert (drafting.engine.mtp_steps, drafting.model.architecture.num_hidden_layers) == (3, 16)
    assert any(name.startswith("model.layers.16.") for name, _ in sent_tensors(drafting))


def test_without_its_environment_the_page_says_how_to_make_it(
    resolved: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere")
    found = resolved("glm5")
    side = rehearse_engines(found.config)
    assert side["problems"] == []
    page = _page(found, side)
    assert "Not rehearsed: `make env-sglang`" in page


def test_the_page_shows_what_was_asked_and_what_not_built(resolved: Resolve) -> None:
    failed = {"kind": "ImportError", "message": "no <driver>", "where": "sglang/x.py:1", "is_refused": False}
    rows = [row_of(rank0=WELL, rank7={"not_built": failed})]
    page = _page(resolved("glm5"), {"not_rehearsed": "", "engines": rows, "problems": [], "seconds": 9.0})
    assert "--chunked-prefill-size" in page
    assert "no &lt;driver&gt;" in page


def _page(found: Resolved, side: dict[str, Any]) -> str:
    work = {"peak": 0, "host_peak": 0, "flops": 0, "moved": 0, "kernels": 0, "waits": {}, "holders": []}
    trace = Trace(0, 1.0, None, [{"name": "train", "step": 1, **work}], [], [])
    return render(outcome(found, found.config, [trace], 1.0) | {"engine_side": side}, "GLM-5")


# ---- with SGLang itself ----


@pytest.fixture(scope="module")
def faults() -> Callable[..., list[dict[str, Any]]]:
    """Return the problems of a model's engines with what is changed."""
    require("sglang", "" if home() else "make env-sglang was not run")

    def find(config: Any, **changed: Any) -> list[dict[str, Any]]:
        side = rehearse_engines(config, changed)
        assert side["engines"]
        loaded = [told for row in side["engines"] for told in row["ranks"].values()]
        assert not any("not_built" in told for told in loaded), loaded
        return side["problems"]

    return find


WHOLE_PROOF = pytest.mark.faults("rehearsal")


# Over ten seconds: SGLang is imported on devices that are said to be there, as in the next test.
@pytest.mark.sglang
@pytest.mark.parametrize("model", [pytest.param("qwen3_4b", marks=WHOLE_PROOF), "glm5_4layer"])
def test_sglang_takes_every_tensor_once(resolved: Resolve, faults: Any, model: str) -> None:
    assert faults(resolved(model).config) == []


@WHOLE_PROOF
@pytest.mark.sglang
def test_sglang_tells_what_is_renamed_missing_misshapen_and_doubled(resolved: Resolve, faults: Any) -> None:
    config = resolved("glm5_4layer").config
    sent = dict(sent_tensors(config))
    gate, norm = "model.layers.3.mlp.gate.weight", "model.layers.1.input_layernorm.weight"
    renamed = "model.layers.3.mlp.experts.200.up.weight"
    sent[renamed] = sent.pop("model.layers.3.mlp.experts.200.up_proj.weight")
    sent["model.layers.3.mlp.experts.200.up.weight_scale_inv"] = sent.pop(
        "model.layers.3.mlp.experts.200.up_proj.weight_scale_inv"
    )
    del sent[gate]
    values = [problem["value"] for problem in faults(config, sent=[*sent.items(), (norm, sent[norm])])]
    assert any(value.startswith("is sent and not loaded: ") and renamed in value for value in values), values
    assert f"is never loaded: {gate}" in values
    assert f"is loaded more than once: {norm} by {norm}" in values
    sent[norm] = TensorSpec((5,), "BF16")
    shapes = [problem["value"] for problem in faults(config, sent=[*sent.items()])]
    assert any(value.startswith(f"{norm}: ") for value in shapes), shapes


@pytest.mark.sglang
def test_sglang_refuses_a_flag_that_it_does_not_know(resolved: Resolve) -> None:
    require("sglang", "" if home() else "make env-sglang was not run")
    side = rehearse_engines(resolved("qwen3_4b").config, {"argv": ["--no-such-flag"]})
    assert "unrecognized arguments: --no-such-flag" in side["problems"][0]["value"]
