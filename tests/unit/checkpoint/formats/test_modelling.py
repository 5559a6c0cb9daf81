"""transformers computes in torch where there is no GPU, whatever is installed."""

import os
import subprocess
import sys

import pytest
import torch

OURS = "from posttrain.checkpoint.formats.modelling import import_modelling; import_modelling('qwen3_5')"
THEIRS = "import transformers.models.qwen3_5.modeling_qwen3_5"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has the kernels")
def test_without_a_gpu_an_installed_fla_is_not_used(tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("open('imported', 'w').close()\n")

    def imports_it(code):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, timeout=300)
        return (tmp_path / "imported").exists()

    assert not imports_it(OURS)
    assert imports_it(THEIRS), "transformers does not import it any more, so the guard can go"
