"""A stand-in for DeepEP's buffer: every rank of a group sends this rank the tokens that this rank sends itself."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from posttrain_rehearsal.recorder import Recorder
from posttrain_rehearsal.transformer_engine import require_same_device


@dataclass(frozen=True)
class _Handle:
    """Numbers of tokens that a dispatch sent and received."""

    sent: int
    received: int


class _Event:
    def __init__(self, *_: Any):
        pass

    def current_stream_wait(self) -> None:
        """Everything is done already."""


class _Sizes:
    """Sizes are 0: the plan has its own term for DeepEP's buffers, which torch does not allocate."""

    def get_nvl_buffer_size_hint(self, *_: int) -> int:
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def provide(recorder: Recorder) -> None:
    """Install a stand-in for `deep_ep`."""

    class Buffer:
        def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int):
            self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

        get_dispatch_config = get_combine_config = staticmethod(lambda size: _Sizes())
        set_num_sms = staticmethod(lambda count: None)

        def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
            return None, None, num_experts, None, None

        def dispatch(
            self, x: torch.Tensor, topk_idx: Any = None, handle: Any = None, num_tokens_per_expert: Any = None, **_: Any
        ) -> tuple[Any, ...]:
            """Return received tokens, their local experts (-1: other ranks'), their weights, counts and the handle."""
            if handle is not None:
                self._note("dispatch", x, handle.received)
                return x.new_empty(handle.received, x.shape[1]), None, None, None, None, _Event()
            require_same_device(x, topk_idx)
            size, num_local = self.group.size(), num_tokens_per_expert // self.group.size()
            chosen = recorder.values(topk_idx)
            assert chosen is not None, "which experts a token goes to is drawn"
            mine = chosen - self.group.rank() * num_local
            is_mine = (mine >= 0) & (mine < num_local)
            counts = [size * int((mine == expert).sum()) for expert in range(num_local)]
            arrived = torch.where(is_mine, mine, -1)[is_mine.any(-1)].repeat(size, 1)
            self._note("dispatch", x, len(arrived))
            weights = torch.empty(arrived.shape, dtype=torch.float32, device=x.device)
            rows = x.new_empty(len(arrived), x.shape[1])
            return rows, arrived.to(x.device), weights, counts, _Handle(len(x), len(arrived)), _Event()

        def combine(self, x: torch.Tensor, handle: _Handle, topk_weights: Any = None, **_: Any) -> tuple[Any, ...]:
            assert len(x) == handle.received, f"{len(x)} rows come back of {handle.received}"
            self._note("combine", x, handle.sent)
            weights = None if topk_weights is None else topk_weights.new_empty(handle.sent, topk_weights.shape[1])
            return x.new_empty(handle.sent, x.shape[1]), weights, _Event()

        def _note(self, name: str, x: torch.Tensor, count: int) -> None:
            recorder.collective(f"deepep {name}", self.group, [x], count * x.shape[1] * x.element_size())

    module, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    module.Buffer, module.utils = Buffer, utils  # type: ignore[attr-defined]
    utils.EventHandle = utils.EventOverlap = _Event  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": module, "deep_ep.utils": utils}
