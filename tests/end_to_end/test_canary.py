"""What a run has exported is served, and only that is called ready, by the trainer's own words: real engines."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.rejections import assert_rejected
from tests.support.served_in_foreground import EMBEDDED, serve, serving
from tests.support.workflow_runs import WorkflowFolder

from posttrain.checkpoint.reference_logprobs import CANARY_NAME, read_reference_logprobs
from posttrain.rl.data.chat import ChatTokenizer, stop_token_ids
from posttrain.rl.engines.ports import choose_free_ports

pytestmark = pytest.mark.slow


def copied(export: Path, folder: Path) -> Path:
    """Return a copy whose weights are noise."""
    folder.mkdir()
    for path in export.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        noise = {
            name: (torch.randn(tensor.shape, generator=generator) * 0.02).to(tensor.dtype)
            for name, tensor in load_file(path).items()
        }
        save_file(noise, path, metadata={"format": "pt"})
    return folder


def test_the_export_has_what_the_trainer_said_and_what_its_origin_renders(undisturbed: WorkflowFolder) -> None:
    export = undisturbed.run_folder / "hf"
    (origin,) = undisturbed.store.glob("tiny/*/hf")
    canary = read_reference_logprobs(export)
    assert canary is not None
    assert canary.trainer == "fp32"
    assert len({prompt.prompt_tokens[-8] for prompt in canary.prompts} | {*map(str, canary.prompts)}) >= 4
    tokenizer = ChatTokenizer(export)
    for prompt in canary.prompts:
        assert list(tokenizer.render(prompt.messages, prompt.tools)) == prompt.prompt_tokens
    assert not (origin / CANARY_NAME).exists()
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (export / name).read_bytes() == (origin / name).read_bytes()
    assert stop_token_ids(export) == stop_token_ids(origin)


def test_what_was_measured_after_training_was_held_against_it(undisturbed: WorkflowFolder) -> None:
    log = undisturbed.folder / "logs" / "evaluate" / f"{undisturbed.run_folder.name}.after.log"
    assert f"serves {undisturbed.run_folder / 'hf'}: its log-probabilities are" in log.read_text()


def test_a_server_is_ready_checked_and_stopped(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    export, (port,) = undisturbed.run_folder / "hf", choose_free_ports(1)
    words = (export, *EMBEDDED, "--port", port)
    with serving(tmp_path, *words) as process:
        told = json.loads(next((tmp_path / "results/serving").glob("*.json")).read_text())
        assert (told["port"], told["checkpoint"], told["gpus"]) == (port, str(export), [])
        assert "renders prompts as the trainer did" in serve(tmp_path, export, "--check", f"127.0.0.1:{port}")
        refused = serve(tmp_path, *words, code=1)
        assert f"port {port} = has process {process.pid}" in refused
        assert "--stop` ends it" in refused
        assert "has ended" in serve(tmp_path, export, "--stop")
        assert process.wait(30) == 128 + signal.SIGTERM
        assert "nothing to end" in serve(tmp_path, export, "--stop")


@pytest.mark.faults("slow")
def test_one_that_serves_noise_is_ended(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    export, (port,) = undisturbed.run_folder / "hf", choose_free_ports(1)
    noise = copied(export, tmp_path / "noise")
    refused = serve(tmp_path, noise, *EMBEDDED, "--port", port, code=1)
    assert_rejected(refused, "logprobs-differ", "dummy weights")
    assert "renders" not in refused
    assert list((tmp_path / "results/serving").glob("*.json")) == []
    (noise / CANARY_NAME).unlink()
    assert f"{CANARY_NAME} = not in" in serve(tmp_path, noise, "--check", f"127.0.0.1:{port}", code=1)


@pytest.mark.faults("slow")
def test_a_server_that_was_killed_leaves_a_stale_lease(undisturbed: WorkflowFolder, tmp_path: Path) -> None:
    export, (port,) = undisturbed.run_folder / "hf", choose_free_ports(1)
    with serving(tmp_path, export, *EMBEDDED, "--port", port, until="loaded") as process:
        process.kill()
    assert list((tmp_path / "results/serving").glob("*.json"))
    with serving(tmp_path, export, *EMBEDDED, "--port", port, until="loaded") as process:
        assert "was killed: its lease is stale" in (tmp_path / "server.log").read_text()
        process.kill()
        process.wait()
        assert "its lease was stale, and is gone" in serve(tmp_path, "--stop")
