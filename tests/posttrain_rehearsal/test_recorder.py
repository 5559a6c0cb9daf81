import torch

from posttrain_rehearsal.recorder import BLOCK, Recorder

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


def test_what_was_counted_once_can_happen_again():
    """Beside more than at the first time; what outlives it is its caller's."""
    recorder = Recorder()
    with recorder.phase("train") as phase:
        recorder.allocated(1, 3 * BLOCK, "cuda")
        with recorder.counts() as counts:
            recorder.allocated(2, 5 * BLOCK, "cuda")
            recorder.kernel(flops=7, moved=11)
            recorder.wait(aten.nonzero.default)
            recorder.freed(2)
            recorder.allocated(3, 2 * BLOCK, "cuda")
        assert (counts.peak, phase.peak) == (5 * BLOCK, 8 * BLOCK)
        recorder.allocated(4, 10 * BLOCK, "cuda")
        recorder.repeat(counts)
    assert (phase.peak, phase.flops, phase.moved, phase.kernels) == (20 * BLOCK, 14, 22, 2)
    assert [*phase.waits.values()] == [2]
    assert sum(phase.holders.values()) == phase.peak


def test_a_new_process_has_nothing_of_the_old_one():
    recorder = Recorder()
    recorder.allocated(1, 5 * BLOCK, "cuda")
    recorder.begin_anew()
    with recorder.phase("resume") as phase:
        recorder.allocated(2, BLOCK, "cuda")
        recorder.freed(1)
    assert phase.peak == sum(phase.holders.values()) == BLOCK
