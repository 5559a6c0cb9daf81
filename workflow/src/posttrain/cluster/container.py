"""Starts processes inside the site's container image, always through `srun`, which itself runs outside.

    srun OPTIONS apptainer exec ... image.sif env ... python -m posttrain.cluster.node ...
    srun OPTIONS --container-image=image.sqsh ... env ... python -m posttrain.cluster.node ...

Supervisors and their child processes start this way. The command of any other job starts in the image, too, behind the
`srun` of Snakemake's executor or one of its own, so nodes need only Snakemake's environment. A rule's `container:` does
not support Pyxis, and would also contain what the driver itself runs.

The image, one file, holds the environment. The workflow's own code comes from its clone, so that the code that runs is
the code that was planned. The job's variables, secrets included, pass through both runtimes unchanged and never appear
on a command line.

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
from posttrain.config.own_environment import is_own
from posttrain.config.own_reward import trained_rewards
from posttrain.config.reward_sum import parse_reward
from posttrain.config.schema import Config
from posttrain.config.suites import suite_rewards

# The folder from which this package is imported: `workflow/src` of the clone, which has the scripts, too.
CODE = Path(posttrain.__file__).resolve().parents[1]
CLONE = CODE.parents[1]
# A job step that overlaps the step of Snakemake's executor and has all of the job's resources.
ONE_TASK = ("srun", "--overlap", "--nodes", "1", "--ntasks", "1", "--mem", "0", "--cpu-bind", "none")


def srun_options(config: Config, with_disk: bool = True) -> tuple[str, ...]:
    """Return the options with which a gang's srun starts its tasks in a Pyxis image; empty for other runtimes.

    Args:
        config: Its `site.container` is used.
        with_disk: Mount the nodes' own disks.
    """
    return _options(config, _mounts(config, *[config.site.node_local] * with_disk))


def wrap(command: Sequence[str], config: Config, with_disk: bool = True) -> tuple[str, ...]:
    """Return a command as a gang's srun starts it on a node.

    Args:
        command: Words; this process's interpreter is replaced by the image's `python`.
        config: Its `site.container` is used.
        with_disk: See `srun_options`.

    Returns:
        The command unchanged if `site.container.runtime` is `none`.
    """
    if config.site.container.runtime == "none":
        return tuple(command)
    interpreter = "python" if command[0] == sys.executable else command[0]
    return (*_entry(config, _mounts(config, *[config.site.node_local] * with_disk)), interpreter, *command[1:])


def prefix_of_jobs(config: Config) -> str:
    """Return the prefix of `python` in the shell command of any other job; empty without an image."""
    if config.site.container.runtime == "none":
        return ""
    mounts = _mounts(config)
    step = ONE_TASK if config.site.container.runtime == "pyxis" else ()
    return shlex.join([*step, *_options(config, mounts), *_entry(config, mounts)]) + " "


def make_shared_roots(config: Config) -> None:
    """Make the folders that all nodes share, if there is an image: runtimes mount only existing folders."""
    if config.site.container.runtime != "none":
        for folder in (config.site.store, config.site.results):
            os.makedirs(folder, exist_ok=True)


def _options(config: Config, mounts: Sequence[str]) -> tuple[str, ...]:
    """Return srun's options for the image."""
    container = config.site.container
    if container.runtime != "pyxis":
        return ()
    shown = f"--container-mounts={','.join(mounts)}"
    return (f"--container-image={container.image}", shown, f"--container-workdir={Path.cwd()}", *container.options)


def _entry(config: Config, mounts: Sequence[str]) -> tuple[str, ...]:
    """Return the words between srun's options and the command."""
    container, inside = config.site.container, ("env", f"PYTHONPATH={CODE}")
    if container.runtime == "pyxis":
        return inside
    devices = ("--nv",) if config.hardware.device == "cuda" else ()
    binds, folder = ("--bind", ",".join(mounts)), ("--pwd", str(Path.cwd()))
    return ("apptainer", "exec", *devices, *binds, *folder, *container.options, container.image, *inside)


def _mounts(config: Config, *of_the_node: str) -> list[str]:
    """Return `outside:inside` of the paths that the workflow reads and writes, then the site's own mounts."""
    site, added = config.site, config.site.container.mounts
    own = (Path.cwd(), CLONE, site.store, site.results, *of_the_node, *_sources(config))
    folders = dict.fromkeys(os.path.abspath(str(folder)) for folder in own)
    # A path below a mounted folder needs no mount of its own; hard links cannot cross mounts.
    shown = {*folders, *added}
    widest = [folder for folder in folders if shown.isdisjoint(map(str, Path(folder).parents))]
    return [
        *(f"{folder}:{folder}" for folder in widest if folder not in added),
        *(mount if ":" in mount else f"{mount}:{mount}" for mount in added),
    ]


def _sources(config: Config) -> Iterator[str]:
    """Yield the files and folders outside the workflow that the configuration names."""
    if config.model.source.kind == "folder":
        yield config.model.source.folder
    if config.data.kind in LOCAL_DATA:
        # For a pattern, its longest folder without wildcards.
        yield from (_fixed_part(name) for name in (config.data.train_file, config.data.heldout_file))
    folders = (config.download.torch_dist_folder, config.export.checkpoint_folder)
    yield from filter(None, (*folders, config.evaluation.lm_eval.task_folder))
    yield from config.serving.calibration
    yield from (_fixed_part(wanted.file) for wanted in config.serving.passes.values() if wanted.kind == "files")
    yield from _own_folders(config)


def _own_folders(config: Config) -> Iterator[str]:
    """Yield the folders of the user's rewards, judges' prompts and environment, whose sources may name files there."""
    rewards = [*trained_rewards(config).values(), *suite_rewards(config).values()]
    own = [term.grader for reward in rewards for term in parse_reward(reward) if term.is_own]
    own += [config.data.environment] if is_own(config.data.environment) else []
    files = [text.rpartition(":")[0] for text in own]
    files += [judge.prompt_file for judge in config.reward.judges.values()]
    yield from (os.path.dirname(os.path.abspath(path)) for path in files)


def _fixed_part(pattern: str) -> str:
    path = Path(pattern)
    while glob.has_magic(str(path)) and not path.exists():
        path = path.parent
    return str(path)
