import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny_checkpoint import TINY, transformers_config

from posttrain.rl.engines.embedded.stable_topk import StableTopK, make_indexers_stable, stable_topk


def test_ties_go_to_the_lower_position():
    values = torch.tensor([0.0, 3.0, 0.0, -0.0, -1.0, 0.0])
    assert stable_topk(values, 3).indices.tolist() == [1, 0, 2]
    assert stable_topk(values, 6).indices.tolist() == [1, 0, 2, 3, 5, 4]
    assert stable_topk(values, 2, largest=False).indices.tolist() == [4, 0]


def test_positive_and_negative_zero_are_one_tie():
    assert stable_topk(torch.tensor([-0.0, 0.0, -0.0]), 2).indices.tolist() == [0, 1]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40))
def test_values_are_those_of_torch_and_indices_the_lowest(seed, size, k):
    k = min(k, size)
    values = torch.randint(0, 4, (3, size), generator=torch.Generator().manual_seed(seed)).float()
    kept = stable_topk(values, k)
    assert torch.equal(kept.values, values.topk(k).values)
    for row in range(3):
        by_value_then_place = sorted(range(size), key=lambda place: (-values[row, place].item(), place))
        assert kept.indices[row].tolist() == by_value_then_place[:k]


def test_the_mode_replaces_both_spellings_and_nothing_else():
    values = torch.zeros(9)
    with StableTopK():
        assert values.topk(4).indices.tolist() == torch.topk(values, 4).indices.tolist() == [0, 1, 2, 3]
        assert values.sum() == 0
        assert torch.argmax(torch.tensor([1.0, 2.0])) == 1


def test_an_indexer_whose_scores_all_tie_keeps_the_first_positions():
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM(transformers_config(TINY, 2)).eval()
    assert make_indexers_stable(model) == 2
    indexer, tokens = model.model.layers[0].self_attn.indexer, 20
    torch.nn.init.zeros_(indexer.weights_proj.weight)
    positions = torch.arange(tokens)[None]
    visible = torch.ones(tokens, tokens).tril().bool()[None]
    kept = indexer(
        torch.randn(1, tokens, TINY.hidden_size),
        torch.randn(1, tokens, TINY.q_lora_rank),
        model.model.rotary_emb(torch.zeros(1), positions),
        visible,
        positions,
    )
    assert kept[0, -1].tolist() == list(range(TINY.index_topk))
    assert kept[0, 3, :4].tolist() == [0, 1, 2, 3]
