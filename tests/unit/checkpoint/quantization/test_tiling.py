import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.checkpoint.quantization.tiling import find_misfit, intersect, slices_within

QUARTERS = [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))]


def test_boxes_that_meet():
    assert intersect(((0, 0), (4, 4)), ((2, 0), (4, 4))) == ((2, 0), (2, 4))
    assert intersect(((0,), (2,)), ((2,), (2,))) is None
    assert intersect(((), ()), ((), ())) == ((), ())


def test_slices_count_from_the_outer_box():
    assert slices_within(((5, 2), (1, 3)), ((4, 2), (4, 4))) == (slice(1, 2), slice(0, 3))


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((4, 4), QUARTERS, ""),
        ((4, 4), [((0, 0), (4, 4))], ""),
        ((), [((), ())], ""),
        ((4, 4), QUARTERS[:3], "a gap at (2, 2)"),
        ((4, 4), QUARTERS[1:], "a gap at (0, 0)"),
        ((4, 4), [((0, 0), (2, 4)), ((3, 0), (1, 4))], "a gap at (2,)"),
        ((4, 4), [((0, 0), (3, 4)), ((2, 0), (2, 4))], "an overlap at (2,)"),
        ((4, 4), [*QUARTERS, ((0, 0), (2, 2))], "2 chunks at (0, 0)"),
        ((4, 4), [((0, 0), (5, 4))], "an end outside the tensor at (5,)"),
        ((4, 4), [], "a gap at (0,)"),
        ((), [((), ()), ((), ())], "2 chunks at ()"),
    ],
)
def test_covers(shape, boxes, expected):
    assert find_misfit(shape, boxes) == expected


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_grid_covers_and_without_any_of_its_boxes_does_not(grid, data):
    boxes = [(tuple(2 * i for i in cell), (2,) * len(grid)) for cell in itertools.product(*map(range, grid))]
    shape = tuple(2 * n for n in grid)
    assert find_misfit(shape, data.draw(st.permutations(boxes))) == ""
    boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    assert find_misfit(shape, boxes).startswith("a gap")
