import sys

from tests.support.workflow_runs import ROOT

from posttrain.plan.preflight.lm_eval import MADE, check_lm_eval, find_lm_eval_problems, lm_eval_python
from posttrain.plan.preflight.refusals import find_refusals
from posttrain.plan.resolve import resolve

NAMED = "evaluation.lm_eval.tasks=[gsm8k]"


def config_of(overrides=""):
    return resolve({"model": "tiny", "site": "local", "set": overrides}, ROOT / "config").config


def keys_of(config):
    return [problem.key for problem in find_lm_eval_problems(config)]


def test_a_run_that_names_no_tasks_needs_no_lm_eval():
    config = config_of()
    assert check_lm_eval(config).status == "skipped"
    assert find_refusals(config, {"evaluate", "train"}) == []


def test_who_asks_for_it_is_told_what_is_missing(tmp_path):
    wanted = f"evaluation.lm_eval.python={sys.executable} evaluation.lm_eval.task_folder={tmp_path / 'none'}"
    config = config_of(wanted)
    found = [problem.key for problem in find_refusals(config, {"lm_eval"})]
    assert found == [f"evaluation.lm_eval.{name}" for name in ("tasks", "task_folder", "python")]
    assert keys_of(config_of(f"{NAMED} {wanted}")) == found[1:]


def test_an_interpreter_without_it_is_refused_with_what_makes_one():
    config = config_of(f"{NAMED} evaluation.lm_eval.python={sys.executable}")
    finding = check_lm_eval(config)
    assert finding.status == "problem"
    assert "No module named 'lm_eval'" in finding.problem.value
    assert "make env-lm-eval" in finding.problem.remedy


def test_an_image_has_its_own():
    image = "site.container.runtime=apptainer site.container.image=/shared/image.sif"
    config = resolve({"model": "tiny", "site": "example_slurm", "set": f"{NAMED} {image}"}, ROOT / "config").config
    assert keys_of(config) == []
    assert check_lm_eval(config).status == "skipped"


def test_the_environment_that_make_makes_is_the_clone_s():
    assert lm_eval_python(config_of()) == str(MADE) == str(ROOT / ".envs" / "lm-eval" / "bin" / "python")
    assert lm_eval_python(config_of("evaluation.lm_eval.python=other")) == "other"
