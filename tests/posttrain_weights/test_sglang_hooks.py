"""What the plug-in registers in SGLang: without one of these hooks SGLang works, and is wrong."""

import enum
import sys
from types import ModuleType

import pytest

from posttrain_weights import engine_handlers, finished_batches, routed_experts, sglang_hooks


@pytest.mark.parametrize("version", [sglang_hooks.VERSION, "0.0.1"])
def test_every_hook_is_registered_and_only_in_the_tested_version(monkeypatch, version):
    registered = {}
    sglang, registry = ModuleType("sglang"), ModuleType("hook_registry")
    sglang.__version__ = version
    registry.HookType = enum.Enum("HookType", ["AROUND"])
    registry.HookRegistry = type("HookRegistry", (), {"register": lambda *given: registered.update([given[:2]])})
    monkeypatch.setitem(sys.modules, "sglang", sglang)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    structs = ModuleType("io_struct")
    structs.Function = type("Function", (), {})
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)
    sglang_hooks.register()
    expected = {
        sglang_hooks.HANDLER: engine_handlers.answer,
        sglang_hooks.PAUSED: finished_batches.finish_first,
        sglang_hooks.PROCESSED: finished_batches.skip_processed,
        sglang_hooks.CAPTURED: routed_experts.packed,
        sglang_hooks.PINNED: routed_experts.where_there_are_gpus,
    }
    assert registered == (expected if version == sglang_hooks.VERSION else {})
    assert hasattr(structs.Function, "strict") == (version == sglang_hooks.VERSION)
