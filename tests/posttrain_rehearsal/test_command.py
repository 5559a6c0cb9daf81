import os

from tests.support.forked_programs import run_posttrain
from tests.support.rejections import assert_rejected


def rehearse(folder, *words):
    environment = os.environ | {"POSTTRAIN_REHEARSAL_ENV": str(folder / "nowhere")}
    return run_posttrain("rehearse", *words, folder=folder, environment=environment)


def test_without_its_environment_it_says_how_to_make_it(tmp_path):
    done = rehearse(tmp_path, "model=glm5", "site=local")
    assert done.returncode == 1
    assert_rejected(done.stderr, "environment-missing", "make env-rehearsal")
    assert "Traceback" not in done.stderr


def test_there_is_nothing_to_rehearse_for_cpus(tmp_path):
    done = rehearse(tmp_path, "site=local")
    assert done.returncode == 1
    assert_rejected(done.stderr, "nothing-to-rehearse", key="hardware")
