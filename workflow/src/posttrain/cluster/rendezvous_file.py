"""The file by which the pods of a gang find its head.

The head writes its address and a new secret to a file on shared storage that only its own user can read. Both ends of a
connection prove that they know the secret (`handshake`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from posttrain.store.durable import write_atomic

# Seconds between log lines while waiting for the other pods, which may be queued for hours.
REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class RendezvousFile:
    """The head's address and secret for its pods.

    Args:
        address: The head's "host:port".
        secret: A secret of this gang.
    """

    address: str
    secret: str = dataclasses.field(repr=False)

    def write(self, path: Path) -> None:
        """Write the file, readable by this user only."""
        content = json.dumps(dataclasses.asdict(self)).encode()
        write_atomic(path, lambda file: file.write(content), mode=0o600)

    @staticmethod
    def read(path: Path) -> RendezvousFile:
        """Read the file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        return RendezvousFile(**json.loads(path.read_text(encoding="utf-8")))
