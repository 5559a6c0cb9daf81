import torch

from posttrain.rl.algorithm.logprobs import logit_chunks
from posttrain_rehearsal.memoized_ops import _like_tensors, few_of_alike, once
from posttrain_rehearsal.recorder import BLOCK, Recorder


def test_the_same_shapes_are_computed_once_and_counted_each_time() -> None:
    recorder, calls = Recorder(), []

    def choose_in_chunks(queries, number, dtype):
        calls.append(number)
        recorder.kernel(flops=number, moved=0)
        return queries.new_zeros(number, dtype=dtype)

    counted = once(choose_in_chunks, recorder, _like_tensors)
    with recorder.phase("train") as phase:
        for queries in (torch.ones(2, 3), torch.ones(2, 4)):
            for number in (5, 6, 5):
                made = counted(queries + number, number, torch.int16)
                assert (made.shape, made.dtype) == ((number,), torch.int16)
        assert calls == [5, 6, 5, 6]
        assert phase.flops == 2 * (5 + 6 + 5)
        counted(torch.ones(2, 3), 5, torch.int32)
        counted(torch.ones(2, 3).half(), 5, torch.int16)
    assert calls[4:] == [5, 5], "another type of the result, and of an argument"


def test_two_chunks_of_each_size_are_seen_and_count_for_the_others() -> None:
    recorder = Recorder()
    few = few_of_alike(logit_chunks, recorder)
    seen = []
    with recorder.phase("train") as phase:
        for rows, logits in few(torch.ones(19, 2), torch.ones(5, 2), 1.0, 4, torch.empty(4, 5)):
            seen.append(rows)
            recorder.kernel(flops=len(logits), moved=0)
    assert seen == [slice(0, 4), slice(4, 8), slice(16, 19)]
    assert phase.flops == 4 * 4 + 3


def test_what_a_chunk_leaves_behind_is_there_once() -> None:
    """Each chunk makes three blocks; those of the one before go before it takes one more."""
    recorder = Recorder()

    def chunks(*_: object):
        yield from ((slice(i, i + 1), torch.ones(1)) for i in range(5))

    with recorder.phase("train") as phase:
        for rows, _ in few_of_alike(chunks, recorder)(torch.ones(5), torch.ones(1), 1.0, 1, torch.empty(1)):
            recorder.allocated(rows.start + 1, 3 * BLOCK, "cuda")
            recorder.freed(rows.start)
            recorder.allocated(100, BLOCK, "cuda")
            recorder.freed(100)
    assert phase.peak == 6 * BLOCK
