"""Logging set-up of every process: one line per record, on stderr, with time and the part that speaks."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging(role: str | None = None) -> None:
    """Send records of level INFO and above to stderr.

    Args:
        role: Who speaks, when several processes share a log ("trainer 0", "engine 1").
    """
    prefix = f"[{role}] " if role else ""
    logging.basicConfig(
        level=os.environ.get("POSTTRAIN_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s {prefix}%(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    # What these libraries say at INFO is about themselves, and buries what we say.
    for noisy in ("httpx", "httpcore", "filelock", "matplotlib", "urllib3", "megatron", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
