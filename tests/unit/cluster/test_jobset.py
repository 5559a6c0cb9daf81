from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.jobset_schema import check_jobset

from posttrain.cluster.container import CODE
from posttrain.cluster.jobset import check_mounted, jobset_name, render
from posttrain.config.schema import Config
from posttrain.plan.resolve import resolve

CONFIG_DIR = Path(__file__).parents[3] / "config"
GOLDEN = Path(__file__).parent / "golden"
COMMAND = ("python", "scripts/train.py", "--run-folder", "/shared/posttrain/results/r-1")
LOG = Path("logs/train/GLM5_4layer.try-1a2b3c4d.log")
IN_JOB = ("spec", "replicatedJobs", 0, "template", "spec")
RUN = Path("/shared/posttrain/results/GLM5_4layer.try-1a2b3c4d")


def example(**choice: Any) -> Config:
    return resolve({"model": "glm5_4layer", "site": "example_kubernetes", **choice}, CONFIG_DIR).config


def manifest_of(config: Config, command: tuple[str, ...] = COMMAND) -> dict[str, Any]:
    return render(config, RUN, LOG, command, config.nodes)


def with_kubernetes(config: Config, **changed: Any) -> Config:
    kubernetes = dataclasses.replace(config.site.kubernetes, **changed)
    return dataclasses.replace(config, site=dataclasses.replace(config.site, kubernetes=kubernetes))


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(("name", "nodes"), [("glm5_4layer", 1), ("glm5", 16)])
def test_the_example_site_is_golden(name: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.cluster.jobset.os.getcwd", lambda: "/shared/posttrain")
    text = yaml.safe_dump(manifest_of(example(model=name)), sort_keys=False).replace(str(CODE), "/shared/posttrain/src")
    path = GOLDEN / f"{name}_{nodes}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 pytest {__file__} writes it anew"
    check_jobset(yaml.safe_load(text))


def test_without_options_nothing_empty_is_said() -> None:
    config = with_kubernetes(
        example(),
        **{name: [] for name in ("image_pull_secrets", "resources", "node_selector", "tolerations", "annotations")},
        **{name: [] for name in ("secrets", "capabilities")},
        queue="",
        service_account="",
    )
    manifest = manifest_of(config)
    check_jobset(manifest)
    assert "kueue.x-k8s.io/queue-name" not in manifest["metadata"]["labels"]
    assert set(pod_of(manifest)) == {
        "restartPolicy",
        "terminationGracePeriodSeconds",
        "shareProcessNamespace",
        "containers",
        "volumes",
    }
    assert pod_of(manifest)["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_tolerations_say_what_was_meant() -> None:
    taints = ["gpu=yes:NoSchedule", "gpu:NoExecute", "spot", "dedicated="]
    manifest = manifest_of(with_kubernetes(example(), tolerations=taints))
    check_jobset(manifest)
    assert pod_of(manifest)["tolerations"] == [
        {"key": "gpu", "value": "yes", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute"},
        {"key": "spot", "operator": "Exists"},
        {"key": "dedicated", "value": ""},
    ]


def test_the_nodes_network_keeps_the_clusters_names() -> None:
    pod = pod_of(manifest_of(with_kubernetes(example(), host_network=True)))
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


def test_every_node_finds_its_place() -> None:
    (container,) = pod_of(manifest_of(example(model="glm5")))["containers"]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["POSTTRAIN_NUM_NODES"] == "16"
    order = [variable["name"] for variable in container["env"]]
    assert order.index("POSTTRAIN_NODE_RANK") < order.index("POSTTRAIN_LOG"), "it is used in that one's value"
    assert values["POSTTRAIN_LOG"] == f"{LOG.with_suffix('')}.node$(POSTTRAIN_NODE_RANK).log"


def test_words_of_the_command_are_no_variables() -> None:
    (container,) = pod_of(manifest_of(example(), ("python", "-c", "$(HOME) $HOME")))["containers"]
    assert container["command"] == ["python", "-c", "$$(HOME) $HOME"]


def test_one_step_of_one_run_has_one_name() -> None:
    name = jobset_name(RUN, LOG)
    assert name.startswith("glm5-4layer-try-1a2b3c4d-train-grpo"[:34])
    assert name == jobset_name(Path(f"{RUN.parent}/x/../{RUN.name}"), Path("/elsewhere") / LOG)
    assert name != jobset_name(Path("/other/results") / RUN.name, LOG)
    before, after = (Path(f"logs/evaluate/{RUN.name}.{when}.log") for when in ("before", "after"))
    assert len({name, jobset_name(RUN, before), jobset_name(RUN, after)}) == 3


@pytest.mark.parametrize("run", ["r", "R_.-_x-", "r" * 100, "glm5." * 20])
def test_any_run_has_a_name_that_kubernetes_takes(run: str) -> None:
    check_jobset(render(example(), Path("/shared") / run, Path(f"logs/train/{run}.log"), COMMAND, 1024))


def test_a_folder_that_pods_do_not_see_is_refused() -> None:
    assert check_mounted(Path("/shared/posttrain"), example()) == []
    (problem,) = check_mounted(Path("/home/me/posttrain"), example())
    assert problem.key == "site.kubernetes.volumes"
    assert "/home/me/posttrain" in problem.allowed
    assert check_mounted(Path("/sharedness"), example())


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("spec", "suspended"), True, "does not know"),
        ((*IN_JOB, "completions"), "16", "valid integer"),
        ((*IN_JOB, "template", "spec", "containers", 0, "cpu"), 4, "does not know"),
        (("metadata", "name"), "x" * 60, "pods would be called"),
    ],
)
def test_the_check_of_manifests_finds_mistakes(path: tuple[Any, ...], value: Any, said: str) -> None:
    manifest = part = manifest_of(example())
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        check_jobset(manifest)
