"""Engines import the package from an environment that need not hold anything of ours but it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from tests.test_import_order import WEIGHTS

# Needs Triton, which torch brings with CUDA only.
OPTIONAL = {"digest_triton"}


def requirements_of(name: str, found: set[str]) -> set[str]:
    """Return a distribution and all that it requires here."""
    if name not in found:
        found.add(name)
        for requirement in map(Requirement, distribution(name).requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                requirements_of(requirement.name, found)
    return found


def test_it_imports_where_there_is_only_torch(tmp_path: Path) -> None:
    for name in requirements_of("torch", set()):
        for file in {path.parts[0] for path in distribution(name).files or []} - {"..", "__pycache__"}:
            if not (tmp_path / file).exists():
                (tmp_path / file).symlink_to(distribution(name).locate_file(file))
    (tmp_path / "posttrain_weights").symlink_to(WEIGHTS)
    modules = {path.stem for path in WEIGHTS.glob("*.py")} - {"__init__", *OPTIONAL}
    assert len(modules) > 10
    wanted = ", ".join(f"posttrain_weights.{name}" for name in sorted(modules))
    absent = "; import importlib.util as u; sys.exit(any(map(u.find_spec, ('posttrain', 'numpy', 'megatron'))))"
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import {wanted}" + absent
    # `-S` leaves out the packages of this environment.
    assert subprocess.run([sys.executable, "-ISc", code], timeout=120, check=False).returncode == 0
