"""Predicted bytes against what a trainer holds: weights, gradients, optimizer state, saved
activations, what a save adds; within 5 %."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.measured_rank import case_config
from tests.support.megatron_single import run_ranks

from posttrain.config.derived import stage_chunks
from posttrain.plan.sizing.activations import INT64, MicroBatch, saved_bytes
from posttrain.plan.sizing.memory import BYTES, stage_memory
from posttrain.plan.sizing.memory_phases import save_staging_bytes

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.faults("slow")

NO_RECOMPUTATION = {"recompute_granularity": "none"}
SELECTIVE = {"recompute_granularity": "selective"}
TENSOR = {"tensor_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
CASES: dict[str, dict] = {
    "one_rank": {"ranks": 1},
    "one_rank_all_kept": {"ranks": 1, "trainer": NO_RECOMPUTATION},
    "bf16": {"ranks": 1, "trainer": {"params_dtype": "bf16"}},
    "bf16_all_kept": {"ranks": 1, "trainer": {"params_dtype": "bf16", **NO_RECOMPUTATION}},
    "chunks_of_two_layers": {"ranks": 1, "trainer": {"recompute_num_layers": 2}},
    "one_layer_recomputed": {"ranks": 1, "trainer": {"recompute_method": "block"}},
    "kept_choice": {"ranks": 1, "trainer": {"keep_index_choice": "all"}},
    "kept_choice_of_one_layer": {"ranks": 1, "trainer": {"recompute_method": "block", "keep_index_choice": "all"}},
    "mlps_recomputed": {"ranks": 1, "trainer": {**SELECTIVE, "recompute_modules": ["mlp", "moe"]}},
    "shared_experts_recomputed": {"ranks": 1, "trainer": {**SELECTIVE, "recompute_modules": ["shared_experts"]}},
    "queries_in_chunks": {"ranks": 1, "trainer": {"attention_chunk_tokens": 32, **NO_RECOMPUTATION}},
    "dense_attention": {
        "ranks": 1,
        "trainer": NO_RECOMPUTATION,
        "architecture": {"model_type": "deepseek_v3", "index_n_heads": 0, "index_head_dim": 0, "index_topk": 0},
    },
    "data": {"ranks": 2},
    "tensor": {"ranks": 2, "parallel": {**TENSOR, "expert_tensor_parallel_size": 2}, "trainer": NO_RECOMPUTATION},
    "tensor_and_expert": {"ranks": 2, "parallel": {**TENSOR, **EXPERT}, "trainer": NO_RECOMPUTATION},
    "expert": {"ranks": 2, "parallel": EXPERT, "trainer": NO_RECOMPUTATION},
    "expert_bf16": {"ranks": 2, "parallel": EXPERT, "trainer": {"params_dtype": "bf16"}},
    "pipeline": {"ranks": 2, "parallel": {**PIPELINE, "num_layers_in_last_pipeline_stage": 1}},
    "pipeline_all_kept": {"ranks": 2, "parallel": PIPELINE, "trainer": NO_RECOMPUTATION},
    "tensor_kept_choice": {"ranks": 2, "parallel": {**TENSOR, **EXPERT}, "trainer": {"keep_index_choice": "all"}},
    "tensor_pipeline": {"ranks": 4, "parallel": {**TENSOR, **PIPELINE, **EXPERT}, "trainer": NO_RECOMPUTATION},
    # What the first chunk of each stage keeps.
    "interleaved": {"ranks": 2, "parallel": {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}},
    "expert_data": {"ranks": 4, "parallel": EXPERT},
}
HELD = ("weights", "gradients", "optimizer")


@pytest.fixture(scope="module")
def measured() -> dict[str, list[dict]]:
    """Return, per case, what each rank holds; cases of equally many ranks share their processes."""
    found = {}
    for ranks in sorted({case["ranks"] for case in CASES.values()}):
        names = [name for name, case in CASES.items() if case["ranks"] == ranks]
        request = {"root": str(ROOT), "cases": [CASES[name] for name in names]}
        outputs = run_ranks(ROOT / "tests/support/measured_rank.py", ranks, json.dumps(request))
        by_rank = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
        found |= {name: [rank[place] for rank in by_rank] for place, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_holds(measured, name: str) -> None:
    stages = stage_memory(case_config(CASES[name]))
    for rank in measured[name]:
        stage = stages[rank["stage"]]
        for part in HELD:
            predicted = getattr(stage, f"{part}_bytes")
            assert predicted == pytest.approx(rank[part], rel=0.05), (part, rank["stage"])


@pytest.mark.parametrize("name", CASES)
def test_what_a_save_adds(measured, name: str) -> None:
    """The fullest rank of a stage; where a weight lies in its buffer decides which rank that is."""
    config = case_config(CASES[name])
    for stage in stage_memory(config):
        found = max(rank["save_staging"] for rank in measured[name] if rank["stage"] == stage.stage)
        assert save_staging_bytes(config, stage) == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("name", CASES)
def test_what_a_micro_batch_keeps(measured, name: str) -> None:
    """Summed over ranks: which of them the router favours is not predicted, how many rows there are is.

    The plan takes all tokens for those of responses, which alone have a row in the loss; here near half are prompts'.
    """
    config = case_config(CASES[name])
    stages = stage_chunks(config)
    predicted = 0
    for rank in measured[name]:
        layers = stages[rank["stage"]][0]
        predicted += saved_bytes(config, layers, MicroBatch(**rank["batch"]))
        if layers is stages[-1][-1]:
            row = BYTES[config.trainer.params_dtype].weight * config.model.architecture.hidden_size + INT64
            predicted -= rank["prompt_tokens"] * row
    assert predicted == pytest.approx(sum(rank["activations"] for rank in measured[name]), rel=0.05)
