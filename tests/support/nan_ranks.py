"""Two ranks of a tensor-parallel trainer, one with a NaN in its part of a weight: what each of them is told."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "model.layers.0.mlp.down_proj.weight"


def main() -> None:
    """Run the gang; rank 0 writes down what both were told, by the rank that has the NaN."""
    from tests.support.megatron_single import run_forked

    folder = Path(json.loads(sys.argv[1])["folder"])
    run_forked(2, folder / "meeting", partial(run_rank, folder))


def run_rank(folder: Path) -> None:
    from tests.support.hub_tensors import fill
    from tests.support.megatron_single import test_config
    from tests.support.tiny_checkpoint import TRAINED, random_tensors

    from posttrain.checkpoint.quantization.fp8 import Fp8Format
    from posttrain.rl.megatron_backend.initialize import initialize
    from posttrain.rl.megatron_backend.model import build_policy
    from posttrain.rl.megatron_backend.plain_data import gather_plain
    from posttrain.rl.megatron_backend.ranks import largest_of_ranks
    from posttrain.rl.megatron_backend.served_values import ServedValues
    from posttrain.rl.megatron_backend.weights import HubWeights

    config = test_config(TRAINED, tensor_model_parallel_size=2)
    initialize(config)
    policy = build_policy(config)
    weights = HubWeights(policy.chunks, TRAINED)
    fill(weights, random_tensors(TRAINED, 0))
    values = ServedValues(weights, Fp8Format("tensor"))
    (part,) = (shard.values for shard in values.shards if shard.hf_name == NAME)
    told: dict[str, Any] = {}
    for having in (None, 0, 1):
        before = part[0, 0].item()
        if dist.get_rank() == having:
            part.data[0, 0] = torch.nan
        told[str(having)] = gather_plain(_told(values))
        part.data[0, 0] = before
        mine = torch.tensor([1.0, torch.nan if dist.get_rank() == having else 2.0, -torch.inf])
        told[f"largest {having}"] = gather_plain([str(value) for value in largest_of_ranks(mine).tolist()])
    if dist.get_rank() == 0:
        (folder / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _told(values: Any) -> str:
    from posttrain.errors import CheckpointError

    try:
        values.agreed_magnitudes()
    except CheckpointError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
