"""Every flag that Megatron Core, SGLang and the processes' environments get, with its value and where it comes from.

The tables of `sglang_flags` and `megatron_flags` are the only place that spells them: the plan prints them,
`rl.engines.launch_command` and `rl.megatron_backend.arguments` start processes from them, so the two cannot differ. No
torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.config.schema import Config
from posttrain.plan.flags.megatron_flags import megatron_flags
from posttrain.plan.flags.sglang_flags import engine_flags


def rendered_flags(config: Config, origins: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return "reader flag" -> value, origin, keys and reason, for `plan.json`.

    The readers are `megatron.model`, `megatron.ddp`, `megatron.optimizer`, `trainer.env`, and per kind of engine
    `sglang` or `embedded` (`sglang.prefill` and `sglang.decode` when they are apart) and its `.env`.

    Args:
        config: The resolved configuration.
        origins: Dotted key -> the layer that set it.

    Example:
        `rendered_flags(...)["sglang --tp-size"]["value"]` is 64 in the recipe of 16 nodes.
    """
    readers = megatron_flags(config) | engine_flags(config)
    return {f"{reader} {item.name}": item.as_dict(origins) for reader, items in readers.items() for item in items}
