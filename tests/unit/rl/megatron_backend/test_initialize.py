"""What joining the ranks does to the process."""

from __future__ import annotations

import base64
import pickletools

import pytest
import torch
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TINY

from posttrain.rl.engines.tensor_payload import deserialize_bucket, serialize_bucket
from posttrain.rl.megatron_backend import cpu


def test_engines_read_what_a_trainer_pickles():
    """Importing Megatron puts another function where torch's reader of storages was."""
    initialize_single_rank(test_config(TINY))
    payload = serialize_bucket([("w", torch.arange(6.0).view(2, 3))])
    words = [str(word) for _, word, _ in pickletools.genops(base64.b64decode(payload)) if isinstance(word, str)]
    assert "_load_from_bytes" in words
    assert not [word for word in words if "megatron" in word]
    ((name, tensor),) = deserialize_bucket(payload)
    assert (name, tensor.tolist()) == ("w", [[0, 1, 2], [3, 4, 5]])


def test_a_gpu_that_is_not_to_be_used_has_to_be_hidden(monkeypatch):
    """Megatron would wait for streams of a device that no tensor is on, and end by SIGSEGV."""
    monkeypatch.setattr(cpu, "_enabled", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="set CUDA_VISIBLE_DEVICES to nothing"):
        cpu.enable_cpu()
