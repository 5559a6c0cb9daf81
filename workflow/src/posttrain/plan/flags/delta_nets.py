"""SGLang's settings for gated delta nets.

SGLang 0.5.23 chooses the rest itself. With its prefix cache (`arg_groups/overrides.py`, `mamba_hook.py`) a running
request takes five slots of states, one without; fewer slots cap `--max-running-requests`. On Blackwell it chooses
TRT-LLM's attention, or Triton's (`arg_groups/model_overrides/qwen3_5.py`). `--language-model-only` is refused for
Qwen3.5, so its engines hold the vision tower.
"""

from __future__ import annotations

from posttrain.config.schema import Config
from posttrain.plan.flags.flag import Flag, flag


def delta_net_environment(config: Config) -> list[Flag]:
    """Return the precision of a convolution's states, else BF16 (SGLang 0.5.23, `srt/configs/mamba_utils.py`)."""
    if not config.model.architecture.full_attention_interval or config.engine.dtype == "bfloat16":
        return []
    reason = "the convolution's state holds its last inputs, in the engine's dtype"
    return [flag("SGLANG_MAMBA_CONV_DTYPE", config.engine.dtype, "engine.dtype", reason=reason)]
