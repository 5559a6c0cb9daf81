"""The trained model against transformers' GlmMoeDsaForCausalLM: logits, selected keys, gradients, packing."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tests.support.independent_grpo import by_hub_name
from tests.support.megatron_single import test_config
from tests.support.packed_rows import boundaries, gradients_by_hub_name, run_packed
from tests.support.tiny_checkpoint import TRAINED

from posttrain.rl.megatron_backend import packed
from posttrain.rl.megatron_backend.glm5.sparse_attention import mask_of_places
from posttrain.rl.megatron_backend.packed import PackedSequences

pytestmark = pytest.mark.usefixtures("policy")


@torch.no_grad()
def test_logits_equal_transformers(policy, reference, sequences) -> None:
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    assert (run_packed(policy, sequences) - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 0.5, "logits near zero would agree by themselves"


@torch.no_grad()
def test_a_sequence_shorter_than_topk_is_dense(policy, reference) -> None:
    sequence = torch.arange(7)
    packed = run_packed(policy, [sequence])
    assert (packed - reference(sequence[None]).logits[0]).abs().max() <= 1e-5


# Scores that a call is worth: none, so that each sequence has a block of its own; some; more than there are.
@pytest.mark.parametrize(("worth", "num_blocks"), [(0, 5), (1500, 3), (10**6, 1)])
@torch.no_grad()
def test_packed_equals_separate(policy, sequences, monkeypatch, worth, num_blocks) -> None:
    separate = torch.cat([run_packed(policy, [sequence]) for sequence in sequences])
    monkeypatch.setattr(packed, "SCORES_PER_CALL", worth)
    assert len(PackedSequences.from_boundaries(boundaries(sequences)).queries.blocks) == num_blocks
    assert (run_packed(policy, sequences) - separate).abs().max() <= 2e-6


def test_gradients_equal_transformers(policy, reference, sequences) -> None:
    ours, theirs = gradients_of_both(policy, reference, sequences)
    for name, expected in theirs.items():
        assert (ours[name] - expected).norm() <= 1e-3 * expected.norm(), name


def test_one_expert_per_token_equals_transformers(make_policy, make_reference, sequences) -> None:
    """Its weight is the scaling factor whatever its score, so nothing but rounding reaches the router."""
    policy = make_policy(test_config(dataclasses.replace(TRAINED, num_experts_per_tok=1)))
    reference = make_reference(num_experts_per_tok=1)
    with torch.no_grad():
        expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
        assert (run_packed(policy, sequences) - expected).abs().max() <= 1e-5
    ours, theirs = gradients_of_both(policy, reference, sequences)
    whole = torch.cat([grad.flatten() for grad in theirs.values()]).norm()
    for name, grad in theirs.items():
        if name.endswith("mlp.gate.weight"):
            assert max(ours[name].norm(), grad.norm()) <= 1e-6 * whole, name
        else:
            assert (ours[name] - grad).norm() <= 1e-3 * grad.norm(), name


def gradients_of_both(policy, reference, sequences) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the gradients of the sum of log-probabilities by Hub name: the trainer's, and transformers'."""
    from posttrain.rl.megatron_backend.weights import HubWeights

    labels = torch.cat(sequences).roll(-1)
    policy.wrapped[0].zero_grad_buffer()
    run_packed(policy, sequences, labels[None]).sum().backward()
    reference.zero_grad()
    logits = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    torch.log_softmax(logits, -1).gather(1, labels[:, None]).sum().backward()

    ours = gradients_by_hub_name(policy, HubWeights(policy.chunks, policy.config.model.architecture))
    gradients = ((name, p.grad) for name, p in reference.named_parameters() if p.grad is not None)
    theirs = dict(named for name, grad in gradients for named in by_hub_name(name, grad))
    assert set(theirs) <= set(ours)
    return ours, theirs


@torch.no_grad()
def test_selected_keys_equal_transformers(policy, reference, sequences) -> None:
    """Wherever the k-th and the next score differ by more than 1e-5, both keep the same keys."""
    ours = recorded_selections(policy, sequences)
    compared = 0
    for sequence, layers in zip(sequences, ours, strict=True):
        theirs, scores = recorded_reference(reference, sequence)
        for layer, (mine, indices, score) in enumerate(zip(layers, theirs, scores, strict=True)):
            topk = indices.shape[-1]
            for query in range(topk, len(sequence)):
                ordered = score[query, : query + 1].sort(descending=True).values
                if ordered[topk - 1] - ordered[topk] > 1e-5:
                    assert set(mine[query].nonzero()[:, 0].tolist()) == set(indices[query].tolist()), (layer, query)
                    compared += 1
    assert compared > 100, "too few queries with a clear choice for the test to mean anything"


def recorded_selections(policy, sequences) -> list[list[torch.Tensor]]:
    """Return per sequence and layer the kept keys [S, S] of the trainer."""
    found: list[list[torch.Tensor]] = []
    for sequence in sequences:
        layers: list[torch.Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            for layer in policy.chunks[0].decoder.layers:
                core = layer.self_attention.core_attention
                patch.setattr(core, "_places", recording(core._places, layers))
            run_packed(policy, [sequence])
        found.append(layers)
    return found


def recording(choose, layers: list[torch.Tensor]):
    def places_of(x, q_latent, packed, frequencies):
        places = choose(x, q_latent, packed, frequencies)
        layers.append(mask_of_places(places[None], packed.max_seqlen_q)[0])
        return places

    return places_of


def recorded_reference(model, sequence) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return per layer the chosen indices [S, K] and the index scores [S, S] of transformers."""
    indices, scores = [], []
    handles = []
    for layer in model.model.layers:
        indexer = layer.self_attn.indexer
        handles.append(indexer.register_forward_hook(lambda *args: indices.append(args[-1][0].long())))
        wide = copy.copy(indexer)
        wide.index_topk = len(sequence)
        handles.append(
            indexer.register_forward_pre_hook(
                lambda _, args, kwargs, wide=wide: scores.append(full_scores(wide, args)), with_kwargs=True
            )
        )
    model(sequence[None])
    for handle in handles:
        handle.remove()
    return indices, scores


def full_scores(indexer, args) -> torch.Tensor:
    """Return all index scores [S, S], from the submodules of transformers' indexer and the formula of the paper."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave

    x, q_latent, (cos, sin) = args[0], args[1], args[2]
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_latent).view(1, -1, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q, k = torch.cat([q_rope, q[..., rope:]], -1), torch.cat([k_rope, k[..., rope:]], -1).squeeze(2)
    dots = torch.einsum("bshd,btd->bsht", q, k) * indexer.head_dim**-0.5
    weights = indexer.weights_proj(x) * indexer.n_heads**-0.5
    return torch.einsum("bsh,bsht->bst", weights, dots.relu())[0]


@torch.no_grad()
def test_indexer_uses_the_normalised_latent(policy, sequences) -> None:
    """With the latent's norm weight ignored the keys differ: the fixture's norm weights make the mistake visible."""
    layer = policy.chunks[0].decoder.layers[1].self_attention
    weight = layer.q_layernorm.weight.data.clone()
    right = recorded_selections(policy, sequences)[2][1]
    original = layer.core_attention._places
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.core_attention, "_places", lambda x, latent, *rest: original(x, latent / weight, *rest))
        wrong = recorded_selections(policy, sequences)[2][1]
    assert not torch.equal(right, wrong)


@torch.no_grad()
def test_sparse_path_equals_dense_path_when_topk_covers_the_sequence(policy, sequences, monkeypatch) -> None:
    indexers = [layer.self_attention.core_attention.indexer for layer in policy.chunks[0].decoder.layers]
    for indexer in indexers:
        monkeypatch.setattr(indexer, "topk", 64)
    sparse = run_packed(policy, sequences)
    monkeypatch.setattr(policy.settings, "dsa_indexer_topk", 64)
    dense = run_packed(policy, sequences)
    assert (sparse - dense).abs().max() <= 1e-6


# A chunk of 5 leaves the first queries, which see fewer keys than are kept, to dense attention.
@pytest.mark.parametrize("chunk", [1, 5, 35])
@torch.no_grad()
def test_attention_chunks_change_nothing(policy, sequences, monkeypatch, chunk) -> None:
    whole = run_packed(policy, sequences)
    monkeypatch.setattr(policy.settings, "attention_chunk_tokens", chunk)
    assert (whole - run_packed(policy, sequences)).abs().max() <= 2e-6


@torch.no_grad()
def test_log_probability_chunks_change_nothing(policy, sequences) -> None:
    labels = torch.cat(sequences).roll(-1)[None]
    whole = run_packed(policy, sequences, labels)
    expected = torch.log_softmax(run_packed(policy, sequences), -1).gather(1, labels[0][:, None])[:, 0]
    for chunk in (1, 7):
        policy.chunks[0].log_probs_chunk_size = chunk
        assert (run_packed(policy, sequences, labels) - whole).abs().max() <= 1e-6
    policy.chunks[0].log_probs_chunk_size = policy.config.trainer.log_probs_chunk_size
    assert (whole - expected).abs().max() <= 1e-6
