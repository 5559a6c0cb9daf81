"""Files that are not a model's: pointers left by Git, and pages from a server."""

from __future__ import annotations

import re
from pathlib import Path

_GIT_LFS = b"version https://git-lfs.github.com/spec/"
_GIT_XET = b"# xet version "
# Pages may begin with a byte order mark, a comment or an XML declaration.
_BEFORE = rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*"
_PAGE = re.compile(_BEFORE + rb"<(?:!doctype\s+html|html|head|body)\b", re.I | re.S)
_SIZE = re.compile(rb"^size (\d+)$", re.M)
_HEAD_BYTES = 1024


def placeholder(path: Path) -> str:
    """Return what a file is instead of a model's, with the remedy, or "".

    Args:
        path: An existing file; only its beginning is read.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith((_GIT_LFS, _GIT_XET)):
        kind = "Git LFS" if head.startswith(_GIT_LFS) else "Git Xet"
        found = _SIZE.search(head)
        size = f" of {int(found[1])} bytes" if found else ""
        command = "git lfs pull" if kind == "Git LFS" else "git xet checkout"
        return f"a {kind} pointer, not the file{size} that it stands for: run `{command}` in its clone, or download it"
    if _PAGE.match(head):
        return "an HTML page, not a file of a model: download it again, signed in if its repository asks for that"
    return ""
