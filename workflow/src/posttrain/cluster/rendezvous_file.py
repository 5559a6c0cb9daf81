"""How the pods of a gang find its head.

The head writes into a file on shared storage where it listens, with a secret that is new each time; only its own user
can read it. Who connects and who listens each prove that they have read it (`handshake`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from posttrain.store.durable import write_atomic

# Who waits for the other side says so, this often: a line per minute of a queue that may last for hours.
REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class RendezvousFile:
    """What the head tells its pods.

    Args:
        address: "host:port" where it listens.
        secret: What no other process knows.
    """

    address: str
    secret: str = dataclasses.field(repr=False)

    def write(self, path: Path) -> None:
        """Let processes of this user read it, and nobody else."""
        content = json.dumps(dataclasses.asdict(self)).encode()
        write_atomic(path, lambda file: file.write(content), mode=0o600)

    @staticmethod
    def read(path: Path) -> RendezvousFile:
        """Return what was written last.

        Raises:
            FileNotFoundError: Nothing was.
        """
        return RendezvousFile(**json.loads(path.read_text(encoding="utf-8")))
