"""Attention in the latent's space by a kernel that reads chosen keys: against the model's, and against transformers."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.support.chosen_keys import attend_by, reference_kernel
from tests.support.megatron_single import test_config
from tests.support.packed_rows import gradients_by_hub_name, run_packed
from tests.support.tiny_checkpoint import TRAINED

from posttrain.rl.megatron_backend import sparse_kernels

pytestmark = pytest.mark.usefixtures("policy")


@pytest.fixture
def with_kernel(policy, monkeypatch):
    for layer in policy.chunks[0].decoder.layers:
        monkeypatch.setattr(layer.self_attention.core_attention, "kernel", reference_kernel)
    return policy


@torch.no_grad()
def test_logits_equal_transformers(with_kernel, reference, sequences):
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    assert (run_packed(with_kernel, sequences) - expected).abs().max() <= 1e-5


def test_gradients_are_those_of_masked_attention(make_policy, sequences):
    policy = make_policy(test_config(TRAINED))
    masked = gradients(policy, sequences)
    attend_by(reference_kernel, policy.chunks)
    of_kernel = gradients(policy, sequences)
    for name, expected in masked.items():
        assert (of_kernel[name] - expected).norm() <= 1e-5 * expected.norm() + 1e-9, name
    assert any(name.endswith("kv_b_proj.weight") and grad.norm() > 0 for name, grad in of_kernel.items())


def gradients(policy, sequences):
    from posttrain.rl.megatron_backend.weights import HubWeights

    policy.wrapped[0].zero_grad_buffer()
    run_packed(policy, sequences, torch.cat(sequences).roll(-1)[None]).sum().backward()
    found = gradients_by_hub_name(policy, HubWeights(policy.chunks, policy.config.model.architecture))
    return {name: tensor.clone() for name, tensor in found.items()}


def test_short_rows_are_dense(with_kernel, sequences, monkeypatch):
    def forbidden(*_):
        raise AssertionError("each query sees all keys before it")

    for layer in with_kernel.chunks[0].decoder.layers:
        monkeypatch.setattr(layer.self_attention.core_attention, "kernel", forbidden)
    with torch.no_grad():
        run_packed(with_kernel, [sequences[1][: TRAINED.index_topk]])
    with pytest.raises(AssertionError, match="each query"):
        run_packed(with_kernel, sequences)


def test_what_a_kernel_declines_ends_the_run():
    """Megatron's hook answers None, and Megatron would go on slowly."""
    from megatron.core.transformer.experimental_attention_variant import dsa_cudnn_kernels

    query, key = torch.zeros(3, 4, 40), torch.zeros(3, 40)
    hook = dsa_cudnn_kernels.run_fused_absorbed_sparse_attention
    with pytest.raises(RuntimeError, match=r"cudnn declines queries \(3, 4, 40\).*posttrain plan"):
        sparse_kernels._run("cudnn", hook, query, key, torch.zeros(3, 8, dtype=torch.int32), 1.0, 32)


def test_a_missing_package_is_named():
    with pytest.raises(RuntimeError, match="sparse_attention=cudnn needs flash_mla"):
        sparse_kernels._hook("cudnn")


def test_the_choice_is_logged(make_policy, caplog):
    with caplog.at_level(logging.INFO):
        make_policy(test_config(TRAINED))
    assert "sparse attention: masked, because no kernel for chosen keys runs on a CPU" in caplog.text
