"""What ranks may send each other as pickles while torch and Megatron save and load: plans, and why a rank failed.

torch's collectives of objects unpickle whatever comes, and gloo asks nobody who he is.
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
    # What reading and writing a checkpoint raises, besides the exceptions below.
    "_pickle": {"PicklingError", "UnpicklingError"},
    "json.decoder": {"JSONDecodeError"},
    "struct": {"error"},
    "zipfile": {"BadZipFile", "LargeZipFile"},
    "zlib": {"error"},
}
# Whose exceptions are made anew from what a message says; those of others may do anything when they are made.
_RAISED_BY = ("builtins", "megatron", "posttrain", "torch")


class MessageUnpickler(FormatUnpickler):
    """Unpickles plans of saves and loads, and exceptions; everything else is refused by name."""

    CLASSES: Mapping[str, Set[str]] = {
        module: FORMAT_CLASSES.get(module, set()) | _MESSAGE_CLASSES.get(module, set())
        for module in (*FORMAT_CLASSES, *_MESSAGE_CLASSES)
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of a plan, or of an exception that is loaded already.

        Raises:
            UnpicklingError: For anything else.
        """
        if module.partition(".")[0] in _RAISED_BY:
            # Not getattr: modules may import what they are asked for.
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
    """Let torch's collectives of objects read with `MessageUnpickler`, in this process.

    Raises:
        RuntimeError: This torch keeps its reader somewhere else.
    """
    if not hasattr(distributed_c10d, "_unpickler"):
        raise RuntimeError(
            "this torch unpickles messages between ranks where no list can be set; use the pinned version"
        )
    distributed_c10d._unpickler = MessageUnpickler
