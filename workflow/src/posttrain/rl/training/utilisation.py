"""Hardware use of a step: MFU, peak memory, and an optional trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from posttrain.config.derived import world_size
from posttrain.config.schema import Config
from posttrain.plan.sizing.flops import sequence_flops


def model_flops_utilisation(config: Config, lengths: Iterable[int], seconds: float) -> float:
    """Return the MFU: the model's FLOP/s as a share of the trainer's BF16 peak.

    Args:
        config: The resolved configuration.
        lengths: Tokens of each trained sample, counted once; padding and recomputation do not count.
        seconds: Time that all ranks took.

    Source: PaLM, arXiv 2204.02311, appendix B.
    """
    arch = config.model.architecture
    counts = Counter(lengths)
    operations = sum(n * sequence_flops(arch, length).training(recompute=False) for length, n in counts.items())
    return operations / (seconds * world_size(config) * config.hardware.bf16_tflops * 1e12)


class PeakMemory:
    """This process's peak memory since the last `reset`: allocated on its GPU, or resident on the host."""

    _status, _clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def reset(self) -> None:
        """Restart the measurement."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            self._clear.write_text("5")  # proc_pid_clear_refs(5): the peak becomes what is resident now

    def gib(self) -> float:
        """Return the peak in GiB."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 2**30
        (line,) = (line for line in self._status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 2**20


@contextmanager
def traced(step: int, steps: Collection[int], folder: Path) -> Iterator[None]:
    """Profile the block with PyTorch's profiler and write the trace to `folder`, if `step` is in `steps`.

    Args:
        step: Number of the step, from 1.
        steps: Steps to trace.
        folder: Output: `step_000007.json.gz`, for chrome://tracing and Perfetto.
    """
    if step not in steps:
        yield
        return
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities, record_shapes=True) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"step_{step:06d}.json.gz"))
