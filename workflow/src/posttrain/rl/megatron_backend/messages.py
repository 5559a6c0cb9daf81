"""Restricts the pickles that ranks exchange while torch and Megatron save and load: to plans and exceptions.

torch's object collectives unpickle anything they receive, and gloo does not authenticate peers.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Set
from typing import Any

from torch.distributed import distributed_c10d

from posttrain.checkpoint.formats.torch_dist_format import FORMAT_CLASSES, FormatUnpickler

_FORMAT = "torch.distributed.checkpoint."
_MESSAGE_CLASSES = {
    f"{_FORMAT}filesystem": {"_StoragePrefix"},
    f"{_FORMAT}planner": {"LoadItemType", "LoadPlan", "ReadItem"},
    f"{_FORMAT}storage": {"WriteResult"},
    "megatron.core.dist_checkpointing.mapping": {"ShardedObject", "ShardedTensor"},
    "traceback": {"FrameSummary", "StackSummary"},
    # Exceptions of reading and writing a checkpoint, besides those below.
    "_pickle": {"PicklingError", "UnpicklingError"},
    "json.decoder": {"JSONDecodeError"},
    "struct": {"error"},
    "zipfile": {"BadZipFile", "LargeZipFile"},
    "zlib": {"error"},
}
# Modules whose exceptions may be constructed from a message; constructors of others may run arbitrary code.
_RAISED_BY = ("builtins", "megatron", "posttrain", "torch")


class MessageUnpickler(FormatUnpickler):
    """Unpickles save and load plans, and exceptions; refuses everything else by name."""

    CLASSES: Mapping[str, Set[str]] = {
        module: FORMAT_CLASSES.get(module, set()) | _MESSAGE_CLASSES.get(module, set())
        for module in (*FORMAT_CLASSES, *_MESSAGE_CLASSES)
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class used in plans, or an exception class that is already imported.

        Raises:
            UnpicklingError: For anything else.
        """
        if module.partition(".")[0] in _RAISED_BY:
            # Not getattr, which may trigger a module's lazy imports.
            found = getattr(sys.modules.get(module), "__dict__", {}).get(name)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError as error:
            text = (
                f"a message said to be from another rank holds {module}.{name}, which ranks do not send; not executed"
            )
            remedy = "see in the other ranks' logs whether one failed with it; else somebody else is on this network"
            raise pickle.UnpicklingError(f"{text}\n  remedy: {remedy} (docs/threat-model.md)") from error


def read_messages_by_list() -> None:
    """Make torch's object collectives in this process use `MessageUnpickler`.

    Raises:
        RuntimeError: This torch version keeps its unpickler elsewhere.
    """
    if not hasattr(distributed_c10d, "_unpickler"):
        raise RuntimeError(
            "this torch unpickles messages between ranks where no list can be set; use the pinned version"
        )
    distributed_c10d._unpickler = MessageUnpickler
