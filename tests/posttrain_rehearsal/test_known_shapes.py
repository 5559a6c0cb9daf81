from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from posttrain_rehearsal.known_shapes import KnownShapes

aten = torch.ops.aten
Asks = Callable[[KnownShapes, list[FakeTensor]], Any]
ASKED: dict[str, Asks] = {
    "a new tensor": lambda known, t: known(aten.mul.Tensor, (), (t[0], t[1]), {}),
    "a product": lambda known, t: known(aten.mm.default, (), (t[0], t[3]), {}),
    "a sum of whole numbers": lambda known, t: known(aten.add.Scalar, (), (t[2], 1), {}),
    "the same with a fraction": lambda known, t: known(aten.add.Scalar, (), (t[2], 1.0), {}),
    "another type": lambda known, t: known(aten._to_copy.default, (), (t[0],), {"dtype": torch.bfloat16}),
    "several": lambda known, t: [*known(aten.topk.default, (), (t[0], 2), {})],
    "in place": lambda known, t: known(aten.add_.Tensor, (), (t[0], t[1]), {}),
    "a view": lambda known, t: known(aten.slice.Tensor, (), (t[0], 0, 1, 3), {}),
    "several views": lambda known, t: known(aten.split.Tensor, (), (t[0], 2), {}),
    "with gaps": lambda known, t: known(aten.abs.default, (), (t[3],), {}),
}


def tensors(fake: FakeTensorMode) -> list[FakeTensor]:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    return [
        FakeTensor(fake, torch.empty(4, 6, device="meta"), cuda),
        FakeTensor(fake, torch.empty(6, device="meta"), cuda),
        FakeTensor(fake, torch.empty(6, dtype=torch.int64, device="meta"), cpu),
        FakeTensor(fake, torch.empty(4, 6, device="meta").t(), cuda),
    ]


def parts(out: Any) -> list[torch.Tensor]:
    return [*out] if isinstance(out, list | tuple) else [out]


def rows(out: Any) -> list[tuple[Any, ...]]:
    return [
        (t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes()) for t in parts(out)
    ]


@pytest.mark.parametrize("what", ASKED)
def test_what_is_given_again_is_what_fake_mode_gives(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTensorMode()
    known, given = KnownShapes(fake), tensors(fake)
    for name, ask in ASKED.items():
        if name != what:
            ask(known, given)
    expected = rows(ASKED[what](KnownShapes(fake), given))
    first = ASKED[what](known, given)
    assert rows(first) == expected
    monkeypatch.setattr(FakeTensorMode, "dispatch", None)
    again = ASKED[what](known, given)
    assert rows(again) == expected
    own, *places = [{part.untyped_storage()._cdata for part in parts(out)} for out in (given, first, again)]
    assert (places[0] == places[1]) == (places[0] <= own), "new memory each time, or what was given"


def test_who_changes_a_tensor_is_asked_each_time() -> None:
    fake = FakeTensorMode()
    known, (tensor, *_) = KnownShapes(fake), tensors(fake)
    for shape in ([2, 3], [4, 6], [2, 3]):
        known(aten.resize_.default, (), (tensor, shape), {})
        assert [*tensor.shape] == shape


def test_two_devices_are_refused_each_time() -> None:
    fake = FakeTensorMode()
    known, (tensor, _, on_host, _) = KnownShapes(fake), tensors(fake)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="found at least two devices"):
            known(aten.add.Tensor, (), (tensor, on_host), {})
