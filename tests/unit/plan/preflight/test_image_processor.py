from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.rejections import rejected

from posttrain.checkpoint.hub.client import is_needed
from posttrain.config.load import Resolved
from posttrain.plan.preflight.image_processor import BOTH, IMAGES, VIDEOS, check_image_processor
from posttrain.plan.preflight.refusals import refuse_unfit
from posttrain.plan.resolve import resolve
from posttrain.store import Paths

CONFIG_DIR = Path(__file__).parents[4] / "config"
CODE = "image-processor-missing"


def resolved(model: str, words: str = "") -> Resolved:
    return resolve({"model": model, "site": "local", "set": words}, CONFIG_DIR)


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


# As SGLang 0.5.23 with transformers 5.19 started with these files, or ended.
@pytest.mark.parametrize(
    ("files", "is_enough"),
    [
        ({}, False),
        ({IMAGES: {}}, True),
        ({VIDEOS: {}}, False),
        ({IMAGES: {}, VIDEOS: {}}, True),
        ({BOTH: {"image_processor": {}, "video_processor": {}}}, True),
        ({BOTH: {"image_processor": {}}}, False),
        ({BOTH: {"image_processor": {}}, VIDEOS: {}}, True),
        ({BOTH: {"processor_class": "Qwen3VLProcessor"}}, False),
        ({BOTH: []}, False),
    ],
)
def test_the_files_that_sglang_starts_from(tmp_path: Path, files: dict[str, object], is_enough: bool) -> None:
    config = resolved("qwen3.5_4b").config
    write(tmp_path, **{name.removesuffix(".json"): content for name, content in files.items()})
    found = [(problem.code, problem.key) for problem in check_image_processor(config, tmp_path)]
    assert found == ([] if is_enough else [(CODE, IMAGES)])


def test_only_sglang_and_only_a_vision_tower_need_it(tmp_path: Path) -> None:
    assert not [*check_image_processor(resolved("qwen3.5_4b", "engine.kind=embedded").config, tmp_path)]
    assert not [*check_image_processor(resolved("qwen3_4b").config, tmp_path)]


def test_a_folder_without_it_is_rejected_before_any_job_until_it_is_completed(tmp_path: Path) -> None:
    source = write(tmp_path / "source", config={})
    words = f"site.store={tmp_path / 'store'} site.results={tmp_path} model.source.kind=folder"
    run = resolved("qwen3.5_4b", f"{words} model.source.folder={source}")
    with rejected(CODE, source, "engine.kind=embedded", key=IMAGES):
        refuse_unfit(Paths(run))
    # The copy of an earlier attempt is made again.
    write(Paths(run).hf, config={})
    write(source, preprocessor_config={})
    refuse_unfit(Paths(run))


def test_a_commit_of_the_hub_is_looked_at_once_it_is_there(tmp_path: Path) -> None:
    paths = Paths(resolved("qwen3.5_4b", f"site.store={tmp_path} site.results={tmp_path}"))
    refuse_unfit(paths)
    write(paths.hf, config={})
    with rejected(CODE, paths.hf, key=IMAGES):
        refuse_unfit(paths)


def test_models_that_are_made_here_have_none(tmp_path: Path) -> None:
    words = f"site.store={tmp_path} site.results={tmp_path}"
    refuse_unfit(Paths(resolved("tiny_qwen3.5", words)))
    refuse_unfit(Paths(resolved("tiny", f"{words} engine.kind=sglang")))
    with rejected(CODE, "tiny_qwen3.5", key="engine.kind"):
        refuse_unfit(Paths(resolved("tiny_qwen3.5", f"{words} engine.kind=sglang")))


@pytest.mark.parametrize("name", [IMAGES, VIDEOS, BOTH])
def test_downloads_have_it(name: str) -> None:
    assert is_needed(name)
