"""List unused artefacts, and the users of the others; delete unused ones on request."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from posttrain.errors import one_line
from posttrain.store import Paths
from posttrain.store.garbage import Stored, delete_unused, freed_bytes, list_store


def main(paths: Paths, delete: bool) -> None:
    """List every artefact, then the bytes that are or would be freed."""
    store, unused_days = paths.store, paths.resolved.config.site.unused_days
    found = list_store(store, unused_days) if store.is_dir() else []
    show(found, store, unused_days)
    unused = [artefact for artefact in found if artefact.is_unused]
    size = f"{freed_bytes(unused):,} bytes"
    if not delete and paths.resolved.request.get("gc") != "delete":
        print(f"{len(unused)} can be freed: {size}; nothing was deleted (gc=delete does)")
        return
    gone, errors = delete_unused(store, unused_days)
    print(f"{len(gone)} of {len(unused)} deleted, {size} in all:", *(artefact.folder for artefact in gone), sep="\n  ")
    if errors:
        raise RuntimeError("\n  ".join(["not everything could be deleted; all else was:", *errors]))


def show(found: list[Stored], store: Path, unused_days: float) -> None:
    """Print one row per artefact on stdout."""
    table = Table("artefact", "state", "last change", "used by", show_edge=False, header_style="bold")
    table.add_column("frees alone", justify="right")
    for artefact in found:
        users = [one_line(f"{user.user}: {user.run}") for user in artefact.users]
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(artefact.last_change_unix))
        size = f"{freed_bytes([artefact]):,}"
        cells = (
            one_line(str(artefact.folder.relative_to(store))),
            state_of(artefact, unused_days),
            changed,
            "\n".join(users),
            size,
        )
        table.add_row(*map(escape, cells))
    Console(width=160).print(table)


def state_of(artefact: Stored, unused_days: float) -> str:
    """Describe an artefact, and why it is kept if no run uses it."""
    if artefact.builder:
        return f"being made by {artefact.builder}"
    whole = "finished" if artefact.is_finished else "half made"
    if artefact.is_unused:
        return f"{whole}, unused"
    return (
        whole if artefact.users else f"{whole}, no run uses it; kept until {unused_days:g} days after its last change"
    )
