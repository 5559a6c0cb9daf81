from functools import partial

import torch

from posttrain.rl.algorithm.logprobs import logit_chunks
from posttrain.rl.megatron_backend.glm5.sparse_attention import KeptKeys
from posttrain_rehearsal.memoized_ops import _like_places, few_of_alike, once
from posttrain_rehearsal.recorder import BLOCK, Recorder


def test_the_same_shapes_are_computed_once_and_counted_each_time() -> None:
    recorder, calls = Recorder(), []

    def places_of_block(select, places, number):
        calls.append(number)
        recorder.kernel(flops=number, moved=0)
        return places.new_zeros(number)

    counted = once(places_of_block, recorder, _like_places)
    select = partial(min, torch.ones(2, 3))
    with recorder.phase("train") as phase:
        for other in (torch.zeros(2, 3), torch.zeros(2, 4)):
            for number in (5, 6, 5):
                made = counted(partial(min, other), torch.ones(4, dtype=torch.int64), number)
                assert (made.shape, made.dtype) == ((number,), torch.int64)
        assert calls == [5, 6, 5, 6]
        assert phase.flops == 2 * (5 + 6 + 5)
        counted(select, torch.ones(5, dtype=torch.int64), 5)
        counted(None, torch.ones(5, dtype=torch.int64), 5)
    assert calls[4:] == [5, 5], "places of another shape, and no selector"


def test_two_chunks_of_each_size_are_seen_and_count_for_the_others() -> None:
    recorder = Recorder()
    few = few_of_alike(logit_chunks, recorder)
    seen = []
    with recorder.phase("train") as phase:
        for rows, logits in few(torch.ones(19, 2), torch.ones(5, 2), 1.0, 4):
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
        for rows, _ in few_of_alike(chunks, recorder)(torch.ones(5), torch.ones(1), 1.0, 1):
            recorder.allocated(rows.start + 1, 3 * BLOCK, "cuda")
            recorder.freed(rows.start)
            recorder.allocated(100, BLOCK, "cuda")
            recorder.freed(100)
    assert phase.peak == 6 * BLOCK


def test_a_choice_that_is_kept_is_made_once_for_all_layers_and_leaves_its_bits_in_each() -> None:
    recorder, calls = Recorder(), []

    def choose(row: torch.Tensor, first: int, end: int) -> torch.Tensor:
        calls.append((first, end))
        return torch.ones(1, end - first, end, dtype=torch.bool)

    def places_of_block(select: KeptKeys, places: torch.Tensor) -> torch.Tensor:
        recorder.kernel(flops=7, moved=0)
        return torch.cat([select(0, 4).sum(-1), select(4, 9).sum(-1)], dim=1)

    counted, kept = once(places_of_block, recorder, _like_places), []
    with recorder.phase("train") as phase:
        for _ in range(3):
            kept.append(KeptKeys(partial(choose, torch.ones(9, 2))))
            assert counted(kept[-1], torch.zeros(1, 9)).shape == (1, 9)
            kept[-1].close()
        counted(kept[-1], torch.zeros(1, 9))
        counted(kept[0], torch.zeros(1, 9))
    assert calls == [(0, 4), (4, 9)]
    assert phase.flops == 5 * 7
    assert [{span: bits.shape for span, bits in one.bits.items()} for one in kept] == [
        {(0, 4): (1, 4, 1), (4, 9): (1, 5, 2)}
    ] * 3


def test_who_keeps_what_it_chooses_otherwise_is_asked_each_time() -> None:
    """Masks that later layers take over are memory."""
    calls = []
    recorder = Recorder()
    counted = once(lambda select, places: calls.append(1) or places, recorder, _like_places)
    with recorder.phase("train"):
        for _ in range(2):
            counted(lambda first, end: None, torch.zeros(1))
    assert len(calls) == 2
