"""What torch's collectives of objects accept from another rank: real ranks, one of which sends what nobody should."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
from tests.support.megatron_single import run_ranks
from tests.support.payload import Payload
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from posttrain.rl.megatron_backend.messages import MessageUnpickler, read_messages_by_list

ROOT = Path(__file__).parents[4]
RANK = """
import pickle, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import torch.distributed as dist
from tests.support.megatron_single import test_config
from tests.support.payload import Payload
from tests.support.tiny_checkpoint import TINY

from posttrain.rl.megatron_backend.initialize import initialize

initialize(test_config(TINY, tensor_model_parallel_size=2))
message = Payload(Path(sys.argv[2])) if dist.get_rank() == 1 else None
try:
    dist.all_gather_object([None, None], message)
except pickle.UnpicklingError as error:
    print(error)
dist.barrier()
"""


def test_a_message_that_would_run_code_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    outputs = run_ranks(script, 2, str(ROOT), str(tmp_path / "ran"), timeout=90)
    assert not Payload(tmp_path / "ran").has_run
    assert "holds posix.mkdir, which ranks do not send; not executed" in outputs[0]
    assert "remedy: see in the other ranks' logs" in outputs[0]


def test_why_another_rank_failed_arrives() -> None:
    from posttrain.errors import CheckpointError

    failures = (
        *(OSError(28, "no space", "a/file"), CheckpointError("some-code", "tensor w is missing"), KeyError("w")),
        *(pickle.UnpicklingError("not allowed"), json.JSONDecodeError("no value", "{", 1), struct.error("too short")),
        *(zipfile.BadZipFile("no zip"), zlib.error("cut off")),
    )
    for failure in failures:
        try:
            raise failure
        except Exception as error:
            sent = CheckpointException("write", {1: _wrap_exception(error)})
        told = MessageUnpickler(io.BytesIO(pickle.dumps(sent))).load()
        (arrived, _) = told.failures[1]
        assert (type(arrived), str(arrived)) == (type(failure), str(failure))
        assert "in test_why_another_rank_failed_arrives\n    raise failure" in str(told)


def lookup_of(module: str, name: str) -> bytes:
    """Return a pickle that is a name alone: two texts, STACK_GLOBAL, STOP."""
    texts = (b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + b"".join(texts) + b"\x93."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "OSError.__subclasses__"),
        ("torch.storage", "_load_from_bytes"),
        ("posttrain.errors", "os"),
        ("posttrain.rl.megatron_backend.never_loaded", "Error"),
        ("subprocess", "CalledProcessError"),
    ],
)
def test_no_name_beyond_the_list_is_found(module: str, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=f"holds {module}.{name}, which"):
        MessageUnpickler(io.BytesIO(lookup_of(module, name))).load()


def test_what_is_listed_is_what_the_pinned_libraries_have() -> None:
    """One that a library has renamed would end a run in the middle of a save."""
    # Python 3.13 alone has pathlib._local.
    modules = {module: names for module, names in MessageUnpickler.CLASSES.items() if module != "pathlib._local"}
    listed = [(module, name) for module, names in modules.items() for name in names]
    for module, name in listed:
        found = MessageUnpickler(io.BytesIO(lookup_of(module, name))).load()
        assert found.__qualname__ == name
    assert len(listed) > 20


def test_a_torch_that_keeps_its_reader_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_unpickler")
    with pytest.raises(RuntimeError, match="where no list can be set"):
        read_messages_by_list()
