import dataclasses

import pytest
import torch
from tests.support.tiny_checkpoint import TINY, TINY_DEEPSEEK, TINY_QWEN3_5, make_random_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from posttrain.plan.sizing.flops import sequence_flops
from posttrain.rl.engines.embedded.model import load_model

NUM_TOKENS = 24


def counted(folder, arch):
    """Return what torch counts in one forward pass: (matrices, attention with indexer)."""
    make_random_checkpoint(folder, arch)
    model = load_model(folder, torch.float32).model
    model.set_experts_implementation("eager")  # torch does not count grouped products
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.arange(NUM_TOKENS)[None] % arch.vocab_size)
    operations = counter.get_flop_counts()["Global"]
    assert set(operations) == {torch.ops.aten.mm, torch.ops.aten.bmm}
    return operations[torch.ops.aten.mm], operations[torch.ops.aten.bmm]


@pytest.mark.parametrize("arch", [TINY, TINY_DEEPSEEK], ids=["glm_moe_dsa", "deepseek_v3"])
def test_matrices_are_counted_as_torch_counts_them(tmp_path, arch):
    matrices, _ = counted(tmp_path, arch)
    flops = sequence_flops(arch, NUM_TOKENS)
    assert matrices == flops.linear + flops.frozen + flops.head


@pytest.mark.parametrize("arch", [TINY, TINY_DEEPSEEK], ids=["glm_moe_dsa", "deepseek_v3"])
def test_pairs_are_counted_as_torch_counts_them(tmp_path, arch):
    """transformers' eager attention multiplies every query with every key, also those it masks or does not keep."""
    _, batched = counted(tmp_path, arch)
    flops = sequence_flops(dataclasses.replace(arch, index_topk=max(arch.index_topk, NUM_TOKENS)), NUM_TOKENS)
    causal = NUM_TOKENS * (NUM_TOKENS + 1) / 2
    assert batched == (flops.attention + flops.indexer) * NUM_TOKENS**2 / causal


def test_sparse_pairs_by_hand():
    """5 tokens that keep 2 keys attend to 1 + 2 + 2 + 2 + 2 = 9 of the 15 pairs that the indexer scores."""
    arch = dataclasses.replace(TINY, index_topk=2)
    flops = sequence_flops(arch, 5)
    assert flops.attention == 2 * 3 * 4 * (16 + 8 + 16) * 9
    assert flops.indexer == 2 * 3 * 4 * (16 + 1) * 15
    dense = sequence_flops(dataclasses.replace(TINY, index_topk=5), 5)
    assert dense.attention == flops.attention * 15 / 9


def test_a_delta_net_by_hand():
    """2 of 4 layers attend. 4 heads of 16 x 24 read and write their state; 160 channels pass a convolution of 4."""
    flops = sequence_flops(TINY_QWEN3_5, 5)
    assert flops.attention == 2 * 2 * 4 * (16 + 16) * 15
    assert flops.delta_net == 2 * 5 * (6 * 4 * 16 * 24 + 2 * 160 * 4)
    assert flops.backward == 2 * (flops.linear + flops.head + flops.attention + flops.delta_net)


def test_backward_and_recomputation():
    flops = sequence_flops(TINY, NUM_TOKENS)
    trained = flops.linear + flops.head + flops.attention
    assert flops.training(recompute=False) == 3 * trained + flops.frozen + flops.indexer
    assert flops.training(recompute=True) - flops.training(recompute=False) == flops.forward - flops.head


def test_sparse_attention_is_a_fraction_of_dense_at_32k(resolved):
    arch = resolved("glm5").config.model.architecture
    sparse, dense = (
        sequence_flops(each, 32768).attention for each in (arch, dataclasses.replace(arch, index_n_heads=0))
    )
    # (2048 2049 / 2 + 30720 2048) / (32768 32769 / 2)
    assert sparse / dense == pytest.approx(0.1211, abs=1e-4)


def test_grouped_attention_and_a_tied_output_matrix(resolved):
    arch = resolved("qwen3_4b").config.model.architecture
    flops = sequence_flops(arch, 2)
    # 3 pairs, 32 heads of 128
    assert flops.attention == 2 * arch.num_hidden_layers * 32 * 256 * 3
    assert flops.head == 2 * 2 * arch.vocab_size * arch.hidden_size
    assert flops.frozen == flops.indexer == 0
