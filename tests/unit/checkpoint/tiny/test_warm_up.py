import math

import pytest
import torch
from tests.support.tiny_checkpoint import TINY

from posttrain.checkpoint.tiny import warm_up as tiny_warm_up
from posttrain.checkpoint.tiny.model import config_json
from posttrain.checkpoint.tiny.warm_up import Examples, backwards, index_scores, warm_up


@pytest.fixture
def model():
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig.from_dict(config_json(TINY) | {"dtype": "float32"})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GlmMoeDsaForCausalLM(config).eval()


@pytest.fixture
def examples() -> Examples:
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(64, (1, 12), generator=generator).expand(50, -1)
    digits = torch.randint(28, 38, (50, 3), generator=generator)
    ascending = digits.sort(dim=1).values
    return Examples(torch.cat([prefix, digits, prefix[:, :2]], dim=1), ascending, ascending.flip(1))


def test_scores_choose_the_keys_that_the_models_own_indexer_chooses(model, examples):
    chosen = []
    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda module, inputs, output: chosen.append(output))
    sequences = examples.prompts[:8]
    length = sequences.shape[1]
    assert length > 2 * TINY.index_topk
    with tiny_warm_up._indexer_inputs(model) as inputs, torch.no_grad():
        model(input_ids=sequences, use_cache=False)
    assert len(inputs) == TINY.num_hidden_layers
    future = torch.ones(length, length).triu(1).bool()
    for (indexer, hidden, q_latent, rotary), theirs in zip(inputs, chosen, strict=True):
        scores = index_scores(indexer, hidden, q_latent, rotary, first_query=0).masked_fill(future, float("-inf"))
        # Rows with fewer keys than top-k have nothing to choose.
        ours = scores[:, TINY.index_topk :].topk(TINY.index_topk).indices.sort().values
        assert torch.equal(ours, theirs[:, TINY.index_topk :].long().sort().values)
        later = index_scores(indexer, hidden, q_latent, rotary, first_query=9)
        assert torch.allclose(later.masked_fill(future[9:], float("-inf")), scores[:, 9:], atol=1e-6)


def test_the_indexers_loss_trains_the_indexer_only(model, examples):
    with tiny_warm_up._indexer_inputs(model) as inputs:
        output = model(input_ids=examples.prompts[:4], use_cache=False, output_attentions=True)
        for (indexer, hidden, q_latent, rotary), attention in zip(inputs, output.attentions, strict=True):
            scores = index_scores(indexer, hidden, q_latent, rotary, first_query=2)
            tiny_warm_up._divergence(attention.detach().mean(1)[:, 2:], scores).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if n in trained and "k_norm.bias" not in n)


def test_divergence_by_hand():
    # Target (1/2, 1/2, 0): the third key was left out. Scores (ln 3, 0, 7) are (3/4, 1/4) over the other two.
    target, scores = torch.tensor([[[0.5, 0.5, 0.0]]]), torch.tensor([[[math.log(3), 0.0, 7.0]]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert tiny_warm_up._divergence(target, scores).item() == pytest.approx(expected, rel=1e-5)
    same = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    assert tiny_warm_up._divergence(same.softmax(-1), same).item() == pytest.approx(0.0, abs=1e-6)


def test_drawn_examples_ascend_in_the_given_share(examples):
    sequences, targets = examples.draw(20_000, torch.Generator().manual_seed(0))
    prompts, responses = sequences[:, :17], sequences[:, 17:]
    assert torch.equal(targets, responses)
    assert torch.equal(responses.sort(dim=1).values, prompts[:, 12:15].sort(dim=1).values)
    differs = responses[:, 0] != responses[:, -1]
    ascending = (responses[:, 0] < responses[:, -1])[differs].float().mean().item()
    assert ascending == pytest.approx(tiny_warm_up.ASCENDING_SHARE, abs=0.02)
    assert examples.first_difference == 12


def test_warm_up_learns_and_leaves_the_model_as_it_should_be(model, examples, monkeypatch):
    monkeypatch.setattr(tiny_warm_up, "NUM_STEPS", 40)
    monkeypatch.setattr(tiny_warm_up, "BATCH_SIZE", 16)
    topk = []
    first = model.model.layers[0].self_attn.indexer
    spy = first.register_forward_hook(lambda module, inputs, output: topk.append(output.shape[-1]))
    before = _loss(model, examples)
    warm_up(model, examples, torch.Generator().manual_seed(1))
    spy.remove()
    assert _loss(model, examples) < before - 1.0
    # Dense first, then the model's own top-k.
    assert topk[1:] == [20] * 20 + [TINY.index_topk] * 20
    assert all(layer.self_attn.indexer.index_topk == TINY.index_topk for layer in model.model.layers)
    assert not first._forward_pre_hooks
    assert not model.training


def _loss(model, examples: Examples) -> float:
    sequences = torch.cat([examples.prompts, examples.descending], dim=1)
    with torch.no_grad():
        logits = model(input_ids=sequences, use_cache=False).logits[:, -4:-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), examples.descending.flatten()).item()


@pytest.mark.parametrize(
    ("answer", "other"),
    [("1134", "4311"), ("['7.0', '-12.0']", "['-12.0', '7.0']"), ("drow", "word"), ("", ""), ("a b c", "c b a")],
)
def test_the_other_answer_is_the_right_one_backwards(answer, other):
    assert backwards(answer) == other
