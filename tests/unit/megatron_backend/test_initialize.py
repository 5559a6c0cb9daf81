"""What joining the ranks does to the process."""

from __future__ import annotations

import base64
import pickletools

import torch
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TINY

from posttrain.engines.tensor_payload import deserialize_bucket, serialize_bucket


def test_engines_read_what_a_trainer_pickles():
    """Importing Megatron puts another function where torch's reader of storages was."""
    initialize_single_rank(test_config(TINY))
    payload = serialize_bucket([("w", torch.arange(6.0).view(2, 3))])
    words = [str(word) for _, word, _ in pickletools.genops(base64.b64decode(payload)) if isinstance(word, str)]
    assert "_load_from_bytes" in words
    assert not [word for word in words if "megatron" in word]
    ((name, tensor),) = deserialize_bucket(payload)
    assert (name, tensor.tolist()) == ("w", [[0, 1, 2], [3, 4, 5]])
