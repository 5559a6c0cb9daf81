"""The section `stage`: copies on each node's own disk."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.document import _doc


@dataclass(frozen=True)
class Stage:
    """Copies of the weights on each node's own disk."""

    copy: str = _doc(
        "What is copied: nothing (ranks and engines read the shared file system), slices (the files that "
        "the node's ranks and engines need; the others become links), or everything",
        "everything",
        choices=("nothing", "slices", "everything"),
    )
    broadcast: str = _doc(
        "none: each node reads everything it needs from the shared file system; bittorrent: each file is "
        "read from there once and passed on between nodes",
        "none",
        choices=("none", "bittorrent"),
    )
    evict: str = _doc(
        "Which unused old copies are deleted to free space: never; oldest (the longest unused, if a disk "
        "is too full); unused (all unused for stage.evict_unused_days, at every staging). Copies in use "
        "are never deleted",
        "never",
        choices=("never", "oldest", "unused"),
    )
    evict_unused_days: float = _doc("Days without use, for evict=unused", 30.0, exclusive_minimum=0)
    workers: int = _doc("Files that a node copies at a time", 8, minimum=1)
