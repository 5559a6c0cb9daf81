"""The SGLang plug-in: handlers that report the weights held, compact routed experts, exact versions of tokens, and
tool calls that all of SGLang's parsers read.

SGLang's plug-in mechanism (`sglang.srt.plugins`) loads it in all of SGLang's processes; it needs only torch, and Triton
on GPUs. Commands come through SGLang's `/weights_checker`, whose `action` is free text: a JSON object is one of our
commands. It reaches every rank of an engine between two batches, and each rank's answer is returned.

Written against SGLang 0.5.23: `srt/utils/weight_checker.py`, `srt/managers/scheduler_components/weight_updater.py`.
"""

from __future__ import annotations

import logging

VERSION = "0.5.23"
HANDLER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
PAUSED = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
PROCESSED = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
PINNED = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
CAPTURED = "sglang.srt.state_capturer.base.BaseTopkCapturer.get_topk"


def register() -> None:
    """Register the handlers in every SGLang process, but not in untested versions, which the trainer reports."""
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if sglang.__version__ != VERSION:
        logging.getLogger(__name__).error("SGLang %s: this plug-in is for %s", sglang.__version__, VERSION)
        return
    from posttrain_weights.engine_handlers import answer
    from posttrain_weights.finished_batches import finish_first, skip_processed
    from posttrain_weights.routed_experts import packed, where_there_are_gpus

    _let_every_parser_read_calls()
    HookRegistry.register(HANDLER, answer, HookType.AROUND)
    HookRegistry.register(CAPTURED, packed, HookType.AROUND)
    HookRegistry.register(PAUSED, finish_first, HookType.AROUND)
    HookRegistry.register(PROCESSED, skip_processed, HookType.AROUND)
    HookRegistry.register(PINNED, where_there_are_gpus, HookType.AROUND)


def _let_every_parser_read_calls() -> None:
    """Give the functions of /parse_function_call a field that glm47's parser reads; without it, it answers HTTP 500."""
    from sglang.srt.managers.io_struct import Function

    if not hasattr(Function, "strict"):
        Function.strict = None
