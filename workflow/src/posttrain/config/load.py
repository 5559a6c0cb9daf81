"""Merges YAML layers into one frozen `Config` with OmegaConf, and records the origin of every value.

Layers, later ones win: schema defaults -> base.yaml -> a line of algorithms.yaml -> models/{model}.yaml ->
recipes/{recipe}.yaml, if requested -> nodes/{model}_{n}.yaml or the planner's layout -> hardware/{hardware}.yaml ->
sites/{site}.yaml -> suites/{suite}.yaml, as requested -> sections of `--configfile` -> `set=`. Named files may also be
in the user's own folder (`configs=`). Every key and value of every layer is checked against the schema separately, so
that all mistakes are reported at once, each with its file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posttrain.config import schema
from posttrain.config.families import dimensions
from posttrain.config.fields import (
    ANY_NAME,
    TYPE_NAMES,
    all_defaults,
    build,
    check_ranges,
    did_you_mean,
    general_key,
    is_misread_text,
    leaf_types,
    typed,
    unknown_key,
    walk,
)
from posttrain.config.inferred import filled_in
from posttrain.config.overrides import parse_overrides
from posttrain.config.presets import PRESETS, algorithm_name, unused_numbers
from posttrain.config.request import WORKFLOW_KEYS, Request, is_count, parse_request
from posttrain.config.rules import check_consistency
from posttrain.config.strict_yaml import read_mapping
from posttrain.document import ANY
from posttrain.errors import Problem, raise_if_any

# The machine of the recipes in `config/nodes`; their sizes are meaningless on others.
RECIPE_GPUS_PER_NODE = 8
# Keys in experiments of version 0.1, each with its only value and the key that preceded it.
GONE_KEYS = {
    ("algorithm", "clip_ratio_high"): {"kl_coef": 0.0, "entropy_coef": 0.0},
    ("rollout", "temperature"): {"top_p": 1.0},
}
GONE = {f"{section}.{key}": value for (section, _), keys in GONE_KEYS.items() for key, value in keys.items()}
# Values that are equal for all models.
BASE = "base.yaml"
OWN_NODES = "engine.own_nodes"
# Origin of a value that the planner chose.
PLANNER = "planner"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The configuration of one run.

    Args:
        config: All values, typed.
        origins: Dotted key -> the layer that set it ("schema default", "config/base.yaml", "set=", ...).
        run: Name of the run: `{model}-{digest8 of the experiment, and of the fork}`, or the user's.
        fork: The state of another run to start from, `RUN@STEP`; empty: the model's.
        algorithm: Name of its combination of parts.
        request: `config/workflow.yaml` with the user's `--configfile` and `--config` on top.
    """

    config: schema.Config
    origins: Mapping[str, str]
    run: str
    fork: str = ""
    algorithm: str = ""
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def experiment(self) -> dict[str, Any]:
        """The experiment as plain types: the content of `experiment.yaml`."""
        return experiment_of(self.config)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The planner's choices for values without a recipe.

    Args:
        values: Dotted key -> value.
        problems: Why no choice works.
    """

    values: Mapping[str, Any]
    problems: tuple[Problem, ...] = ()


# (configuration with the schema's layout, origins of values set by layers) -> layout
ChooseLayout = Callable[[schema.Config, Mapping[str, str]], Chosen]


def merge(
    workflow: Mapping[str, Any],
    config_dir: Path,
    choose_layout: ChooseLayout | None = None,
    choose_step: ChooseLayout | None = None,
) -> Resolved:
    """Merge the layers named by a workflow configuration and check the result as a whole.

    Args:
        workflow: `config/workflow.yaml` with the user's `--configfile` and `--config` on top (`config.request`).
        config_dir: The folder `config/`.
        choose_layout: Chooses the layout if `config/nodes` has no recipe; None keeps the schema's.
        choose_step: Chooses what is `auto`, after the layout; None leaves it.

    Raises:
        ConfigError: All problems: unknown keys, wrong types, values out of range, violated rules between keys.
    """
    request = parse_request(workflow)
    names, (merger, has_recipe) = request.names, _with_layers(request, config_dir)
    for choose in (None if has_recipe else choose_layout, choose_step):
        if choose and not merger.refusals:
            merger.add_chosen(choose)
    config, fork = filled_in(merger.finish(), merger.origins), str(names.get("fork") or "")
    run, origins = str(names.get("run") or run_name(config, fork)), dict(merger.origins)
    return Resolved(config, origins, run, fork, algorithm_name(config, merger.presets), dict(workflow))


def _with_layers(request: Request, config_dir: Path, takes_recipe: bool = True) -> tuple[_Merger, bool]:
    """Return all layers of a request, and whether a recipe sets the parallel layout."""
    names, merger = request.names, _Merger(config_dir, request.own_folder)
    merger.problems += request.problems
    merger.add_file(BASE)
    merger.add_choice("models", "model", names.get("model"))
    if names.get("recipe") is not None:
        merger.add_choice("recipes", "recipe", names["recipe"])
    # A wrong count is already reported; continue the checks with the model's default.
    given = names.get("nodes") if is_count(names.get("nodes")) else None
    nodes = given or merger.get("defaults.nodes") or 1
    merger.add_value("nodes", nodes, "--config nodes" if given else "the model's default")
    hardware = names.get("hardware") or merger.get("defaults.hardware")
    is_written_for = merger.look_up(f"hardware/{hardware}.yaml", "hardware", "gpus_per_node") == RECIPE_GPUS_PER_NODE
    recipe = f"nodes/{names.get('model')}_{nodes}.yaml"
    has_recipe = takes_recipe and is_written_for and merger.add_optional_file(recipe)
    merger.add_choice("hardware", "hardware", hardware)
    merger.add_choice("sites", "site", names.get("site"))
    for suite in request.suites:
        merger.add_choice("suites", "suites", suite)
    merger.add_tree(request.sections, "--configfile")
    merger.add_overrides(names.get("set"))
    merger.add_preset()
    # A recipe places ranks and engines on all of its nodes, unless it sets this itself.
    if has_recipe and (merger.get(OWN_NODES) or 0) != (merger.look_up(recipe, *OWN_NODES.split(".")) or 0):
        return _with_layers(request, config_dir, takes_recipe=False)
    return merger, has_recipe


def experiment_of(config: schema.Config) -> dict[str, Any]:
    """Return the sections that define what is learned, as plain types.

    A run keeps its name, and the file its bytes, when the schema changes: values declared `unnamed` are left out, and
    removed keys keep their places.
    """
    sections = {name: _named(name, getattr(config, name)) for name in schema.EXPERIMENT_SECTIONS}
    sections["model"]["source"] = _named("source", config.model.source)
    sections["model"]["patch"] = _named("patch", config.model.patch)
    sections["model"]["architecture"] = dimensions(config.model.architecture)
    return {name: section for name, section in sections.items() if section}


def _named(name: str, section: Any) -> dict[str, Any]:
    """Return a section in the form of the experiment."""
    unnamed = {f.name: f.metadata["unnamed"] for f in dataclasses.fields(section) if "unnamed" in f.metadata}
    found: dict[str, Any] = {}
    for key, value in dataclasses.asdict(section).items():
        if unnamed.get(key, ...) not in (value, ANY):
            found |= {key: value, **GONE_KEYS.get((name, key), {})}
    for key, table in vars(section).items():
        if isinstance(table, dict) and key in found:
            found[key] = {row: _named(key, named) for row, named in table.items()}
    return found


def digest8(content: Any) -> str:
    """Return the first 8 hex digits of the SHA-256 of `content` as canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def dump_yaml(content: Mapping[str, Any]) -> str:
    """Return `content` as YAML in its own order."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(content)))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file, or a file from `dump_yaml`."""
    return read_mapping(path, load=_constructed)


def _constructed(text: str) -> Any:
    """Parse a YAML text by OmegaConf's rules: `1e-4` is a number, a date is text."""
    try:
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except OmegaConfBaseException as error:
        raise ValueError(str(error)) from error


def dump_resolved(resolved: Resolved) -> str:
    """Return the whole configuration as YAML, each line followed by a comment with the origin of its value."""
    lines = []
    for depth, key, dotted, value in walk(dataclasses.asdict(resolved.config)):
        indent = "  " * depth
        if isinstance(value, dict):
            lines += [f"{indent}{key}:"] if value else []
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}  # {resolved.origins.get(dotted, 'schema default')}")
    return "\n".join(lines) + "\n"


def load_resolved(path: Path) -> schema.Config:
    """Read a `config.resolved.yaml` back into the typed configuration.

    Raises:
        ConfigError: The file does not match the schema of this version.
    """
    merger = _Merger(path.parent)
    merger.add_file(path.name)
    return merger.finish()


class _Merger:
    """Adds layers one by one, and records the origin of each value and all problems."""

    def __init__(self, config_dir: Path, own_folder: Path | None = None):
        self._dir, self._own = config_dir, own_folder
        self._values: dict[str, Any] = {}
        self._types = leaf_types(schema.Config)
        self._files: dict[str, dict[Any, Any]] = {}
        self._lacks_a_layer = False
        self.refusals: list[Problem] = []
        self.origins: dict[str, str] = {}
        self.problems: list[Problem] = []

    def add_choice(self, folder: str, key: str, name: Any) -> None:
        """Add `{folder}/{name}.yaml`; an unknown name becomes a problem that lists the known names."""
        if key in {problem.key for problem in self.problems}:
            self._lacks_a_layer = True
            return
        known = sorted({path.stem for parent in self._folders for path in (parent / folder).glob("*.yaml")})
        if str(name) in known:
            self.add_file(f"{folder}/{name}.yaml")
        elif name is not None or key != "hardware" or not self._lacks_a_layer:
            remedy = did_you_mean(str(name), known) or f"choose one of {', '.join(known)}"
            found = repr(name) if name is not None else "no name"
            self.problems.append(Problem("unknown-name", key, found, ", ".join(known), remedy))
            self._lacks_a_layer = True

    def add_optional_file(self, name: str) -> bool:
        """Add a layer if its file exists, and return whether it does."""
        if self._find(name).exists():
            self.add_file(name)
            return True
        return False

    @property
    def presets(self) -> dict[Any, Any]:
        """The lines of `algorithms.yaml`."""
        return self._read(PRESETS)

    def add_preset(self) -> None:
        """Add the line of `algorithms.yaml` that `algorithm.preset` names, as the layer after `base.yaml`."""
        lines, name = self.presets, self.get("algorithm.preset")
        if name not in lines:
            remedy = did_you_mean(str(name), lines) or "choose one, and set its parts with set='algorithm....'"
            self.problems.append(Problem("unknown-preset", "algorithm.preset", repr(name), ", ".join(lines), remedy))
            self._lacks_a_layer = True
            return
        chosen = {key for key, origin in self.origins.items() if Path(origin).name != BASE}
        for key, value in lines[name].items():
            if f"algorithm.{key}" not in chosen:
                self.add_value(f"algorithm.{key}", value, f"{self._dir.name}/{PRESETS}: {name}")
        self.problems += unused_numbers(all_defaults(self._values) | self._values, chosen)

    def add_chosen(self, choose_layout: ChooseLayout) -> None:
        """Add the planner's layout; called last, because it depends on all other layers."""
        chosen = choose_layout(self._typed_config(), dict(self.origins))
        for key, value in chosen.values.items():
            self.add_value(key, value, PLANNER)
        self.refusals += chosen.problems

    def add_file(self, name: str) -> None:
        """Add a YAML file as a layer."""
        path = self._find(name)
        self.add_tree(self._read(name), f"{self._dir.name}/{name}" if path.is_relative_to(self._dir) else str(path))

    def add_tree(self, tree: Mapping[Any, Any], origin: str) -> None:
        """Add nested values as a layer."""
        for _, _, dotted, value in walk(tree):
            # Mappings are processed key by key; an unknown one is reported as a whole.
            if not isinstance(value, dict) or not self._is_section(dotted):
                self.add_value(dotted, value, origin)

    def look_up(self, name: str, section: str, key: str) -> Any:
        """Return a value of a file that is not a layer yet, or None."""
        values = self._read(name).get(section) if self._find(name).exists() else None
        return values.get(key) if isinstance(values, dict) else None

    def _read(self, name: str) -> dict[Any, Any]:
        if name not in self._files:
            self._files[name] = read_yaml(self._find(name))
        return self._files[name]

    @property
    def _folders(self) -> list[Path]:
        return [self._dir, *([self._own] if self._own else [])]

    def _find(self, name: str) -> Path:
        """Return the path of a file; a file in both folders is a problem, because the choice would be a guess."""
        found = [folder / name for folder in self._folders if (folder / name).exists()]
        if len(found) > 1 and not any(problem.value == str(found[1]) for problem in self.problems):
            allowed = f"a name that {self._dir.name}/ does not have"
            self.problems.append(Problem("name-taken", name, str(found[1]), allowed, "give it another name"))
        return found[0] if found else self._dir / name

    def add_overrides(self, text: Any) -> None:
        """Add the values of `set=`."""
        try:
            values = parse_overrides("" if text is None else str(text))
        except ValueError as error:
            remedy = f"{error}; quote the whole list"
            self.problems.append(Problem("not-key-value", "set", repr(text), "set='key=value key=value'", remedy))
            return
        for key, value in values.items():
            if key in WORKFLOW_KEYS:
                allowed = "keys of the configuration's files"
                remedy = f"it chooses files, so give it outside of set=: --config {key}={value}"
                self.problems.append(Problem("chosen-inside-set", f"set: {key}", repr(value), allowed, remedy))
            else:
                self.add_value(key, value, "set=")

    def add_value(self, key: str, value: Any, origin: str) -> None:
        """Set one leaf, after checking its name and type."""
        kind = self._types.get(general_key(key))
        if kind is None or ANY_NAME in key:
            if key in GONE:
                found = f"{value!r} ({origin})"
                remedy = f"leave it out; it could only be {GONE[key]}, and that is what is done"
                self.problems.append(Problem("removed-key", key, found, "a key of this version", remedy))
            elif not any(key.startswith(f"{p.key}.") for p in self.problems):
                self.problems.append(unknown_key(key, value, origin, self._types))
            return
        try:
            self._values[key] = typed(value, kind)
        except OmegaConfBaseException:
            name = TYPE_NAMES[kind]
            remedy = "write it in quotes" if is_misread_text(value, kind) else f"give {name}"
            self.problems.append(Problem("wrong-type", key, f"{value!r} ({origin})", name, remedy))
            return
        self.origins[key] = origin

    def get(self, key: str) -> Any:
        """Return a value that was set so far, or None."""
        return self._values.get(key)

    def finish(self) -> schema.Config:
        """Return the typed configuration, or raise an error with all problems."""
        config = self._typed_config()
        raise_if_any([*self.refusals, *check_consistency(config)])
        return config

    def _typed_config(self) -> schema.Config:
        """Return the typed configuration before rules between values are checked."""
        known = {key: value for key, value in (all_defaults(self._values) | self._values).items() if value != "???"}
        refused = {problem.key for problem in self.problems}
        # If a layer is missing, do not report its values as missing, too.
        omitted = () if self._lacks_a_layer else self._types.keys() - known.keys() - refused
        remedy = "set it in the model's, hardware's or site's file, or with set="
        self.problems += [
            Problem("not-set", key, "not set", TYPE_NAMES[kind], remedy)
            for key, kind in self._types.items()
            if key in omitted and ANY_NAME not in key
        ]
        self.problems += check_ranges(known)
        raise_if_any(self.problems)
        return typing.cast(schema.Config, build(schema.Config, known))

    def _is_section(self, dotted: str) -> bool:
        return any(known.startswith(f"{general_key(dotted)}.") for known in self._types)


def run_name(config: schema.Config, fork: str) -> str:
    """Return the default name of a run."""
    experiment = experiment_of(config)
    return f"{config.model.name}-{digest8([experiment, fork] if fork else experiment)}"
