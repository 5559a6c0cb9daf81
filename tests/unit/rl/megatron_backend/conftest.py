from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.hub_tensors import fill
from tests.support.megatron_single import initialize_single_rank, test_config
from tests.support.tiny_checkpoint import TRAINED, make_random_checkpoint

LENGTHS = (41, 9, 64, 33, 17)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("random") / "hf"
    return folder, make_random_checkpoint(folder, TRAINED, seed=3)


@pytest.fixture(scope="session")
def make_policy(checkpoint):
    """Return what makes one rank with optimizer, filled with the random checkpoint."""

    def make(config):
        from posttrain.rl.megatron_backend.model import build_policy
        from posttrain.rl.megatron_backend.weights import HubWeights

        initialize_single_rank(config)
        policy = build_policy(config)
        weights = HubWeights(policy.chunks, config.model.architecture)
        fill(weights, checkpoint[1])
        policy.optimizer.reload_model_params()
        return policy

    return make


@pytest.fixture(scope="session")
def policy(make_policy):
    return make_policy(test_config(TRAINED))


@pytest.fixture(scope="session")
def make_reference(checkpoint):
    """Return what makes the same weights in transformers; its top-k gives ties to the lower position."""

    def make(**changes):
        from transformers import GlmMoeDsaForCausalLM

        from posttrain.rl.engines.embedded.stable_topk import make_indexers_stable

        model = GlmMoeDsaForCausalLM.from_pretrained(
            checkpoint[0], dtype=torch.float32, attn_implementation="eager", **changes
        )
        make_indexers_stable(model)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def reference(make_reference):
    return make_reference()


@pytest.fixture(scope="session")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    # Tokens 0 and 1 are left out: transformers gives the padding token's embedding no gradient.
    return [torch.randint(2, TRAINED.vocab_size, (length,), generator=generator) for length in LENGTHS]
