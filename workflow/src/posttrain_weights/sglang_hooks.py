"""The SGLang plug-in: handlers that report the weights held, and compact routed experts.

It runs in SGLang's processes, by SGLang's own way for plug-ins (`sglang.srt.plugins`), and needs nothing but torch,
on GPUs Triton as well. Its way in is SGLang's `/weights_checker`, whose `action` is free text: one that is a JSON
object is for us, reaches every rank of an engine between two batches, and each rank's answer goes back.

Written against SGLang 0.5.23: `srt/utils/weight_checker.py`, `srt/managers/scheduler_components/weight_updater.py`.
"""

from __future__ import annotations

import logging

VERSION = "0.5.23"
HANDLER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
PINNED = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
CAPTURED = "sglang.srt.state_capturer.base.BaseTopkCapturer.get_topk"


def register() -> None:
    """Register the handlers in every SGLang process; with an untested version none, which the trainer reports."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if sglang.__version__ != VERSION:
        logging.getLogger(__name__).error("SGLang %s: this plug-in is for %s", sglang.__version__, VERSION)
        return
    from posttrain_weights.engine_handlers import answer
    from posttrain_weights.routed_experts import packed, where_there_are_gpus

    HookRegistry.register(HANDLER, answer, HookType.AROUND)
    HookRegistry.register(CAPTURED, packed, HookType.AROUND)
    HookRegistry.register(PINNED, where_there_are_gpus, HookType.AROUND)
