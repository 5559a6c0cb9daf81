"""One rank of four: the product's own updates with each way to recompute, in some layouts.

Prints JSON: layout -> setting -> what the updates said, and a digest of the weights after them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from posttrain.config.schema import Config

# What a CPU can recompute, norms in BF16 alone; grouped experts are Transformer Engine's.
MODULES = {"fp32": ("mla_up_proj", "mlp", "shared_experts", "moe")}
MODULES["bf16"] = ("layernorm", *MODULES["fp32"])


def settings(dtype: str) -> dict[str, dict[str, Any]]:
    """Return name -> keys of the trainer; the first recomputes nothing."""
    outside, inside = (
        [name for name in MODULES[dtype] if name not in left] for left in (("shared_experts",), ("moe",))
    )
    chosen = {
        "none": {"recompute_granularity": "none"},
        "full": {"recompute_granularity": "full"},
        "block": {"recompute_granularity": "full", "recompute_method": "block"},
        "kept choice": {"recompute_granularity": "full", "keep_index_choice": "all"},
        "outside": {"recompute_granularity": "selective", "recompute_modules": outside},
        "inside": {"recompute_granularity": "selective", "recompute_modules": inside},
    }
    return {name: {"params_dtype": dtype, **keys} for name, keys in chosen.items()}


def with_setting(config: Config, setting: Mapping[str, Any]) -> Config:
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, **setting))


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path.insert(0, request["root"])
    from tests.support.chosen_keys import reference_kernel
    from tests.support.context_updates import small_batches, updated
    from tests.support.family_updates import lay_out

    found: dict[str, dict[str, object]] = {}
    for layout, parallel in request["layouts"].items():
        config = small_batches(parallel, request["ranks"])
        lay_out(config)
        kernel = reference_kernel if request["by_kernel"] else None
        found[layout] = {
            name: updated(with_setting(config, setting), Path(request["checkpoint"]), kernel)
            for name, setting in settings(request["dtype"]).items()
        }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
