"""What experts are given while Megatron's model runs, against what transformers' model gives to its own."""

from __future__ import annotations

import pytest
import torch
from tests.support.expert_inputs import inputs_in_transformers, samples_of
from tests.support.hub_tensors import fill
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.rejections import rejected
from tests.support.tiny_checkpoint import FAMILIES, TRAINED, make_random_checkpoint, write_shards

from posttrain.rl.batching.packed_batch import build_packed_batch

ARCHITECTURES = {"glm_moe_dsa": TRAINED, **{name: FAMILIES[name] for name in ("glm4_moe", "qwen3_moe")}}
IDLE = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return what makes family -> (checkpoint folder, policy), each once; of GLM-5 an expert is never chosen."""
    root, known = tmp_path_factory.mktemp("experts"), {}

    def make(family: str):
        if family not in known:
            from posttrain.rl.megatron_backend.model import build_for_passes
            from posttrain.rl.megatron_backend.weights import HubWeights

            arch, folder = ARCHITECTURES[family], root / family
            tensors = make_random_checkpoint(folder, arch, seed=4)
            if family == "glm_moe_dsa":
                tensors["model.layers.2.mlp.gate.e_score_correction_bias"][IDLE] = -100.0
                write_shards(folder, tensors, 3)
            config = test_config(arch)
            initialize_single_rank(config)
            policy = build_for_passes(config)
            fill(HubWeights(policy.chunks, arch), tensors)
            known[family] = folder, policy
        return known[family]

    return make


def look(policy, sequences, keeper=None, multiple_of=64):
    """Run the sequences through the policy in rows with padding, and return what was seen."""
    from posttrain.rl.megatron_backend.expert_inputs import ExpertInputs
    from posttrain.rl.megatron_backend.train_step import compute_logprobs
    from posttrain.rl.training.calibration import real_tokens

    samples = samples_of(sequences)
    batches = [build_packed_batch(samples, part, multiple_of, 2) for part in ([0, 3], [1, 2, 4], [])]
    assert min(batch.num_padding for batch in batches) > 0
    inputs = ExpertInputs(policy)
    if keeper is not None:
        whole = inputs.see

        def see(layer, expert, gate_up, down, real):
            for name, given in (("gate_up", gate_up), ("down", down)):
                keeper.setdefault((layer, expert, name), []).append(given[real])
            whole(layer, expert, gate_up, down, real)

        inputs.see = see
    with inputs.watched([real_tokens(batch, samples) for batch in batches]):
        compute_logprobs(policy, batches)
    return inputs.take()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_inputs_of_both_projections_are_those_of_transformers(made, sequences, family) -> None:
    folder, policy = made(family)
    keeper: dict = {}
    seen = look(policy, sequences, keeper)
    expected = inputs_in_transformers(folder, ARCHITECTURES[family], sequences)
    assert keeper.keys() == expected.keys()
    assert len(expected) >= 2 * 2 * 4
    for place, theirs in expected.items():
        layer, expert, name = place
        ours = torch.cat(keeper[place])
        # Rows come in the order of micro-batches there, of sequences here.
        assert ours.shape == theirs.shape, place
        nearest = torch.cdist(ours.double(), theirs.double()).argmin(1)
        assert sorted(nearest.tolist()) == list(range(len(theirs))), place
        assert (ours - theirs[nearest]).abs().max() <= 1e-5 * theirs.abs().max(), place
        largest = seen.amax[layer, expert, int(name == "down")]
        assert (largest - theirs.abs().max()).abs() <= 1e-5 * theirs.abs().max(), place
        assert seen.counts[layer, expert] == len(theirs)


def test_an_expert_that_no_router_chooses_is_told(made, sequences) -> None:
    from posttrain.checkpoint.quantization.coverage import coverage, describe_coverage

    seen = look(made("glm_moe_dsa")[1], sequences)
    found = coverage(seen.counts.tolist(), first_layer=1)
    assert IDLE in found["layers"]["2"]["never"]
    assert found["layers"]["2"]["min"] == 0 == found["layers"]["2"]["tokens"][IDLE]
    assert found["never"] == sum(len(row["never"]) for row in found["layers"].values())
    tokens = 2 * sum(map(len, sequences))  # two experts each
    assert [sum(row["tokens"]) for row in found["layers"].values()] == [tokens] * 3
    assert f"layer 2: {IDLE}" in describe_coverage(found)
    assert not any(f"experts.{IDLE}.down_proj" in name for name in seen.by_module("model.") if "layers.2." in name)


class _GroupedLinear(torch.nn.Module):
    """What Transformer Engine's computes on a GPU: each expert's rows by its own matrix."""

    def __init__(self, weights):
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, rows, sizes):
        parts = zip(rows.split(sizes), self.weights, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


def grouped(experts):
    """Return Megatron's module of GPUs, which computes a projection of all experts at once, with the same weights."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    def build(name):
        return lambda *_, **__: _GroupedLinear([getattr(each, name).weight for each in experts.local_experts])

    parts = GroupedMLPSubmodules(build("linear_fc1"), build("linear_fc2"))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TEGroupedMLP(len(experts.local_experts), experts.config, parts, groups)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_moe"])
def test_experts_that_are_computed_together_are_given_the_same(made, sequences, monkeypatch, family) -> None:
    """With an expert that gets no tokens (GLM-5's)."""
    policy = made(family)[1]
    expected = look(policy, sequences)
    for layer in policy.chunks[0].decoder.layers:
        if hasattr(layer.mlp, "experts"):
            monkeypatch.setitem(layer.mlp._modules, "experts", grouped(layer.mlp.experts))
    seen = look(policy, sequences)
    assert torch.equal(seen.counts, expected.counts)
    assert expected.amax.max() > 0
    assert (seen.amax - expected.amax).abs().max() <= 1e-6 * expected.amax.max()


def test_padding_changes_nothing(made, sequences) -> None:
    policy = made("qwen3_moe")[1]
    one, other = look(policy, sequences, multiple_of=64), look(policy, sequences, multiple_of=512)
    assert torch.equal(one.counts, other.counts)
    assert (one.amax - other.amax).abs().max() <= 1e-5 * one.amax.max()


def test_what_is_not_finite_is_told_with_its_place(made, sequences) -> None:
    policy = made("qwen3_moe")[1]
    expert = policy.chunks[0].decoder.layers[1].mlp.experts.local_experts[0]
    before = expert.linear_fc1.weight.data[0, 0].clone()
    expert.linear_fc1.weight.data[0, 0] = torch.inf
    try:
        with rejected("values-not-finite", "layer 1, expert 0"):
            look(policy, sequences)
    finally:
        expert.linear_fc1.weight.data[0, 0] = before
