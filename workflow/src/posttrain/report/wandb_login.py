"""Where the W&B library finds its API key: in the environment, or where `wandb login` has put it."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_URL = "https://api.wandb.ai"


def login_of_wandb() -> str:
    """Return where the key comes from, "WANDB_API_KEY" or the netrc file; empty where there is none. Never the key."""
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
