import torch
from torch._subclasses.fake_tensor import FakeTensor

from posttrain_rehearsal.device import SimulatedDevice
from posttrain_rehearsal.recorder import Recorder


def test_what_asks_about_a_tensor_or_makes_an_empty_one_is_no_kernel() -> None:
    recorder = Recorder()
    device = SimulatedDevice(recorder, lambda func, args: None, lambda func, args: NotImplemented)
    # torch without CUDA makes none itself.
    left = FakeTensor(device.fake, torch.empty(4, 4, device="meta"), torch.device("cuda"))
    with device, recorder.phase("x"):
        right = torch.empty_like(left)
        assert left.device.type == "cuda"
        assert not left.is_pinned()
        assert left.view(16).shape == (16,)
        made = left + right
    phase = recorder.phases[-1]
    assert made.device.type == "cuda"
    assert phase.kernels == 1
    assert phase.moved == 3 * 16 * 4


def test_numbers_that_nobody_knows_are_finite_unless_they_are_not_to_be() -> None:
    device = SimulatedDevice(Recorder(), lambda func, args: None, lambda func, args: NotImplemented)
    known = FakeTensor(device.fake, torch.empty(4, device="meta"), torch.device("cuda"))
    with device:
        device.set_values(known, torch.zeros(4))
        assert device.mirror(known.amax()).item() == 0
        device.forget(known)
        assert device.mirror(known.amax()).item() == 1
        with device.assuming_nothing_finite(True):
            assert device.mirror(known.amax()).isnan()
        with device.assuming_nothing_finite(False):
            assert device.mirror(known.amax()).item() == 1


def test_of_large_numbers_only_those_of_one_have_values() -> None:
    """Megatron makes the map of who goes to which expert of zeros that are like scores."""
    device = SimulatedDevice(Recorder(), lambda func, args: None, lambda func, args: NotImplemented)
    scores = FakeTensor(device.fake, torch.empty(1 << 10, 1 << 9, device="meta"), torch.device("cuda"))
    with device:
        zeros = torch.zeros_like(scores)
        nobody = device.mirror(zeros.int())
        assert nobody is not None
        assert not nobody.any()
        assert device.mirror(zeros + 1) is None
