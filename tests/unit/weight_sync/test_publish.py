"""What engines that started without weights must get: every tensor of the checkpoint that they started from."""

import pytest
import torch
from tests.tiny_checkpoint import TINY, make_random_checkpoint, random_tensors

from posttrain.errors import CheckpointError
from posttrain.weight_sync.publish import whole_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("publish") / "hf"
    make_random_checkpoint(folder, TINY, seed=1)
    return folder


@pytest.fixture
def trained():
    """What a trainer has: all but the MTP layer."""
    prefix = f"model.layers.{TINY.num_hidden_layers}."
    return {name: tensor for name, tensor in random_tensors(TINY, 1).items() if not name.startswith(prefix)}


def test_what_is_not_trained_is_the_mtp_layer(folder, trained):
    everything = random_tensors(TINY, 1)
    assert len(trained) < len(everything)
    assert dict(whole_checkpoint(trained.items(), folder, TINY.num_hidden_layers, drafts=False)) == trained
    sent = dict(whole_checkpoint(trained.items(), folder, TINY.num_hidden_layers, drafts=True))
    assert sent.keys() == everything.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in everything.items())


def test_what_is_missing_is_named(folder, trained):
    del trained["model.norm.weight"], trained["model.layers.1.mlp.gate.e_score_correction_bias"]
    sent = whole_checkpoint(trained.items(), folder, TINY.num_hidden_layers, drafts=True)
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias, model\.norm\.weight$") as raised:
        dict(sent)
    assert str(folder) in str(raised.value)
