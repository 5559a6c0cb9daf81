"""Copies for a checkpoint: the right values, and on devices not behind what the main thread waits for.

Where streams are real and nothing else is: in the environment of the rehearsal, on devices that are only said to be
there.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest
import torch
from tests.support.requirements import require

from posttrain.config.load import Resolved
from posttrain.errors import ConfigError
from posttrain.rl.megatron_backend.host_copies import HostCopies
from posttrain_rehearsal.start import home, simulated

# On which stream each copy from the device runs, and whether its target is pinned.
COPY = """
import json, torch
from posttrain.config.command_line import CONFIG_DIR
from posttrain.plan.resolve import resolve
from posttrain_rehearsal import stand_ins
from posttrain_rehearsal.recorder import Recorder
stand_ins.install(Recorder(), resolve({"model": "glm5_4layer", "site": "local"}, CONFIG_DIR).config)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from posttrain.rl.megatron_backend import host_copies
told = []
class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            told.append([name, torch.cuda.current_stream().stream_id])
        elif (kwargs or {}).get("pin_memory"):
            told.append(["pinned", 0])
        return func(*args, **(kwargs or {}))
copies = host_copies.HostCopies()
with FakeTensorMode(), Log():
    small, large = torch.empty(1000, device="cuda"), torch.empty(1 << 27, device="cuda")
    made = [copies(small), copies(large)]
print(json.dumps([told, torch.cuda.default_stream().stream_id, [str(copy.device) for copy in made]]))
"""


def test_copies_run_on_a_stream_of_their_own(resolved: Callable[..., Resolved]) -> None:
    try:
        folder = home()
    except ConfigError as error:
        return require("rehearsal", str(error))
    command = [str(folder / "bin" / "python"), "-c", COPY]
    environment = simulated(resolved("glm5_4layer").config, folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, default, devices = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, _ in told] == ["pinned", "aten::copy_", "aten::_to_copy"]
    streams = {stream for name, stream in told if name != "pinned"}
    assert len(streams) == 1
    assert default not in streams
    assert devices == ["cpu", "cpu"]


def test_what_is_on_the_host_is_not_copied() -> None:
    tensor = torch.arange(5.0)
    assert HostCopies()(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_copy_does_not_wait_for_what_the_main_thread_has_begun_later() -> None:
    """The default stream sleeps for seconds; a copy begun meanwhile is there long before, with the values before it."""
    values = torch.randn(1 << 20, device="cuda")
    expected, copies = values.cpu(), HostCopies()
    later = torch.cuda.Event()
    torch.cuda._sleep(10**10)
    later.record()
    assert torch.equal(copies(values), expected)
    assert not later.query(), "the main thread's work is done already: nothing was proved"
    torch.cuda.synchronize()
