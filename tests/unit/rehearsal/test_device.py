"""Operations on a device that is only said to be there."""

import pytest
import torch

from posttrain.rehearsal.device import SimulatedDevice
from posttrain.rehearsal.recorder import Recorder


def on_device(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with SimulatedDevice(Recorder(), lambda *_: None, lambda *_: NotImplemented) as simulated:
        yield simulated


@pytest.mark.parametrize(
    "product",
    [
        lambda kind: torch.mm(on_device(2, 3), on_device(3, 4, dtype=kind)),
        lambda kind: torch.bmm(on_device(5, 2, 3), on_device(5, 3, 4, dtype=kind)),
        lambda kind: torch.addmm(on_device(2, 4), on_device(2, 3), on_device(3, 4, dtype=kind)),
        lambda kind: torch.nn.functional.linear(on_device(2, 3), on_device(4, 3, dtype=kind)),
    ],
)
def test_factors_of_a_product_have_one_type(device, product):
    assert product(torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="several types"):
        product(torch.float32)


def test_numbers_that_nobody_knows_are_finite(device):
    row = on_device(2, 8, dtype=torch.float32)[0]
    assert device.mirror((~torch.isfinite(row)).sum()).item() == 0
