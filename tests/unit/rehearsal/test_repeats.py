from functools import partial

import torch

from posttrain.rehearsal.recorder import Recorder
from posttrain.rehearsal.repeats import once


def test_the_same_shapes_are_computed_once_and_counted_each_time() -> None:
    recorder, calls = Recorder(), []

    def places_of_block(select, places, number):
        calls.append(number)
        recorder.kernel(flops=number, moved=0)
        return places.new_zeros(number)

    counted = once(places_of_block, recorder)
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


def test_who_keeps_what_it_chooses_is_asked_each_time() -> None:
    """Masks that later layers take over are memory."""
    calls = []
    counted = once(lambda select, places: calls.append(1) or places, Recorder())
    for _ in range(2):
        counted(lambda first, end: None, torch.zeros(1))
    assert len(calls) == 2
