from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from posttrain.config.load import merge
from posttrain.config.request import parse_request
from posttrain.errors import ConfigError

CONFIG_DIR = Path(__file__).parents[3] / "config"
TINY = {"model": "tiny", "site": "local"}


def refused(**workflow: object) -> dict[str, str]:
    """Return key -> remedy of everything that is refused."""
    with pytest.raises(ConfigError) as caught:
        merge(TINY | workflow, CONFIG_DIR)
    return {problem.key: problem.remedy for problem in caught.value.problems}


def test_a_section_is_a_layer_before_set() -> None:
    resolved = merge({**TINY, "optimizer": {"lr": 1e-4, "beta1": 0.8}, "set": "optimizer.beta1=0.7"}, CONFIG_DIR)
    assert (resolved.config.optimizer.lr, resolved.config.optimizer.beta1) == (1e-4, 0.7)
    assert resolved.origins["optimizer.lr"] == "--configfile"
    assert resolved.origins["optimizer.beta1"] == "set="


def test_a_section_of_a_chosen_file_names_it() -> None:
    resolved = merge({"model": "tiny", "site": {"name": "local", "unused_days": 3}}, CONFIG_DIR)
    assert (resolved.config.site.name, resolved.config.site.unused_days) == ("local", 3)
    assert resolved.config.site.node_names == ["node0", "node1"], "the rest is the file's"
    assert refused(site={"unused_days": 3}) == {"site": "choose one of " + ", ".join(sites())}


def test_hardware_is_the_model_s_where_its_section_names_none() -> None:
    resolved = merge({**TINY, "hardware": {"memory_gib_per_gpu": 12}}, CONFIG_DIR)
    assert (resolved.config.hardware.name, resolved.config.hardware.memory_gib_per_gpu) == ("cpu", 12)


def test_wrong_sections_are_refused_with_their_keys() -> None:
    assert refused(optimizer={"lrr": 1}) == {"optimizer.lrr": "did you mean 'optimizer.lr'?"}
    assert refused(optmizer={"lr": 1}) == {"optmizer": "did you mean 'optimizer'?"}
    assert refused(optimizer=5) == {
        "optimizer": "give its values: optimizer: {...} in a file for --configfile, or set='optimizer.KEY=VALUE'"
    }
    assert refused(optimizer={"lr": 2}) == {"optimizer.lr": "choose more than 0 and at most 1"}


def sites() -> list[str]:
    return sorted(path.stem for path in (CONFIG_DIR / "sites").glob("*.yaml"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "lab.yaml").write_text("site: {name: lab, store: /shared/store}\n")
    return tmp_path


def test_files_of_a_folder_of_one_s_own_are_chosen_by_name(own: Path) -> None:
    resolved = merge({**TINY, "site": "lab", "configs": str(own)}, CONFIG_DIR)
    assert resolved.config.site.store == "/shared/store"
    assert resolved.origins["site.store"] == str(own / "sites" / "lab.yaml")
    assert refused(site="lap", configs=str(own)) == {"site": "did you mean 'lab'?"}


def test_models_and_recipes_and_layouts_lie_there_too(own: Path) -> None:
    for folder in ("models", "nodes", "recipes"):
        (own / folder).mkdir()
    text = (CONFIG_DIR / "models" / "glm5_4layer.yaml").read_text()
    (own / "models" / "mine.yaml").write_text(text.replace("name: glm5_4layer", "name: mine"))
    (own / "nodes" / "mine_1.yaml").write_text("parallel: {expert_model_parallel_size: 8}\n")
    (own / "recipes" / "short.yaml").write_text("rollout: {max_response_tokens: 1000}\n")
    request = {"model": "mine", "recipe": "short", "site": "local", "configs": str(own)}
    resolved = merge(request, CONFIG_DIR)
    assert resolved.config.model.name == "mine"
    assert resolved.config.parallel.expert_model_parallel_size == 8
    assert resolved.config.rollout.max_response_tokens == 1000


def test_a_name_that_stands_in_both_folders_is_refused(own: Path) -> None:
    (own / "sites" / "local.yaml").write_text("site: {name: local}\n")
    assert refused(configs=str(own)) == {"sites/local.yaml": "give it another name"}


def test_a_folder_that_is_none_is_refused(own: Path) -> None:
    assert refused(configs=str(own / "nowhere")) == {"configs": "correct the path"}


@pytest.mark.parametrize("run", ["plans", "2026", "a/b", "a" * 101, ""])
def test_names_of_runs(run: str) -> None:
    assert [problem.key for problem in parse_request({"run": run}).problems] == ["run"]


def test_the_longest_name_of_a_run_is_accepted() -> None:
    assert parse_request({"run": "a" * 100}).problems == ()


@pytest.mark.parametrize(
    ("fork", "run", "count"), [("old@4", "new", 0), ("old@0", "new", 1), ("old", "new", 1), ("new@4", "new", 1)]
)
def test_forks(fork: str, run: str, count: int) -> None:
    assert len(parse_request({"fork": fork, "run": run}).problems) == count


@pytest.mark.parametrize(("nodes", "count"), [(1, 0), (0, 1), (True, 1), ("2", 1), (2.0, 1)])
def test_node_counts(nodes: object, count: int) -> None:
    assert len(parse_request({"nodes": nodes}).problems) == count


@pytest.mark.parametrize(
    "key", ["model", "recipe", "hardware", "site", "suites", "configs", "run", "fork", "set", "lengths"]
)
@pytest.mark.parametrize("value", [float("inf"), 1000, True, datetime.date(2026, 11, 28)])
def test_a_name_of_which_snakemake_made_something_else_is_rejected(key: str, value: object) -> None:
    """`--config run=12e4567` is infinity, and so is `run: 12e45` for YAML; the text is gone."""
    assert list(refused(**{key: value})) == [key]


def test_names_in_a_list_are_text_too() -> None:
    assert list(refused(suites=["gsm8k", 500])) == ["suites"]


def test_a_key_that_is_no_text_is_unknown() -> None:
    assert list(refused(**{"model": "tiny"} | {"1": 2})) == ["1"]
    assert [problem.key for problem in parse_request({1: 2}).problems] == ["1"]  # type: ignore[dict-item]
