import shutil

import pytest
from tests.support.forked_programs import run_posttrain
from tests.support.resolved_words import resolved_words
from tests.support.synthetic_run import make_run


@pytest.fixture
def made(tmp_path):
    """A store that no run has used."""
    made = make_run(tmp_path, num_steps=3)
    shutil.rmtree(made.paths.run)
    return made


def verify_store(made):
    chosen = resolved_words(made.workflow, made.paths.run.parent.parent)
    return run_posttrain("verify-store", *chosen)


def test_the_checkpoints_are_proven_before_there_is_a_run(made):
    done = verify_store(made)
    assert done.returncode == 0, done.stderr
    assert "make_tiny_model" in done.stdout, "where the chain begins"
    path = made.paths.torch_dist / "__0_0.bin"
    path.write_bytes(path.read_bytes()[::-1])
    done = verify_store(made)
    assert done.returncode == 1
    assert f"{path}: content differs" in done.stderr


def test_a_checkpoint_that_is_not_there_is_a_gap(made):
    made.paths.torch_dist.with_name(f"{made.paths.torch_dist.name}.receipt.json").unlink()
    done = verify_store(made)
    assert done.returncode == 1
    assert "torch_dist" in done.stderr
    assert "missing: nothing proves" in done.stderr
