"""File names from untrusted lists, which must not lead out of their folder."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.errors import CheckpointError

# What is put beside a file has its name and an ending, and file systems end names at 255 bytes.
MAX_PART_BYTES = 200
# A quarter of what Linux takes as a path: the folder it lies in comes before it.
MAX_NAME_BYTES = 1024
# Enough to recognise a hostile name by, and one line of a terminal.
SHOWN_CHARACTERS = 120


class RelativeName(str):
    r"""The name of a file inside a folder, parts joined by "/".

    It is not absolute, has no empty part, no "." and no "..", no backslash and nothing that cannot be printed, and no
    part is longer than `MAX_PART_BYTES`. So `folder / name` lies below `folder`, as long as no folder on the way is a
    link (see `below`), and a message that shows it is one line.

    Args:
        text: As read.
        where: The file that it was read from, for the message.

    Raises:
        CheckpointError: When it is not such a name; control characters are shown escaped.

    Example:
        "model-00001-of-00282.safetensors" and "templates/chat.jinja" are names; "/etc/passwd", "a/../b", "a//b",
        "a\\b" and "a\x1b[2J" are not.
    """

    __slots__ = ()

    def __new__(cls, text: object, where: object = "") -> RelativeName:  # noqa: D102 - see the class
        if isinstance(text, cls):
            return text
        if why := _fault(text):
            shown = ascii(text[:SHOWN_CHARACTERS]) if isinstance(text, str) else f"a {type(text).__name__}"
            source = f"{where}: " if where else ""
            raise CheckpointError(
                "name-leaves-folder", f"{source}{shown} is not the name of a file inside its folder: {why}"
            )
        return super().__new__(cls, text)

    def below(self, folder: Path) -> Path:
        """Return where the file lies, for one who writes or deletes there.

        Raises:
            CheckpointError: When a folder between the two is a link.
        """
        for parent in Path(self).parents:
            if parent != Path():
                refuse_link(folder / parent)
        return folder / self


def refuse_link(folder: Path) -> None:
    """Refuse a link where a folder of ours belongs.

    Raises:
        CheckpointError: Naming it.
    """
    if folder.is_symlink():
        raise CheckpointError(
            "link-in-the-way", f"{folder}: a link; remove it, or files behind it would be written or deleted"
        )


def check_digest(text: object, num_digits: int) -> None:
    """Refuse what is no digest, since files are named after digests; an empty one means that there is none.

    Raises:
        CheckpointError: When it is not of that many hexadecimal digits.
    """
    if not (isinstance(text, str) and re.fullmatch(rf"([0-9a-f]{{{num_digits}}})?", text)):
        raise CheckpointError(
            "digest-invalid", f"{ascii(text)[:SHOWN_CHARACTERS]} is not a digest of {num_digits} hexadecimal digits"
        )


def _fault(text: object) -> str:
    if not isinstance(text, str):
        return "no text"
    if not text.isprintable():
        return "it has characters that cannot be printed"
    if "\\" in text:
        return "it has a backslash"
    parts = text.split("/")
    if {"", ".", ".."} & set(parts):
        return 'an absolute path, or an empty part, "." or ".."'
    if max(len(part.encode()) for part in parts) > MAX_PART_BYTES or len(text.encode()) > MAX_NAME_BYTES:
        return f"longer than {MAX_PART_BYTES} bytes, or {MAX_NAME_BYTES} in all"
    return ""
