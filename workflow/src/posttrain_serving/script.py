"""Renders a launch as a commented shell script: commands, files, patch, and each flag's reason."""

from __future__ import annotations

import difflib
import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from posttrain.checkpoint.formats.config_patch import apply_changes
from posttrain.checkpoint.formats.hf_layout import read_object
from posttrain.checkpoint.formats.patched_copy import alias_changes
from posttrain.errors import one_line
from posttrain.plan.flags.flag import Flag
from posttrain.plan.timing.serving_load import FITTED_TO, ServedRow
from posttrain.rl.engines.secret import SECRET_VARIABLE
from posttrain_serving.checkpoint import Checkpoint
from posttrain_serving.launch import Launch, Process

WIDTH = 120
# The changes of TensorRT-LLM's guide, shown if the files are not here.
GUIDE_CHANGES = (
    'config.json: "model_type" becomes "deepseek_v32"',
    'tokenizer_config.json: "tokenizer_class" becomes "PreTrainedTokenizerFast" where it is "TokenizersBackend"',
    'tokenizer_config.json: the key "extra_special_tokens" becomes "additional_special_tokens"',
)
PATCHED = "glm_moe_dsa"


def render(launch: Launch, checkpoint: Checkpoint, origins: Mapping[str, str]) -> str:
    """Return the script as text.

    Args:
        launch: The launch plan.
        checkpoint: The served checkpoint.
        origins: Dotted key -> the layer that set it.
    """
    parts = [_comment(launch.headline)]
    if launch.notes:
        parts.append("\n".join(["# Before:", *(_comment(note, "#   - ", "#     ") for note in launch.notes)]))
    parts += [f"cat > {name} <<'EOF'\n{_yaml(content)}EOF" for name, content in launch.files.items()]
    if launch.files and checkpoint.architecture.model_type == PATCHED:
        parts.append(patch_of(checkpoint))
    parts += [_process(process, len(launch.processes) > 1) for process in launch.processes]
    parts.append("\n".join(["# Why:", *_reasons(launch, origins)]))
    if launch.expected:
        parts.append("\n".join(_speed(launch.expected)))
    return "\n\n".join(parts) + "\n"


def patch_of(checkpoint: Checkpoint) -> str:
    """Return the changes of config and tokenizer for older stacks, as a patch if the files are here.

    Raises:
        CheckpointError: A file cannot be changed; see `alias_changes`.
    """
    folder = Path(checkpoint.place)
    if not (checkpoint.is_folder and folder.is_dir()):
        made = "`snakemake patch_hf_config` with model.patch.target=deepseek_v32 makes them in a copy"
        lines = [f"In the folder of {checkpoint.place}, for transformers 4 ({made}):", *GUIDE_CHANGES]
        return "\n".join([_comment(lines[0]), *(f"#   {line}" for line in lines[1:])])
    diffs: list[str] = []
    for name, changes in alias_changes(folder).items():
        changed = apply_changes(read_object(folder / name), changes, name)
        old, new = (folder / name).read_text(encoding="utf-8"), json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
        found = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}")
        diffs += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found]
    return f"patch -p1 -d {shlex.quote(checkpoint.place)} <<'EOF'\n{''.join(diffs)}EOF"


def _process(process: Process, is_one_of_many: bool) -> str:
    exports = [f"export {item.name}={shlex.quote(str(item.value))}" for item in process.environment]
    if process.is_ours:
        exports.append(f': "${{{SECRET_VARIABLE}:?a text that only those who may ask know}}"; export {SECRET_VARIABLE}')
    words = [" ".join(map(shlex.quote, process.program))]
    for item in process.flags:
        words.append(item.name if item.value is True else f"{item.name} {shlex.quote(str(item.value))}")
    title = [f"# {process.title}"] if is_one_of_many else []
    return "\n".join([*title, *exports, " \\\n  ".join(words)])


def _reasons(launch: Launch, origins: Mapping[str, str]) -> Iterable[str]:
    seen: set[tuple[str, object]] = set()
    for process in launch.processes:
        for item in (*process.environment, *process.flags):
            if (item.name, item.value) not in seen:
                seen.add((item.name, item.value))
                shown = item.name if item.value is True else f"{item.name} {one_line(str(item.value))}"
                yield _comment(f"{shown}: {reason_of(item, origins)}", "#   ", "#       ")


def _speed(expected: Sequence[ServedRow]) -> Iterable[str]:
    yield _comment(f"Expected of requests of 2,048 and 512 tokens, without drafts; a roofline {FITTED_TO}:")
    yield f"#   {'clients':>7} {'tokens/s':>9} {'to the first, s':>16} {'between two, ms':>16}"
    for row in expected:
        times = f"{row.ttft_ms / 1e3:>16.2f} {row.tpot_ms:>16.1f}"
        yield f"#   {row.concurrency:>7} {row.output_tokens_per_second:>9,.0f} {times}"


def reason_of(item: Flag, origins: Mapping[str, str]) -> str:
    """Return the reason of a flag's value, and the key and file that set it."""
    files = [f"{key} in {origins[key]}" for key in item.keys if key.startswith("hardware.") and key in origins]
    named = ", ".join(files) or ", ".join(item.keys)
    return f"{item.reason} ({named})" if item.reason and files else item.reason or named


def _yaml(content: Mapping[str, object]) -> str:
    return str(yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=False))


def _comment(text: str, first: str = "# ", later: str = "# ") -> str:
    return textwrap.fill(
        one_line(text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
