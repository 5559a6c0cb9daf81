"""Two ranks compute what one rank computes: tensor, expert, pipeline, context and data parallelism over gloo."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from tests.support.megatron_layouts import STRATEGIES
from tests.support.megatron_single import run_gangs

from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader

LAYOUTS = {
    "one_rank": {},
    "tensor": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "tensor_and_expert": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 1},
    "short_first_stage": {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1},
    "interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "data": {},
}
TWO_RANKS = [name for name in LAYOUTS if name != "one_rank"]


# At every change each layout sends weights in one precision; that whose ranks share tensors sends them in all.
SENT_IN = {
    name: STRATEGIES if name == "tensor" else (STRATEGIES[place % len(STRATEGIES)],)
    for place, name in enumerate((*LAYOUTS, "bf16"))
}


def run_layouts(checkpoint, root: Path, sent_in: Mapping[str, Sequence[str]]) -> Callable[[str], dict]:
    """Run all of them, and return what reads a layout's results.

    Args:
        checkpoint: Of the fixture.
        root: A new folder.
        sent_in: The precisions in which each layout sends weights.
    """
    requests = {
        name: {
            "checkpoint": str(checkpoint[0]),
            "folder": str(root / name / "state"),
            "parallel": LAYOUTS.get(name, {}),
            "trainer": {"params_dtype": "bf16"} if name == "bf16" else {},
            "ranks": 1 if name == "one_rank" else 2,
            "strategies": strategies,
            **({"other": str(root / "one_rank/state")} if name in TWO_RANKS else {}),
        }
        for name, strategies in sent_in.items()
    }
    for name in requests:
        (root / name).mkdir()
    run_gangs("megatron_layouts", {"requests": list(requests.values())})

    def run(name: str) -> dict:
        by_rank = [json.loads(path.read_text()) for path in sorted((root / name).glob("[01].json"))]
        assert len(by_rank) == requests[name]["ranks"]
        return {**by_rank[0], "folder": requests[name]["folder"], "by_rank": by_rank}

    return run


@pytest.fixture(scope="module")
def run_layout(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict]:
    """Ten gangs, of which each imports Megatron's parts, trains and saves: a minute on two cores."""
    return run_layouts(checkpoint, tmp_path_factory.mktemp("layouts"), SENT_IN)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_equal_one(run_layout, name: str) -> None:
    one, two = run_layout("one_rank"), run_layout(name)
    assert one["logprobs"].keys() == two["logprobs"].keys()
    for index, values in one["logprobs"].items():
        assert values == pytest.approx(two["logprobs"][index], rel=1e-6, abs=1e-6)
    for key, value in one["statistics"].items():
        assert two["statistics"][key] == pytest.approx(value, rel=1e-6, abs=1e-7), key
    # The second update clips, and its ratios are not 1.
    assert one["second"]["clip_fraction"] > 0
    for rank in two["by_rank"]:
        assert rank["statistics"] == two["statistics"]
        assert rank["second"] == two["second"], "every rank knows what all of them did"
        assert rank["bad_buffers"] == one["bad_buffers"] == 1
        for key, value in one["second"].items():
            assert rank["second"][key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("name", TWO_RANKS)
def test_updates_of_different_numbers_of_micro_batches(run_layout, name: str) -> None:
    """Gradients are reduced behind the last of them, and new weights arrive in the next forward pass."""
    one, two = run_layout("one_rank"), run_layout(name)
    assert len({update["num_tokens"] for update in one["uneven"]}) == 3
    for expected, update in zip(one["uneven"], two["uneven"], strict=True):
        assert update["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert update["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    for tensor, norm in one["at_the_end"].items():
        assert two["at_the_end"][tensor] == pytest.approx(norm, rel=1e-5), f"{tensor} has arrived"


@pytest.mark.parametrize("name", TWO_RANKS)
def test_experts_are_balanced_over_all_ranks(run_layout, name: str) -> None:
    one, two = run_layout("one_rank")["balance"], run_layout(name)["balance"]
    # Tensor parallelism pads a row of 96 tokens by one at most, context parallelism each sequence by up to three, and
    # experts see those too.
    is_padded = name.startswith(("tensor", "context"))
    close = {"rel": 0.05 if is_padded else 1e-5}
    assert two["load"] == pytest.approx(one["load"], **close)
    assert all(rank["balance"]["load"] == two["load"] for rank in run_layout(name)["by_rank"])
    if one["biases"].keys() == two["biases"].keys() and not is_padded:
        assert two["biases"] == one["biases"]
    # Data-parallel ranks have other micro-batches, and the loss that balances is one of each.
    if name not in ("data", "expert"):
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], **close)
    assert one["grad_norm"] > 2 * run_layout("one_rank")["statistics"]["grad_norm"], "the test sees the auxiliary loss"


@pytest.mark.parametrize("name", [*LAYOUTS, "bf16"])
def test_weights_and_state_round_trip(run_layout, name: str) -> None:
    result = run_layout(name)
    assert result["not_served"] == {strategy: [0, 0, 0, 0, 0, 0] for strategy in SENT_IN[name]}
    assert result["round_trip_exact"], "gathering what was put in must give the same bits"
    assert result["restored_step"] == 1
    assert result["restored_equal"], "a saved and loaded state must give the same bits"
    for rank in result["by_rank"]:
        assert rank["state_restored_equal"], "so must master weights and moments"
        assert rank["differences_to_megatron"] == []


@pytest.mark.faults("layouts")
def test_every_layout_sends_every_precision(checkpoint, tmp_path: Path) -> None:
    run = run_layouts(checkpoint, tmp_path, dict.fromkeys(SENT_IN, STRATEGIES))
    for name in SENT_IN:
        assert run(name)["not_served"] == {strategy: [0, 0, 0, 0, 0, 0] for strategy in STRATEGIES}, name


@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_state_goes_through_another_layout_unchanged(run_layout, name: str) -> None:
    """One rank's checkpoint, loaded in another layout and saved there, is the same checkpoint bit by bit."""
    original = TorchDistReader(Path(run_layout("one_rank")["folder"]))
    copy = TorchDistReader(Path(run_layout(name)["folder"]).with_name("copy"))
    assert copy.keys == original.keys
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in original.keys)
    for key in original.keys:
        assert torch.equal(original.read(key), copy.read(key)), key


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_first_ratio_is_exactly_one(run_layout, name: str) -> None:
    assert run_layout(name)["statistics"]["first_update_ratio_max_abs_deviation"] == 0.0
