"""Converts the flags of a launch script to values of our keys, with the table of docs/coming-from.md.

A key is written if the configuration would otherwise have another value. At the end, the planner's own flags are
compared with the script's; differences are reported as not taken over.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from posttrain.config import schema
from posttrain.config.fields import check_ranges, leaf_types, typed
from posttrain.config.load import Resolved, merge
from posttrain.errors import ConfigError, Problem
from posttrain.plan.sizing.layout_choice import choose_layout
from posttrain.plan.step_choice import choose_step
from posttrain_import.expression import literal
from posttrain_import.planned_flags import as_plain, disagreement, emitted
from posttrain_import.row import NotHere, Row
from posttrain_import.script import UNSET, Given, Script
from posttrain_import.table import ROWS

# Keys that determine the defaults of other keys.
_FIRST = ("algorithm.preset",)
# Flags with secret values.
_SECRET = ("--wandb-key",)
_TURNS = 6
# Minimum similarity of a typo; less similar names are other flags.
_NEAR = 0.8
# Names of lists that hold no flag with a meaning when absent.
_HARMLESS = re.compile("model|wandb|extra|eval|log", re.IGNORECASE)


@dataclass(frozen=True)
class Told:
    """One flag in the report to the user.

    Args:
        flag: Name of the flag.
        value: Value in the script.
        place: File and line; "" if the script does not pass the flag.
        about: Our keys with their values, how it is done here, or why it is not taken over.
    """

    flag: str
    value: str
    place: str
    about: str


@dataclass
class Imported:
    """The result of an import.

    Args:
        names: `model`, `nodes` and other names that select configuration files.
        implied: Those of `names` that are defaults and need not be written.
        values: Dotted key -> value, where it differs from our defaults.
        sources: Dotted key -> its flags.
        resolved: The configuration; None if it is rejected.
        problems: Why it is rejected.
        taken: Flags that set values.
        same: Flags that agree with our defaults.
        otherwise: Flags without a key: constant, implied by other flags, or done differently here.
        missed: Flags that were not taken over.
    """

    names: dict[str, Any]
    implied: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    resolved: Resolved | None = None
    problems: tuple[Problem, ...] = ()
    taken: list[Told] = field(default_factory=list)
    same: list[Told] = field(default_factory=list)
    otherwise: list[Told] = field(default_factory=list)
    missed: list[Told] = field(default_factory=list)


def import_flags(script: Script, names: Mapping[str, Any], config_dir: Path) -> Imported:
    """Convert a script's flags to our keys.

    Args:
        script: The script's flags; at least one is known.
        names: Names that select files: `model`, and the user's `nodes`, `hardware` and `site`.
        config_dir: The folder `config/`.
    """
    return _Import(script, names, config_dir).run()


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with dotted keys as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return tree


def workflow_of(found: Imported) -> dict[str, Any]:
    """Return the request that an import's file stands for."""
    tree = nested(found.values)
    if "hardware" in tree:
        tree["hardware"] = {"name": found.names["hardware"], **tree["hardware"]}
    return {**found.names, **tree}


def value_of(config: schema.Config, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def text_of(given: Given) -> str:
    """Return a flag's value, or a placeholder for a secret."""
    return "(not shown)" if given.name in _SECRET else " ".join(given.values)


class _Import:
    def __init__(self, script: Script, names: Mapping[str, Any], config_dir: Path):
        self._script, self._config_dir = script, config_dir
        self.found = Imported(dict(names))
        self._known = {name: given for name, given in script.flags.items() if name in ROWS and _is_known(given)}
        # Unknown values keep their spelling, which is not a number.
        self._values = {name: given.values for name, given in script.flags.items()}
        self._is_whole = _is_whole(script)
        self._wanted: dict[str, Any] = {}
        self._keys: dict[str, list[str]] = {}
        self._refused: dict[str, str] = {}
        self._choose_machines()

    def run(self) -> Imported:
        """Convert flags, determine the values to write, and classify the flags by result."""
        late: list[tuple[Row, Given]] = []
        for row, given in self._conversions():
            if row.late:
                late.append((row, given))
            else:
                self._convert(row, given)
        self._settle()
        settings = emitted(self.found.resolved.config if self.found.resolved else self._bare)
        for row, given in late:
            if disagreement(row, given, settings):
                self._convert(row, given)
        self._settle()
        for given in self._script.flags.values():
            self._tell(given)
        self._tell_absent()
        self.found.missed += [Told(given.name, text_of(given), given.place, given.why) for given in self._script.unread]
        return self.found

    def _choose_machines(self) -> None:
        """Choose nodes and hardware, which select files: from the user, the script, or the model's default."""
        names = self.found.names
        given = self._known.get("--actor-num-nodes", Given("", (), ""))
        count = literal(given.values[0]) if given.values else 1
        if not given.values and ("--actor-num-nodes" in self._script.flags or not self._is_whole):
            count = None
        asked = {"nodes": count} if isinstance(count, int) and count > 0 else {}
        self.found.names = names = {"model": names["model"], **asked, **names}
        self.found.implied = tuple({"hardware", "site"} - names.keys())
        self._bare = merge({"site": "local", **names, "nodes": None}, self._config_dir, choose_layout).config
        names.setdefault("nodes", self._bare.nodes)
        names.setdefault("hardware", self._bare.hardware.name)
        names.setdefault("site", "local")
        self._values["--actor-num-nodes"] = (str(names["nodes"]),)
        if "--actor-num-gpus-per-node" not in self._known:
            self._values["--actor-num-gpus-per-node"] = (str(self._bare.hardware.gpus_per_node),)

    def _conversions(self) -> list[tuple[Row, Given]]:
        """Return rows in the table's order, with the script's flag, or the implicit value of an absent flag."""
        found = []
        for name, row in ROWS.items():
            if name in self._known:
                found.append((row, self._known[name]))
            elif self._is_whole and row.absent is not None and name == row.names[0] and name not in self._script.flags:
                found.append((row, Given(name, (row.absent,) if row.absent else (), "")))
        return found

    def _convert(self, row: Row, given: Given) -> None:
        """Record the values that a flag sets."""
        if row.not_here:
            self._refused[given.name] = row.not_here
            return
        try:
            asked = self._asked(row, given)
            for key, value in asked.items():
                if problems := check_ranges({key: value}):
                    raise NotHere(f"{key} has to be {problems[0].allowed}")
        except NotHere as error:
            self._refused[given.name] = str(error)
            return
        spelled = f"{given.name} {text_of(given)}".strip()
        for key, value in asked.items():
            if key in self._wanted and self._wanted[key] != value:
                del self.found.sources[key]
            self._wanted[key] = value
            source = f"{spelled} ({given.place})" if given.place else f"{spelled}, as without the flag"
            self.found.sources.setdefault(key, []).append(source)
        self._keys[given.name] = list(asked)

    def _asked(self, row: Row, given: Given) -> Mapping[str, Any]:
        if row.convert:
            return row.convert(given.values, self._values) if given.name == row.names[0] else {}
        key = row.key_of(given.name)
        kind = leaf_types(schema.Config).get(key)
        if kind is None:
            return {}
        text = " ".join(given.values) if given.values else "true"
        try:
            return {key: typed(text, kind)}
        except OmegaConfBaseException as error:
            raise NotHere(f"not a value of {key}") from error

    # ---- values to write ----

    def _settle(self) -> None:
        """Add values to write until the configuration has all wanted values, or is rejected with them."""
        wanted = {key: value for key, value in self._wanted.items() if key != "nodes" and not key.startswith("model.")}
        for _ in range(_TURNS):
            try:
                self._resolve()
            except ConfigError as error:
                self.found.resolved, self.found.problems = None, error.problems
                config = self._bare
            else:
                assert self.found.resolved
                config = self.found.resolved.config
            missing = {key: value for key, value in wanted.items() if value_of(config, key) != value}
            new = {key: value for key, value in missing.items() if self.found.values.get(key, ...) != value}
            if not new:
                return
            self.found.values |= {key: value for key, value in new.items() if key in _FIRST} or new

    def _resolve(self) -> None:
        self.found.resolved = merge(workflow_of(self.found), self._config_dir, choose_layout, choose_step)
        self.found.problems = ()

    # ---- report ----

    def _tell(self, given: Given) -> None:
        told, row = self._told(given), ROWS.get(given.name)
        if row and given.name not in self._known and not (row.keys or row.here or row.only or row.not_here):
            # The flag is ignored, whatever its value.
            self.found.otherwise.append(Told(given.name, told.value, given.place, row.note))
            return
        if row is None or given.name not in self._known or given.name in self._refused:
            self.found.missed.append(told)
            return
        keys = self._keys_of(row, given.name)
        if (reason := self._mismatch(row, given)) or (row.only and not _is_one_of(given, row.only)):
            about = reason or f"not there; only {row.only[0]} can be left out"
            self.found.missed.append(Told(given.name, told.value, given.place, about))
        elif any(key in self.found.values or key == "nodes" for key in keys):
            self.found.taken.append(told)
        elif keys or row.late or row.setting_of(given.name):
            self.found.same.append(told)
        else:
            self.found.otherwise.append(told)

    def _tell_absent(self) -> None:
        """Report absent flags whose implicit value differs from our default."""
        if not self._is_whole:
            about = "flags that are not given may stand in what is not known: they stay as our defaults"
            self.found.missed.append(Told("", "", "", about))
            return
        for name, row in ROWS.items():
            if name != row.names[0] or name in self._script.flags or row.absent is None:
                continue
            keys = [key for key in self._keys.get(name, ()) if key in self.found.values]
            if keys:
                about = ", ".join(f"{key}={self.found.values[key]}" for key in keys)
                self.found.taken.append(Told(name, f"not given: {row.absent}", "", about))
            elif not row.absent:
                self.found.otherwise.append(Told(name, "not given", "", row.note))

    def _keys_of(self, row: Row, name: str) -> list[str]:
        """Return the keys that a flag sets; if the row is converted as a whole, those of its first flag."""
        return self._keys.get(name) or (self._keys.get(row.names[0], []) if row.convert else [])

    def _told(self, given: Given) -> Told:
        row = ROWS.get(given.name)
        about = given.why if given.name not in self._known else self._refused.get(given.name, "")
        if row is None:
            near = difflib.get_close_matches(given.name, ROWS, n=1, cutoff=_NEAR)
            about = about or (f"not known here; did you mean {near[0]!r}?" if near else "not known here")
        elif about:
            about += self._stays(row, given.name)
        else:
            wanted = [(key, self._wanted.get(key, self.found.names.get(key))) for key in self._keys_of(row, given.name)]
            about = ", ".join(f"{key}={value}" for key, value in wanted) or row.note or "follows"
        return Told(given.name, text_of(given), given.place, about)

    def _stays(self, row: Row, name: str) -> str:
        """Return the values of the keys without a flag that was not taken over."""
        key = row.key_of(name)
        keys = [key] if key else row.keys
        if self.found.resolved is None or any("." not in key for key in keys):
            return f"; near: {', '.join(keys)}" if keys else ""
        stays = ", ".join(f"{key}={value_of(self.found.resolved.config, key)}" for key in keys)
        return f"; stays {stays}" if stays else ""

    def _mismatch(self, row: Row, given: Given) -> str:
        """Return how the resolved configuration differs from the script."""
        if self.found.resolved is None:
            if any(key in self.found.values for key in self._keys_of(row, given.name)):
                return ""
            # Without a configuration only constants can be checked, not values that follow from other keys.
            is_checked = not row.setting_of(given.name) and not row.late
            reason = disagreement(row, given, emitted(self._bare))
            return reason or ("" if is_checked else "not checked, because the configuration is rejected")
        config = self.found.resolved.config
        for key in self._keys_of(row, given.name):
            value = self._wanted[key]
            if as_plain(value_of(config, key)) != as_plain(value):
                return f"{key} is {value_of(config, key)} here"
        return disagreement(row, given, emitted(config))


def _is_whole(script: Script) -> bool:
    """Return whether absent flags are certainly not passed; bash expands unset variables to nothing."""
    lists = [given for given in script.unread if given.name.startswith(("$", "{")) and not _HARMLESS.search(given.name)]
    has_all = not any(given.name.startswith("source ") for given in script.unread)
    return not [given for given in lists if given.name[0] == "{" or not (has_all and UNSET in given.why)]


def _is_known(given: Given) -> bool:
    """Return whether a flag's value is known; for a checkpoint, the folder's name suffices."""
    is_named = given.name == "--hf-checkpoint" and not re.search(r"[${`]", _last_part(given))
    return is_named or not given.why


def _last_part(given: Given) -> str:
    return "".join(given.values[:1]).rstrip("/").rpartition("/")[2] or "$"


def _is_one_of(given: Given, allowed: tuple[str, ...]) -> bool:
    return as_plain(" ".join(given.values)) in [as_plain(text) for text in allowed]
