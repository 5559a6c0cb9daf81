"""Published memory of training beside what the planner says of it, and a rehearsal.

    python -m benchmarks.published_memory [--rehearse]

The plan's figure is what an allocator counts: without contexts and buffers of communicators, and without fragments. A
rehearsal (`make env-rehearsal`) takes a minute or two for each row.

Sources:
    prime-rl   PrimeIntellect-ai/prime-rl 559b447, benchmarks/baselines: `peak_memory`, torch's largest reservation;
               one H100, all weights, full recomputation, FlashAttention-3, two rows. Weights are FP32 there, and cast
               for each layer; here they are BF16 beside FP32 ones of the optimizer, two bytes more a parameter.
               On more GPUs it shards weights and gradients, as this trainer does not: those rows are no comparison.
    bridge     NVIDIA-NeMo/Megatron-Bridge, examples/model_verification_cards/glm5-2/card.yaml at 1754823: GLM-5.2 on
               352 H100 in rows of 2,048 tokens, 65.23 GiB allocated and 69.68 reserved. Its eleven stages have 4, 6 and
               8 layers, and the MTP layer is trained; neither can be planned here, so it stands in no row.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims import report, start

from posttrain.config.load import Resolved
from posttrain.plan.resolve import resolve
from posttrain.plan.sizing.assumptions import ASSUMPTIONS
from posttrain.plan.sizing.memory_phases import phase_memory
from posttrain_rehearsal.outcome import FULL_STEP, UNSEEN
from posttrain_rehearsal.sampled_shapes import rehearsed_row
from posttrain_rehearsal.start import rehearse

TOLERANCE = 0.15
ONE_GPU = (
    "hardware.gpus_per_node=1 engine.num_engines=1 engine.gpus_per_engine=1 engine.sleep=always "
    "trainer.recompute_granularity=full"
)


@dataclass(frozen=True)
class Published:
    """A published run.

    Args:
        name: The system and its rows.
        tokens: Of a row.
        gib: At its fullest.
    """

    name: str
    tokens: int
    gib: float

    @property
    def resolved(self) -> Resolved:
        """The same on this trainer."""
        rows = f"trainer.max_tokens_per_gpu={self.tokens} rollout.max_response_tokens={self.tokens // 2}"
        request = {"site": "local", "model": "qwen3_0.6b", "hardware": "h100", "set": f"{ONE_GPU} {rows}"}
        return resolve(request, Path("config"))


RUNS = (
    Published("prime-rl, Qwen3-0.6B, rows of 16,384 on one H100", 16_384, 12.53),
    Published("prime-rl, Qwen3-0.6B, rows of 65,536 on one H100", 65_536, 19.56),
)


def main() -> None:
    """Print published, planned and rehearsed memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    for run in RUNS:
        executed = f"{rehearsed_gib(run):6.2f} rehearsed" if asked.rehearse else ""
        print(f"{run.name:52} {run.gib:6.2f} GiB {planned_gib(run):6.2f} planned {executed}")


def quick() -> None:
    """The plan alone, of the first run."""
    report("planned over published memory", planned_gib(RUNS[0]) / RUNS[0].gib, 1.15)


def planned_gib(run: Published) -> float:
    """Return the plan's GiB at the fullest, while nobody sleeps."""
    config = run.resolved.config
    rows = phase_memory(config, ASSUMPTIONS, rehearsed_row(config), trainer_sleeps=False)
    (gpu,) = (row.gpu for row in rows if row.phase == "train")
    return sum(gib for part, gib in gpu.items() if part not in UNSEEN)


def rehearsed_gib(run: Published) -> float:
    """Return a rehearsal's GiB at the fullest."""
    memory = rehearse(run.resolved)["memory"]
    return max(row["peak_gib"] for row in memory if (row["step"], row["phase"]) == (FULL_STEP, "train"))


if __name__ == "__main__":
    start(main, quick)
