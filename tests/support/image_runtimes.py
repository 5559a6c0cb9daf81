"""Programs in the place of Apptainer and of Pyxis, which tests cannot install: both need more than a package.

They note how they are called, refuse what the real ones refuse (an image or a folder to show that is not there), and
run the command where they are: no other file system is around it. What a real image adds to that is not tested.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

# $NOTES stands for a file, $SRUN for the real srun.
APPTAINER = """#!/bin/bash
echo "${@@Q}" >> $NOTES
[ "$1" = exec ] || { echo "unknown command $1" >&2; exit 64; }
while [[ $1 != *.sif ]]; do
  if [ "$1" = --bind ]; then shown=$2; fi
  shift
done
for path in "$1" $(tr , '\\n' <<< "$shown" | cut -d: -f1); do
  [ -e "$path" ] || { echo "FATAL: $path does not exist" >&2; exit 255; }
done
shift
exec "$@"
"""
SRUN_WITH_PYXIS = """#!/bin/bash
echo "${@@Q}" >> $NOTES
words=()
for word in "$@"; do
  case $word in
    --container-image=*) [ -e "${word#*=}" ] || { echo "pyxis: no image ${word#*=}" >&2; exit 1; } ;;
    --container-mounts=*)
      for path in $(tr , '\\n' <<< "${word#*=}" | cut -d: -f1); do
        [ -e "$path" ] || { echo "pyxis: $path does not exist" >&2; exit 1; }
      done ;;
    --container-workdir=*) ;;
    *) words+=("$word") ;;
  esac
done
exec $SRUN "${words[@]}"
"""
PROGRAM_OF = {"apptainer": ("apptainer", APPTAINER, "cpu.sif"), "pyxis": ("srun", SRUN_WITH_PYXIS, "cpu.sqsh")}


@dataclass(frozen=True)
class ImageRuntime:
    """A program that stands for a runtime, first on the PATH of who asks for it.

    Args:
        folder: Gets the program, an image and the notes.
        name: "apptainer" or "pyxis".
    """

    folder: Path
    name: str

    def __post_init__(self) -> None:
        program, text, _ = PROGRAM_OF[self.name]
        (self.folder / "bin").mkdir(parents=True)
        self.image.touch()
        path = self.folder / "bin" / program
        path.write_text(text.replace("$NOTES", shlex.quote(str(self._notes))).replace("$SRUN", "/usr/bin/srun"))
        path.chmod(0o755)

    @property
    def image(self) -> Path:
        return self.folder / PROGRAM_OF[self.name][2]

    @property
    def settings(self) -> dict[str, object]:
        """What a site says."""
        return {"site.container.runtime": self.name, "site.container.image": self.image}

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}

    def calls(self) -> list[list[str]]:
        """Return the words of each call that starts something in the image, in order."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        starts = {str(self.image), f"--container-image={self.image}"}
        return [words for line in lines if starts & set(words := shlex.split(line))]

    @property
    def _notes(self) -> Path:
        return self.folder / "calls.txt"
