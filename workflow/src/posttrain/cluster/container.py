"""Starts processes inside the site's container image, always through `srun`, which itself runs outside.

    srun OPTIONS apptainer exec ... image.sif env ... python -m posttrain.cluster.node ...
    srun OPTIONS --container-image=image.sqsh ... env ... python -m posttrain.cluster.node ...

So start the supervisors of a gang, and all that they start. The command of any other job starts in the image, too,
behind the `srun` of Snakemake's executor or one of its own; nodes need no environment but Snakemake's. A rule's
`container:` would not do: it knows no Pyxis, and takes in what the driver runs by itself.

The image holds the environment, as one file; the workflow's own code comes from the folder of its clone, so that what
runs is what was planned. Variables of the job, the secrets among them, pass through both runtimes as they are: they
stand on no command line.

Sources: apptainer-exec(1), https://apptainer.org/docs/user/main/; Pyxis' options,
https://github.com/NVIDIA/pyxis/wiki/Usage.
"""

from __future__ import annotations

import glob
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import posttrain
from posttrain.config.data import LOCAL_DATA
from posttrain.config.schema import Config

# Where this package is imported from: `workflow/src` of the clone, in which the scripts lie too.
CODE = Path(posttrain.__file__).resolve().parents[1]
CLONE = CODE.parents[1]
# A step beside the one of Snakemake's executor, with all that the job has.
ONE_TASK = ("srun", "--overlap", "--nodes", "1", "--ntasks", "1", "--mem", "0", "--cpu-bind", "none")


def srun_options(config: Config, with_disk: bool = True) -> tuple[str, ...]:
    """Return what a gang's srun gets so that Pyxis starts its tasks in the image; nothing for the other runtimes.

    Args:
        config: With `site.container`.
        with_disk: The nodes' own disks are shown.
    """
    return _options(config, _mounts(config, *[config.site.node_local] * with_disk))


def wrap(command: Sequence[str], config: Config, with_disk: bool = True) -> tuple[str, ...]:
    """Return a command as a gang's srun starts it on a node.

    Args:
        command: Words; the interpreter of this process becomes the image's `python`.
        config: With `site.container`.
        with_disk: See `srun_options`.

    Returns:
        The command itself where the nodes' own environment is used.
    """
    if config.site.container.runtime == "none":
        return tuple(command)
    interpreter = "python" if command[0] == sys.executable else command[0]
    return (*_entry(config, _mounts(config, *[config.site.node_local] * with_disk)), interpreter, *command[1:])


def prefix_of_jobs(config: Config) -> str:
    """Return what stands before `python` in the shell command of any other job; empty where there is no image."""
    if config.site.container.runtime == "none":
        return ""
    mounts = _mounts(config)
    step = ONE_TASK if config.site.container.runtime == "pyxis" else ()
    return shlex.join([*step, *_options(config, mounts), *_entry(config, mounts)]) + " "


def make_shared_roots(config: Config) -> None:
    """Make the folders that all nodes share, if there is an image: runtimes mount only folders that exist."""
    if config.site.container.runtime != "none":
        for folder in (config.site.store, config.site.results):
            os.makedirs(folder, exist_ok=True)


def _options(config: Config, mounts: Sequence[str]) -> tuple[str, ...]:
    """Return the options of srun."""
    container = config.site.container
    if container.runtime != "pyxis":
        return ()
    shown = f"--container-mounts={','.join(mounts)}"
    return (f"--container-image={container.image}", shown, f"--container-workdir={Path.cwd()}", *container.options)


def _entry(config: Config, mounts: Sequence[str]) -> tuple[str, ...]:
    """Return the words before a command that srun starts."""
    container, inside = config.site.container, ("env", f"PYTHONPATH={CODE}")
    if container.runtime == "pyxis":
        return inside
    devices = ("--nv",) if config.hardware.device == "cuda" else ()
    binds, folder = ("--bind", ",".join(mounts)), ("--pwd", str(Path.cwd()))
    return ("apptainer", "exec", *devices, *binds, *folder, *container.options, container.image, *inside)


def _mounts(config: Config, *of_the_node: str) -> list[str]:
    """Return `outside:inside` of what the workflow reads and writes, then what the site adds."""
    site, added = config.site, config.site.container.mounts
    own = (Path.cwd(), CLONE, site.store, site.results, *of_the_node, *_sources(config))
    folders = dict.fromkeys(os.path.abspath(str(folder)) for folder in own)
    # What lies in a folder that is shown needs no mount of its own; between mounts there are no hard links.
    shown = {*folders, *added}
    widest = [folder for folder in folders if shown.isdisjoint(map(str, Path(folder).parents))]
    return [
        *(f"{folder}:{folder}" for folder in widest if folder not in added),
        *(mount if ":" in mount else f"{mount}:{mount}" for mount in added),
    ]


def _sources(config: Config) -> Iterator[str]:
    """Yield the files and folders that the configuration names beside the workflow's own."""
    if config.model.source.kind == "folder":
        yield config.model.source.folder
    if config.data.kind in LOCAL_DATA:
        # Of a pattern, the folder in which it begins.
        yield from (_fixed_part(name) for name in (config.data.train_file, config.data.heldout_file))
    folders = (config.download.torch_dist_folder, config.export.checkpoint_folder)
    yield from filter(None, (*folders, config.evaluation.lm_eval.task_folder))
    yield from config.serving.calibration
    yield from (_fixed_part(wanted.file) for wanted in config.serving.passes.values() if wanted.kind == "files")


def _fixed_part(pattern: str) -> str:
    path = Path(pattern)
    while glob.has_magic(str(path)) and not path.exists():
        path = path.parent
    return str(path)
