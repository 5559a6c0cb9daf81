import json

from tests.support.forked_programs import run_posttrain

PAGE = "results/plans/glm5-16xh200.html"


def plan(folder, *words):
    done = run_posttrain("plan", *words, folder=folder)
    return done, json.loads((folder / PAGE).with_suffix(".json").read_text())


def test_the_recipe_is_planned_on_a_laptop(tmp_path):
    done, written = plan(tmp_path, "model=glm5", "site=local")
    assert done.returncode == 0
    assert written["model"]["num_parameters"] == 743_911_199_232
    assert written["parallelism"]["layers_per_stage"] == [20, 20, 20, 18]
    assert written["problems"] == []
    assert "743,911,199,232" in done.stdout
    assert "This fits, and needs a site to run" in done.stdout
    assert done.stdout.splitlines()[-1] == f"plan: {tmp_path / PAGE}"
    assert "<!doctype html>" in (tmp_path / PAGE).read_text()


def test_a_plan_that_does_not_fit_is_shown_and_fails(tmp_path):
    away = tmp_path / "away"
    changes = f"set=parallel.expert_model_parallel_size=8 site.results={away / 'results'} site.store={away / 'store'}"
    done, written = plan(tmp_path, "model=glm5", changes)
    assert not away.exists(), "a plan makes no folder of a site"
    assert done.returncode == 1
    assert [problem["key"] for problem in written["problems"]] == ["parallel"]
    assert "optimizer_cpu_offload" in done.stdout
    assert "1 problem in the configuration" in done.stderr
    assert "Traceback" not in done.stderr
    assert "<h2>This cannot run</h2>" in (tmp_path / PAGE).read_text()


def test_a_plan_says_what_limits_programs(tmp_path):
    done, written = plan(tmp_path, "model=glm5", "site=local", "set=data.reward=code")
    assert "limits by" in written["sandbox"]
    assert f"sandbox: {written['sandbox']}\n" in done.stdout
    assert f"Sandbox: {written['sandbox']}." in (tmp_path / PAGE).read_text()
