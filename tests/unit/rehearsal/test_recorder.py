import torch

from posttrain.rehearsal.recorder import BLOCK, Recorder

aten = torch.ops.aten


def test_what_is_made_inside_a_fused_kernel_is_no_memory_unless_it_stays():
    recorder = Recorder()
    with recorder.phase("train") as phase:
        recorder.allocated(1, BLOCK, "cuda")
        with recorder.fused(read=BLOCK):
            with recorder.fused(read=BLOCK):
                recorder.allocated(2, 10 * BLOCK, "cuda")
            recorder.allocated(3, 2 * BLOCK, "cuda")
            recorder.freed(2)
        assert (phase.peak, phase.kernels, phase.moved) == (3 * BLOCK, 1, 3 * BLOCK)
        recorder.allocated(4, 10 * BLOCK, "cuda")
    assert phase.peak == 13 * BLOCK
    assert sum(phase.holders.values()) == 13 * BLOCK, "a peak at a phase's end has its holders, too"


def test_attention_by_places_counts_pairs_of_places():
    """[B, S, N, D]: 5 queries, 7 keys, 4 heads of width 8; two products of a multiplication and an addition each."""
    query, key = torch.empty(1, 5, 4, 8), torch.empty(1, 7, 4, 8)
    recorder = Recorder()
    with recorder.phase("train") as phase:
        recorder.operation(
            aten._efficient_attention_forward.default, (query, key, key, None, None, None, None, None, 0.0, 0), {}, None
        )
    assert phase.flops == 4 * 5 * 7 * (2 * 8 + 2 * 8)
