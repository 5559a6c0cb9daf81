"""What a run trained on, from its stored rollouts: prompts, seeds, versions and rewards of each step, derived again.

Nothing of ours decides what is expected: the order of prompts and the seeds follow from the documented formulas, the
tokens from transformers' model with the weights that are on disk, before the first step and after the second.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.workflow_runs import WorkflowFolder

pytestmark = pytest.mark.slow

# Of config/models/tiny.yaml, config/base.yaml and FAST.
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, PROMPTS_PER_REQUEST = 4, 4, 8, 2
DATA_SEED, TRAINING_SEED = 7, 42


@pytest.fixture(scope="module")
def rollouts(undisturbed: WorkflowFolder) -> list[list[dict]]:
    """The groups of each step."""
    folder, steps = undisturbed.folder / "rollouts", []
    for step in range(NUM_STEPS):
        paths = sorted(folder.glob(f"step_{step:06d}-chunk_*.json"))
        chunks = [json.loads(path.read_text()) for path in paths]
        assert [len(chunk) for chunk in chunks] == [PROMPTS_PER_REQUEST] * (NUM_PROMPTS // PROMPTS_PER_REQUEST)
        steps.append([group for chunk in chunks for group in chunk])
    return steps


@pytest.fixture(scope="module")
def tokenizer(store: Path):
    from transformers import AutoTokenizer

    (folder,) = store.glob("tiny/*/hf")
    return AutoTokenizer.from_pretrained(folder)


def samples_of(step: list[dict]) -> Iterator[tuple[int, dict, dict]]:
    """Yield the place of the prompt in its step, the group and each of its samples."""
    for place, group in enumerate(step):
        for sample in group["trajectories"]:
            yield place, group, sample


def parts_of(sample: dict) -> tuple[list[int], list[int]]:
    """Return the prompt and the response."""
    start = sample["loss_mask"].index("1")
    assert "0" not in sample["loss_mask"][start:]
    return sample["tokens"][:start], sample["tokens"][start:]


def test_each_step_has_the_next_prompts_of_the_shuffled_dataset(store: Path, rollouts, tokenizer) -> None:
    (file,) = store.glob("datasets/sort_digits-*/train.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    order = list(range(len(rows)))
    random.Random(f"prompt order, seed {DATA_SEED}, epoch 0").shuffle(order)
    for step, groups in enumerate(rollouts):
        expected = order[step * NUM_PROMPTS : (step + 1) * NUM_PROMPTS]
        assert [group["prompt"]["prompt_id"] for group in groups] == expected
        for place, group, sample in samples_of(groups):
            row = rows[expected[place]]
            assert (group["prompt"]["messages"], group["prompt"]["label"]) == (row["prompt"], row["label"])
            asked = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            assert (sample["prompt_id"], parts_of(sample)[0]) == (expected[place], asked)
        assert all([s["sample_index"] for s in group["trajectories"]] == list(range(NUM_SAMPLES)) for group in groups)


def test_each_step_was_sampled_from_the_weights_before_it(rollouts) -> None:
    for step, groups in enumerate(rollouts):
        versions = [sample["versions"] for _, _, sample in samples_of(groups)]
        assert all([span["version"] for span in spans] == [step or None] for spans in versions)


def test_rewards_and_metrics_are_those_of_the_stored_responses(undisturbed, rollouts, tokenizer) -> None:
    for row, groups in zip(undisturbed.metrics(), rollouts, strict=True):
        rewards = []
        for _, group, sample in samples_of(groups):
            text = tokenizer.decode(parts_of(sample)[1], skip_special_tokens=True)
            rewards.append(float(text.strip() == group["prompt"]["label"]))
            assert sample["reward"] == rewards[-1], text
        assert row["rollout/reward_mean"] == pytest.approx(np.mean(rewards))


def uniforms(step: int, place: int, index: int, count: int) -> np.ndarray:
    """The random numbers of a response: the embedded engine draws one a token from its seed."""
    digest = hashlib.sha256(json.dumps([TRAINING_SEED, step, place, index]).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:4], "big") >> 1)).random(count)


@pytest.fixture(scope="module")
def served(store: Path) -> dict[str, torch.Tensor]:
    """What the engines began with: FP8 codes, scales, and tensors that are not quantised."""
    (folder,) = store.glob("tiny/*/rollout_fp8-????????")
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def dequantized(served: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = {name: tensor.float() for name, tensor in served.items() if not name.endswith("_scale_inv")}
    for name in values.keys() & {scale.removesuffix("_scale_inv") for scale in served.keys() - values.keys()}:
        rows, columns = values[name].shape
        blocks = served[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        values[name] = values[name] * blocks[:rows, :columns]
    return values


def trained(run_folder: Path, finished: int) -> dict[str, torch.Tensor]:
    """Return the trainer's weights after so many steps by Hub name, in the Hub's precision."""
    from posttrain.checkpoint.formats.torch_dist_reader import TorchDistReader
    from posttrain.checkpoint.param_names import to_megatron
    from posttrain.config.load import load_resolved

    reader = TorchDistReader(run_folder / f"train/checkpoints/step_{finished:06d}")
    placed = to_megatron(load_resolved(run_folder / "config.resolved.yaml").model.architecture)
    return {
        p.hf_name: torch.cat([reader.read(p.key, *box) for box in p.boxes])
        .reshape(p.spec.shape)
        .to({"BF16": torch.bfloat16, "F32": torch.float32}[p.dtype])
        for p in placed
        if p.key in reader.keys
    }


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix of one block as FP8 holds it: its largest magnitude becomes 448; torch rounds."""
    assert max(weight.shape) <= 128
    scale = weight.float().abs().amax() / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def model_of(tensors: dict[str, torch.Tensor], store: Path, folder: Path):
    """Return transformers' model with these tensors."""
    from transformers import GlmMoeDsaForCausalLM

    from posttrain.rl.engines.embedded.stable_topk import make_indexers_stable

    (source,) = store.glob("tiny/*/hf")
    shutil.copy(source / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    make_indexers_stable(model)
    return model


@pytest.mark.parametrize("step", [0, 2])
def test_every_response_follows_from_its_seed_and_the_weights_of_its_step(
    store: Path, undisturbed: WorkflowFolder, rollouts, served, step: int, tmp_path: Path
) -> None:
    """Of the other steps the weights are not kept."""
    tensors = dequantized(served)
    if step:
        after = trained(undisturbed.run_folder, step)
        values = {n: rounded(t) if f"{n}_scale_inv" in served else t.float() for n, t in after.items()}
        assert not torch.equal(values["lm_head.weight"], tensors["lm_head.weight"])
        tensors |= values
    model = model_of(tensors, store, tmp_path)
    for place, _, sample in samples_of(rollouts[step]):
        prompt, response = parts_of(sample)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
        probabilities = logits.softmax(-1).numpy()
        numbers = uniforms(step, place, sample["sample_index"], len(response))
        assert (probabilities.cumsum(-1) > numbers[:, None]).argmax(-1).tolist() == response
        logprobs = np.log(probabilities[range(len(response)), response])
        assert np.abs(logprobs - sample["logprobs"]).max() < 1e-4
