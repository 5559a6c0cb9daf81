"""How the pods of a gang find its head, and how either side knows that the other belongs to the run.

The head writes into a file on shared storage where it listens, with a secret that is new each time; only its own user
can read it. Who connects and who listens each prove that they have read it, with a text that the other has just made
up; the secret itself is never sent.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from posttrain.artifacts.durable import write_atomic

HEAD = "head"
# Who connects and does not show in this time who it is, is sent away.
GREETING_SECONDS = 30.0
# Who waits for the other side says so, this often.
REMIND_SECONDS = 60.0


@dataclass(frozen=True)
class Invitation:
    """What the head tells its pods.

    Args:
        address: "host:port" where it listens.
        secret: What no other process knows.
    """

    address: str
    secret: str = dataclasses.field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def write(self, path: Path) -> None:
        """Let processes of this user read it, and nobody else."""
        content = json.dumps(dataclasses.asdict(self)).encode()
        write_atomic(path, lambda file: file.write(content), mode=0o600)

    @staticmethod
    def read(path: Path) -> Invitation:
        """Return the invitation that was written last.

        Raises:
            FileNotFoundError: There is none.
        """
        return Invitation(**json.loads(path.read_text(encoding="utf-8")))

    def proof(self, side: str, challenge: str) -> str:
        """Return what shows that one side knows the secret.

        Args:
            side: Who shows it: `HEAD`, or the pod's rank.
            challenge: Made up by the other side, for this once.
        """
        return hmac.digest(self.secret.encode(), f"{side} {challenge}".encode(), "sha256").hex()

    def is_proof(self, proof: object, side: str, challenge: str) -> bool:
        """Tell whether this is the proof of that side."""
        return hmac.compare_digest(str(proof).encode(), self.proof(side, challenge).encode())


def make_challenge() -> str:
    """Return a text that was never used before."""
    return secrets.token_hex(16)
