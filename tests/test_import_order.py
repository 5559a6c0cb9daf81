"""The house's order: parts import only parts above them, vendors stay behind their door, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "workflow" / "src"
LIBRARY = SOURCE / "posttrain"
# Below it, shared with the engines' environment.
WEIGHTS = SOURCE / "posttrain_weights"
# What a module of it imports besides torch, most of them only where they need it.
WEIGHTS_ALSO = {
    "digest": {"triton"},
    "digest_triton": {"numpy", "triton"},
    "sglang_hooks": {"sglang"},
    "shared_memory": {"cuda"},
}
# Apart from it, in the environment of verifiers.
TASKSETS = SOURCE / "posttrain_verifiers"
# Packages beside it. They import it and not each other; it imports none of them, and runs without any of them.
ANNEXES = ("posttrain_import", "posttrain_rehearsal", "posttrain_serving")
# Rooms, or parts of one, each after all that it imports. `rl/algorithm` comes early: plans read its settings.
ORDER = (
    *("document", "types", "readable", "rl/algorithm", "config", "trajectory_queue", "store", "plan", "report"),
    "plan/forecast",
    *("cluster/rendezvous", "cluster/processes", "http_answers", "sandbox", "plan/preflight", "checkpoint"),
    *("rl/data", "rl/reward", "rl/batching", "rl/engines", "rl/environments", "rl/rollout", "rl/evaluation"),
    *("rl/megatron_backend", "rl/weight_sync", "rl/training", "cluster", "commands"),
)
ABOVE_ALL = ("errors", "cli", "moved_modules", "__init__", "__main__")
# Programs: they set up logging and end like a script, and nothing imports them.
PROGRAMS = {
    "__main__.py",
    *("rl/engines/embedded/__main__.py", "cluster/node.py", "cluster/trainer_rank.py", "cluster/on_kubernetes.py"),
    *("cluster/beside_engines.py", "cluster/calibration_rank.py", "sandbox/serve.py"),
    *("cluster/requeue_watchdog.py", "cluster/spare_node.py"),
}
MODULES = {path.relative_to(LIBRARY).as_posix(): ast.parse(path.read_text()) for path in LIBRARY.rglob("*.py")}
OF_ANNEXES = sorted(path for name in ANNEXES for path in (SOURCE / name).rglob("*.py"))
ALL_FILES = sorted(path for folder in (SOURCE, ROOT / "scripts", ROOT / "tests") for path in folder.rglob("*.py"))


def part_of(module: str) -> str:
    """Return the part of the library that a file, or the slashed name of a module, belongs to."""
    parts = [part for part in (*ORDER, *ABOVE_ALL) if f"{module.removesuffix('.py')}/".startswith(f"{part}/")]
    return max(parts, key=len, default=module)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports, `posttrain.store` for `from posttrain import store`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            is_package = (LIBRARY.parent / node.module.replace(".", "/")).is_dir()
            yield from [f"{node.module}.{a.name}" for a in node.names] if is_package else [node.module]


def is_ours(name: str) -> bool:
    """Return whether a dotted name is a module of the core."""
    return name.startswith("posttrain.") and name != "posttrain.__version__"


def test_every_part_has_its_place() -> None:
    assert {part_of(module) for module in MODULES} == {*ORDER, *ABOVE_ALL, "rl/__init__.py"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_part_imports_only_parts_above_it(module: str) -> None:
    mine, tree = part_of(module), MODULES[module]
    ours = {part_of(name.removeprefix("posttrain.").replace(".", "/")) for name in imports_of(tree) if is_ours(name)}
    rooms = {"config", "store", "cluster", "cluster/processes", "report", "plan", "rl/training", "moved_modules"}
    allowed = {"errors", *(ORDER[: ORDER.index(mine) + 1] if mine in ORDER else rooms)}
    assert ours <= allowed | ({"cli"} if module in PROGRAMS else set())
    packages = {name.partition(".")[0] for name in imports_of(tree)}
    assert "scripts" not in packages
    assert packages.isdisjoint(ANNEXES)
    assert "megatron" not in packages or mine == "rl/megatron_backend", "the only door to Megatron"
    if mine == "rl/algorithm":
        assert ours <= {"rl/algorithm", "types", "document"}
        assert packages - set(sys.stdlib_module_names) <= {"torch", "posttrain"}


@pytest.mark.parametrize("path", sorted(WEIGHTS.glob("*.py")), ids=lambda path: path.stem)
def test_weight_transfer_imports_torch_alone(path: Path) -> None:
    packages = {name.partition(".")[0] for name in imports_of(ast.parse(path.read_text()))}
    own = {*sys.stdlib_module_names, "posttrain_weights"}
    assert packages - own <= {"torch"} | WEIGHTS_ALSO.get(path.stem, set())


@pytest.mark.parametrize("path", sorted(TASKSETS.glob("*.py")), ids=lambda path: path.stem)
def test_what_serves_tasksets_imports_what_verifiers_brings(path: Path) -> None:
    packages = {name.partition(".")[0] for name in imports_of(ast.parse(path.read_text()))}
    own = {*sys.stdlib_module_names, "posttrain_verifiers"}
    assert packages - own <= {"aiohttp", "httpx", "openai", "verifiers"}


def test_what_plans_read_of_weight_transfer_imports_nothing() -> None:
    assert not {*imports_of(ast.parse((WEIGHTS / "__init__.py").read_text()))}


@pytest.mark.parametrize("path", OF_ANNEXES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_an_annex_imports_the_core_and_itself(path: Path) -> None:
    mine = path.relative_to(SOURCE).parts[0]
    names = set(imports_of(ast.parse(path.read_text())))
    assert {name.partition(".")[0] for name in names}.isdisjoint({*ANNEXES, "scripts", "megatron"} - {mine})
    assert not [name for name in names if name.startswith(("posttrain.commands", "posttrain.cli"))]


def test_the_planners_parts_import_only_parts_above_them() -> None:
    """What a layout needs knows nothing of how long it takes."""
    order = ("flags", "sizing", "timing")
    for module in (name for name in MODULES if name.startswith(tuple(f"plan/{part}/" for part in order))):
        mine = module.split("/")[1]
        ours = {name.split(".")[2] for name in imports_of(MODULES[module]) if name.startswith("posttrain.plan.")}
        assert ours <= {*order[: order.index(mine) + 1]}, module


@pytest.mark.parametrize("part", ["posttrain/config", "posttrain/store", "posttrain/plan", "posttrain_import"])
def test_a_part_that_every_dry_run_reads_imports_no_torch(part: str) -> None:
    apart = ("posttrain/plan/forecast/", "posttrain/plan/preflight/")
    paths = [path.relative_to(SOURCE).as_posix() for path in sorted((SOURCE / part).rglob("*.py"))]
    paths = [path for path in paths if not path.startswith(apart)]
    wanted = [f"import {name.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for name in paths]
    code = "; ".join(["import sys", *wanted, "sys.exit('torch' in sys.modules)"])
    assert wanted
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_what_is_shared_lies_in_support() -> None:
    """Benchmarks borrow from tests/support alone, and that from no test, so that a test can move or go."""
    found = []
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests" / "support").rglob("*.py")]:
        borrowed = {name for name in imports_of(ast.parse(path.read_text())) if name.partition(".")[0] == "tests"}
        found += [f"{path.name}: {name}" for name in borrowed if not name.startswith("tests.support")]
    assert not found


RULES = "".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
OF_RULES = "\n".join(re.findall(r"^from posttrain\S* import .*$", RULES, re.MULTILINE))
# What costs a dry run or a plan more to import than to compute, ours last.
HEAVY = {"torch", "transformers", "megatron", "sglang", "wandb", "aiohttp", "safetensors", "huggingface_hub"}
PAGES = {"jinja2", "rich"}


@pytest.mark.parametrize(
    ("wanted", "unwanted"),
    [
        (
            "\n".join(re.findall(r"^from posttrain\S* import .*$", RULES, re.M)),
            HEAVY | PAGES | {"numpy", "posttrain.plan.forecast"},
        ),
        ("import posttrain.plan.forecast.plan", HEAVY | PAGES | {"snakemake"}),
        ("import posttrain.plan.forecast.plan_page, posttrain.plan.forecast.plan_table", HEAVY | {"snakemake"}),
    ],
    ids=["reading the Snakefile", "a plan's figures", "a plan's page"],
)
def test_only_what_is_needed_is_imported(wanted: str, unwanted: set[str]) -> None:
    code = f"import sys\n{wanted}\nprint(*(name for name in sys.modules if name in {unwanted}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert wanted
    assert ended.stdout.split() == []


def test_files_and_functions_are_small() -> None:
    found = []
    for path in ALL_FILES:
        text = path.read_text()
        if len(text.splitlines()) >= 400:
            found.append(f"{path.name}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found += [f"{path.name}: {node.name} has {length} lines"] if length > 60 else []
    assert not found
