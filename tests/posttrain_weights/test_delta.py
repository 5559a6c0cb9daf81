"""Changes of a part: the same bits as the part, and how few bytes they are."""

import pytest
import torch

from posttrain_weights import delta as module
from posttrain_weights.delta import (
    SKIP,
    WHOLE_PART,
    DeltaHeader,
    change,
    changes,
    pieces_of,
)

DTYPES = {torch.float8_e4m3fn: torch.int8, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def drawn(shape, dtype, seed):
    bits = DTYPES[dtype]
    info = torch.iinfo(bits)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=bits).view(dtype)


def changed(part, places):
    """Return a part with other bits in some places, NaN and both zeros among them."""
    bits = part.clone().view(DTYPES[part.dtype])
    bits.view(-1)[places] ^= 1
    return bits.view(part.dtype)


def apply(old, found, around=0):
    """Change a part that lies in a wider matrix."""
    wide = torch.zeros(len(old) + 2, old.shape[1] + 3, dtype=old.dtype)
    view = wide[1:-1, 2:-1]
    view.copy_(old)
    fits = change(view, *found)
    bits = wide.view(DTYPES[old.dtype]).clone()
    bits[1:-1, 2:-1] = 0
    assert not bits.any(), "what lies around it"
    return fits, view


def same(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("at_once", [1 << 22, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_give_the_part(dtype, at_once, monkeypatch):
    monkeypatch.setattr(module, "COMPARED_AT_ONCE", at_once)
    for seed in range(20):
        old = drawn((1 + seed, 97), dtype, seed)
        share = torch.rand(1, generator=torch.Generator().manual_seed(seed)) / 4
        places = (torch.rand(old.numel(), generator=torch.Generator().manual_seed(seed)) < share).nonzero()[:, 0]
        new = changed(old, places)
        found = changes(new, old)
        assert found is not None
        assert found[1].numel() == len(places)
        fits, view = apply(old, found)
        assert fits
        assert same(view, new)


@pytest.mark.parametrize("places", [[0], [254], [255], [256], [509, 510], [0, 255, 511, 1023], [1020]])
def test_places_far_apart(places):
    """255 in between, and multiples of it, take bytes of their own."""
    old = drawn((4, 256), torch.float8_e4m3fn, 1)
    new = changed(old, torch.tensor(places))
    gaps, values = changes(new, old)
    ahead = [place - last - 1 for place, last in zip(places, [-1, *places], strict=False)]
    assert gaps.numel() == sum(1 + between // SKIP for between in ahead)
    assert same(apply(old, (gaps, values))[1], new)


TWO_PERCENT = {torch.float8_e4m3fn: 0.041, torch.bfloat16: 0.031, torch.float32: 0.026}


@pytest.mark.parametrize(("dtype", "most"), TWO_PERCENT.items())
def test_two_percent_take_less_than_a_tenth(dtype, most):
    old = drawn((512, 1024), dtype, 3)
    places = (torch.rand(old.numel(), generator=torch.Generator().manual_seed(4)) < 0.02).nonzero()[:, 0]
    gaps, values = changes(changed(old, places), old)
    assert gaps.nbytes + values.nbytes < most * old.nbytes


def test_what_takes_more_than_the_part_is_none():
    old = drawn((64, 64), torch.float8_e4m3fn, 3)
    assert changes(changed(old, torch.arange(0, old.numel(), 2)), old) is None
    assert changes(changed(old, torch.arange(0, old.numel(), 3)), old) is not None


def test_nothing_changed():
    old = drawn((8, 64), torch.bfloat16, 3)
    assert [found.numel() for found in changes(old.clone(), old)] == [0, 0]


@pytest.mark.parametrize(
    ("gaps", "num_values"),
    [([200, 200, 200], 3), ([SKIP, SKIP, 3], 1), ([0, 1], 1), ([0, 1], 3), ([SKIP], 1)],
)
def test_what_does_not_fit_is_told_and_changes_nothing_else(gaps, num_values):
    old = drawn((4, 128), torch.float8_e4m3fn, 3)
    values = drawn((1, num_values), torch.float8_e4m3fn, 4)
    fits, _ = apply(old, (torch.tensor([gaps], dtype=torch.uint8), values))
    assert not fits


@pytest.mark.parametrize(
    "told",
    [
        DeltaHeader(-2, 0),
        DeltaHeader(5, 4),
        DeltaHeader(0, 3),
        DeltaHeader(400, 400),
        DeltaHeader(3, 10**9),
        DeltaHeader(-1, 1),
    ],
)
def test_a_part_does_not_come_so(told):
    with pytest.raises(ValueError, match="of a part of 512 elements"):
        pieces_of(torch.zeros(4, 128, dtype=torch.float8_e4m3fn), told)


def test_what_comes_of_a_part():
    part = torch.zeros(4, 128, dtype=torch.bfloat16)
    assert pieces_of(part, WHOLE_PART)[0] is part
    assert pieces_of(part, DeltaHeader(0, 0)) == []
    gaps, values = pieces_of(part, DeltaHeader(3, 4))
    assert (gaps.shape, gaps.dtype) == ((1, 4), torch.uint8)
    assert (values.shape, values.dtype) == ((1, 3), torch.bfloat16)
