"""How the pods of a gang find its head.

The head writes its address and a new secret to a file on shared storage that only its own user can read. Both sides of
a connection prove that they know the secret (`handshake`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from posttrain.store.durable import write_atomic

# Seconds between log lines while waiting for the other side, in a queue that may last for hours.
REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class RendezvousFile:
    """The head's address and secret for its pods.

    Args:
        address: "host:port" where it listens.
        secret: What no other process knows.
    """

    address: str
    secret: str = dataclasses.field(repr=False)

    def write(self, path: Path) -> None:
        """Write the file, readable by this user only."""
        content = json.dumps(dataclasses.asdict(self)).encode()
        write_atomic(path, lambda file: file.write(content), mode=0o600)

    @staticmethod
    def read(path: Path) -> RendezvousFile:
        """Return what was written last.

        Raises:
            FileNotFoundError: Nothing was.
        """
        return RendezvousFile(**json.loads(path.read_text(encoding="utf-8")))
