"""How a process of a gang starts inside the site's image: always behind `srun`, which itself stays outside.

    srun OPTIONS apptainer exec ... image.sif env ... python scripts/train_grpo.py ...
    srun OPTIONS --container-image=image.sqsh ... env ... python scripts/train_grpo.py ...

The image holds the environment, as one file; the workflow's own code comes from the folder of its clone, so that what
runs is what was planned. Variables of the job, the secrets among them, pass through both runtimes as they are: they
stand on no command line.

Sources: apptainer-exec(1), https://apptainer.org/docs/user/main/; Pyxis' options,
https://github.com/NVIDIA/pyxis/wiki/Usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import posttrain
from posttrain.config.schema import Config

# Where this package is imported from: `workflow/src` of the clone, in which the scripts lie too.
CODE = Path(posttrain.__file__).resolve().parents[1]
CLONE = CODE.parents[1]


def srun_options(config: Config) -> tuple[str, ...]:
    """Return what srun gets so that Pyxis starts its tasks in the image; nothing for the other runtimes."""
    container = config.site.container
    if container.runtime != "pyxis":
        return ()
    return (
        f"--container-image={container.image}",
        f"--container-mounts={','.join(_mounts(config))}",
        f"--container-workdir={Path.cwd()}",
        *container.options,
    )


def wrap(command: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return a command as srun starts it on a node.

    Args:
        command: Words; the interpreter of this process becomes the image's `python`.
        config: With `site.container`.

    Returns:
        The command itself where the nodes' own environment is used.
    """
    container = config.site.container
    if container.runtime == "none":
        return tuple(command)
    interpreter = ("python",) if command[0] == sys.executable else (command[0],)
    inside = ("env", f"PYTHONPATH={CODE}", *interpreter, *command[1:])
    if container.runtime == "pyxis":
        return inside
    devices = ("--nv",) if config.hardware.device == "cuda" else ()
    binds = ("--bind", ",".join(_mounts(config)))
    folder = ("--pwd", str(Path.cwd()))
    return ("apptainer", "exec", *devices, *binds, *folder, *container.options, container.image, *inside)


def _mounts(config: Config) -> list[str]:
    """Return `outside:inside` of what the workflow reads and writes, then what the site adds."""
    site = config.site
    own = [Path.cwd(), CLONE, *(Path(folder) for folder in (site.store, site.results, site.node_local))]
    mounts = [f"{folder}:{folder}" for folder in dict.fromkeys(os.path.abspath(folder) for folder in own)]
    return mounts + [mount if ":" in mount else f"{mount}:{mount}" for mount in site.container.mounts]
