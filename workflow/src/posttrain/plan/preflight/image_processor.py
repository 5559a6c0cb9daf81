"""Checks that SGLang can start on a checkpoint with a vision tower: it needs the files of the image processor.

SGLang 0.5.23 has no start without the tower (`--language-model-only` is refused), and each of its processes loads the
processor of images and videos (`srt/managers/scheduler.py`, line 899; `tp_worker.py`, 332; `tokenizer_manager.py`,
4051) with transformers' `AutoProcessor` (`srt/utils/hf_transformers/processor.py`, 340). The embedded engine loads no
processor.

transformers 5.19 reads the values of images from `processor_config.json`, else from `preprocessor_config.json`
(`image_processing_base.py`, 298); those of videos from `processor_config.json`, else from
`video_preprocessor_config.json`, else from the file of images (`video_processing_utils.py`, 353).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from posttrain.config.schema import Config
from posttrain.errors import Problem
from posttrain.store import Paths, read_json

IMAGES, VIDEOS, BOTH = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
_WHY = "SGLang always builds the vision tower and starts an image processor"


def check_image_processor(config: Config, folder: Path) -> Iterator[Problem]:
    """Yield a problem if SGLang is to serve a checkpoint with a vision tower and without an image processor.

    Args:
        config: The resolved configuration.
        folder: The checkpoint.
    """
    if _needs_processor(config) and not _has_processor(folder):
        allowed = f"{IMAGES}, or {BOTH} with image_processor and video_processor: {_WHY}"
        remedy = (
            f"fetch {IMAGES} from the model's repository into a folder with the checkpoint, and name that folder "
            "(model.source.kind=folder, model.source.folder); or set engine.kind=embedded"
        )
        yield Problem("image-processor-missing", IMAGES, f"(missing in {folder})", allowed, remedy)


def check_image_processor_of_source(paths: Paths) -> Iterator[Problem]:
    """Yield the problem of `check_image_processor` before any job, if the source's files are there or made here."""
    config, source = paths.resolved.config, paths.resolved.config.model.source
    if source.kind == "made" and _needs_processor(config):
        found = f"{config.engine.kind}, for the made model {config.model.name}, which has no {IMAGES}"
        yield Problem("image-processor-missing", "engine.kind", found, f"embedded: {_WHY}", "set engine.kind=embedded")
        return
    # A folder may be completed after it was copied; a commit of the Hub stays as it is.
    folder = paths.hf if source.kind == "hub" else paths.source_folder
    if (folder / "config.json").is_file():
        yield from check_image_processor(config, folder)


def _needs_processor(config: Config) -> bool:
    return config.engine.kind == "sglang" and config.model.architecture.vision.depth > 0


def _has_processor(folder: Path) -> bool:
    try:
        nested = read_json(folder / BOTH)
    except (OSError, ValueError):
        nested = {}
    nested = nested if isinstance(nested, dict) else {}
    has_images = (folder / IMAGES).is_file()
    has_videos = has_images or (folder / VIDEOS).is_file()
    return (has_images or "image_processor" in nested) and (has_videos or "video_processor" in nested)
