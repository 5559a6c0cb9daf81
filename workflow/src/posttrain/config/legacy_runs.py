"""Keeps the experiment of a run that has begun.

A run's default name is derived from its experiment, so another experiment is another run. A name chosen by the user is
independent of the experiment: continuing under it with other values would mix two experiments in one result.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from posttrain.config.fields import fields_of, leaves_of
from posttrain.config.load import BASE, Resolved, read_yaml, run_name
from posttrain.config.schema import Config
from posttrain.document import ANY
from posttrain.errors import Problem, raise_if_any

STEPS = "training.num_steps"
# Origin of a value that differs from today's default.
OLDER = "the run, which an older version began"


def as_begun(resolved: Resolved) -> Resolved:
    """Return the experiment with which an older version began the run, if it exists; otherwise the resolved one.

    The value of a newer key in `base.yaml` may differ from the older version's behaviour (the key's `unnamed`), which
    that version's runs keep.
    """
    older = _as_before(resolved)
    folder = Path(older.config.site.results) / older.run
    if older.run != resolved.run:  # runs named after their experiments
        return older if folder.exists() else resolved
    begun = folder / "experiment.yaml"
    is_it = begun.exists() and leaves_of(read_yaml(begun)) == leaves_of(older.experiment)
    return older if is_it else resolved


def kept_from_before(resolved: Resolved) -> str:
    """Return the settings that a run keeps from the version that began it, in the form of `set=`; "" for other runs."""
    values = ((key, *key.split(".")) for key, origin in resolved.origins.items() if origin == OLDER)
    return " ".join(f"{key}={getattr(getattr(resolved.config, section), name)}" for key, section, name in values)


def _as_before(resolved: Resolved) -> Resolved:
    config, origins = resolved.config, dict(resolved.origins)
    for key, _, limits in fields_of(Config):
        if limits.get("unnamed", ANY) is ANY or Path(origins.get(key, "")).name != BASE:
            continue
        section, name = key.split(".")
        if getattr(getattr(config, section), name) != limits["unnamed"]:
            changed = dataclasses.replace(getattr(config, section), **{name: limits["unnamed"]})
            config = dataclasses.replace(config, **{section: changed})
            origins[key] = OLDER
    is_named = resolved.run != run_name(resolved.config, resolved.fork)
    run = resolved.run if is_named else run_name(config, resolved.fork)
    return dataclasses.replace(resolved, config=config, origins=origins, run=run)


def refuse_other_experiment(begun: Path, resolved: Resolved) -> None:
    """Compare the experiment with that of an existing run of this name.

    Args:
        begun: The run's `experiment.yaml`; nothing is compared if it does not exist.
        resolved: The new configuration.

    Raises:
        ConfigError: Contains every value that differs.
    """
    if not begun.exists():
        return
    old, new = leaves_of(read_yaml(begun)), leaves_of(resolved.experiment)
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    remedy = f"give the old value, give another name with --config run=..., or delete {begun.parent}"
    if changed == [STEPS] and new[STEPS] > old[STEPS]:
        # Additional steps continue from the state after the last step.
        remedy = (
            f"go on in a run of another name: --config run=... fork={resolved.run}@{old[STEPS]}, or give the old value"
        )
    raise_if_any(
        [
            Problem(
                "run-began-otherwise",
                key,
                repr(new.get(key)),
                f"{old.get(key)!r}, with which the run {resolved.run} began",
                remedy,
            )
            for key in changed
        ]
    )
