import json
import subprocess
import sys
from pathlib import Path

from tests.support.resolved_words import resolved_words

REPOSITORY = Path(__file__).resolve().parents[2]


def plan(folder, **workflow):
    command = [
        sys.executable,
        REPOSITORY / "scripts/plan.py",
        *resolved_words(workflow, folder),
        "--json",
        folder / "plan.json",
        "--html",
        folder / "plan.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "plan.json").read_text())


def test_the_recipe_is_planned_on_a_laptop(tmp_path):
    done, written = plan(tmp_path, model="glm5", site="local")
    assert done.returncode == 0
    assert written["model"]["num_parameters"] == 743_911_199_232
    assert written["parallelism"]["layers_per_stage"] == [20, 20, 20, 18]
    assert written["problems"] == []
    assert "743,911,199,232" in done.stdout
    assert done.stdout.splitlines()[-1] == f"plan: {tmp_path / 'plan.html'}"
    assert "<!doctype html>" in (tmp_path / "plan.html").read_text()


def test_a_plan_that_does_not_fit_is_shown_and_fails(tmp_path):
    done, written = plan(tmp_path, model="glm5", site="local", set="parallel.expert_model_parallel_size=8")
    assert done.returncode == 1
    assert [problem["key"] for problem in written["problems"]] == ["parallel"]
    assert "optimizer_cpu_offload" in done.stdout
    assert "1 problem in the configuration" in done.stderr
    assert "Traceback" not in done.stderr
    assert "<h2>This cannot run</h2>" in (tmp_path / "plan.html").read_text()
