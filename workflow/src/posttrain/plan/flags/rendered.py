"""Every flag of Megatron Core, SGLang and the processes' environments, with its value and origin.

The tables of `sglang_flags` and `megatron_flags` are the only definition: the plan prints them, and
`rl.engines.launch_command` and `rl.megatron_backend.arguments` start processes from them, so the two cannot differ.
This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.schema import Config
from posttrain.plan.flags.megatron_flags import megatron_flags
from posttrain.plan.flags.sglang_flags import engine_flags


def rendered_flags(config: Config, origins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return "reader flag" -> value, origin, keys and reason, for `plan.json`.

    The readers are `megatron.model`, `megatron.ddp`, `megatron.optimizer`, `trainer.env`, and for each kind of engine
    `sglang` or `embedded` (with separate prefill `sglang.prefill` and `sglang.decode`) and its `.env`.

    Args:
        config: The resolved configuration.
        origins: Dotted key -> the layer that set it.

    Example:
        `rendered_flags(...)["sglang --tp-size"]["value"]` is 64 in the recipe of 16 nodes.
    """
    readers = megatron_flags(config) | engine_flags(config)
    return {f"{reader} {item.name}": item.as_dict(origins) for reader, items in readers.items() for item in items}
