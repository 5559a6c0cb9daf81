"""Finds where the W&B library gets its API key: the environment, or the file that `wandb login` writes."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_URL = "https://api.wandb.ai"


def login_of_wandb() -> str:
    """Return the source of the key, "WANDB_API_KEY" or the netrc file, or ""; never the key itself."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entry = netrc.netrc(path).authenticators(_host()) if path.is_file() else None
    except (netrc.NetrcParseError, OSError):
        return ""
    return str(path) if entry and entry[2] else ""


def _host() -> str:
    return urlsplit(os.environ.get("WANDB_BASE_URL") or DEFAULT_URL).hostname or ""
