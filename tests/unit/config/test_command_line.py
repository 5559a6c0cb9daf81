"""What `posttrain` understands is what Snakemake hands over for the same words and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from snakemake.cli import parse_config
from snakemake.common.configfile import load_configfile
from snakemake.utils import update_config
from tests.support.rejections import rejected

from posttrain.config.command_line import CONFIG_DIR, read_request
from posttrain.errors import ConfigError

FIRST = "model: {name: glm5, patch: {target: native}}\noptimizer: {lr: 1e-4, eps: 1.0e-8}\nnodes: 4\n"
SECOND = "model: {patch: {target: deepseek_v32}}\nrun: mine\n"
WORDS = [
    *(
        "model=glm5",
        "nodes=16",
        "nodes=16.5",
        "nodes=",
        "nodes=None",
        "run=2026_11_21",
        "run='2026'",
        "run=on",
        "run=1e3",
    ),
    *("run=True", "run=False", "run=null", "run=a=b", "run=a: b", "run=a #b", "run={", "fork=old@4", "gc=delete"),
    *("quick=1", "lengths=a/b.txt", "expert_imbalance=2", "expert_imbalance=1.5"),
    *("set=optimizer.lr=1e-4 site.node_names=[a,b]", "set='a.b=c' d=e", "optimizer={lr: 1e-4, betas: {a: 1}}", "run=ü"),
]


def snakemake_hands_over(files: list[Path], words: list[str]) -> dict[str, Any]:
    found = load_configfile(CONFIG_DIR / "workflow.yaml")
    for path in files:
        update_config(found, load_configfile(path))
    update_config(found, parse_config(words))
    return found


@pytest.mark.parametrize("words", [[], *([word] for word in WORDS), WORDS[:2] + WORDS[-2:]], ids=" ".join)
@pytest.mark.parametrize("num_files", [0, 1, 2])
def test_words_and_files_mean_what_they_mean_to_snakemake(words: list[str], num_files: int, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.yaml", "second.yaml")][:num_files]
    for path, text in zip(files, (FIRST, SECOND), strict=False):
        path.write_text(text)
    assert read_request(CONFIG_DIR, files, words) == snakemake_hands_over(files, words)


def test_what_is_no_setting_is_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_request(CONFIG_DIR, [], ["model=tiny", "glm5", "optimizer.lr=1"])
    assert [problem.key for problem in refused.value.problems] == ["glm5", "optimizer.lr=1"]
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    codes = {"list.yaml": "not-a-mapping", "broken.yaml": "not-yaml", "none.yaml": "file-unreadable"}
    for name, code in codes.items():
        with rejected(code, key=str(tmp_path / name)):
            read_request(CONFIG_DIR, [tmp_path / name], [])
