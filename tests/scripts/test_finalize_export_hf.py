import random

import pytest
from tests.support.checkpoint_store import (
    NUM_PARTS,
    assert_same_folder,
    make_export,
    make_store,
    make_torch_dist,
    run_here,
)
from tests.support.killing import run_killed
from tests.support.rejections import rejected

from posttrain.checkpoint.export import final_weights_sha256
from posttrain.checkpoint.reference_logprobs import (
    CANARY_NAME,
    ReferenceLogprobs,
    ReferencePrompt,
    read_reference_logprobs,
    write_reference_logprobs,
)
from posttrain.rl.data.chat import stop_token_ids
from posttrain.store import part_receipt_of, read_receipt, receipt_of


@pytest.fixture
def store(tmp_path):
    """All parts are there."""
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    for part in range(NUM_PARTS):
        run_here("export_hf", store.export(part))
    return store


def test_the_last_step_survives_kills_and_ends_with_the_same_bytes(tmp_path, store):
    folder = store.folder("hf")
    points = sorted(random.Random(7).sample(range(1, 20), 7))
    endings = run_killed(
        "finalize_export_hf",
        store.finalize_export(),
        tmp_path,
        [*points, 10**9],
        claim=(folder, receipt_of(folder)),
    )
    assert endings.count(-9) >= 7
    assert endings[-1] == 0
    make_export(store, "undisturbed")
    assert_same_folder(folder, store.folder("undisturbed"))
    for shard in folder.glob("*.safetensors"):
        assert shard.read_bytes() == (store.source / shard.name).read_bytes(), "converted and exported: the origin"


def test_the_hash_of_all_weights_is_taken_while_they_are_written(store):
    run_here("finalize_export_hf", store.finalize_export())
    receipt = read_receipt(receipt_of(store.folder("hf")))
    assert receipt.settings == {"final_weights_sha256": final_weights_sha256(store.source)}


def test_a_missing_part_is_refused(store):
    part_receipt_of(store.folder("hf"), 1).unlink()
    with rejected("receipt-missing"):
        run_here("finalize_export_hf", store.finalize_export())
    assert not store.folder("hf").exists()


def test_the_trainers_canary_goes_with_the_weights_and_the_origins_stays(tmp_path):
    store = make_store(tmp_path / "store")
    make_torch_dist(store)
    of_origin, of_trainer = (
        ReferenceLogprobs("bf16", {}, [ReferencePrompt([], None, [token], [3], [-1.0])]) for token in (1, 2)
    )
    write_reference_logprobs(store.source, of_origin)
    make_export(store, "without")
    assert read_reference_logprobs(store.folder("without")) is None, "the origin's is of other weights"
    write_reference_logprobs(store.folder("torch_dist"), of_trainer)
    make_export(store)
    assert read_reference_logprobs(store.folder("hf")) == of_trainer
    assert CANARY_NAME in {record.path for record in read_receipt(receipt_of(store.folder("hf"))).files}


def test_what_ends_a_response_is_the_origins(store):
    run_here("finalize_export_hf", store.finalize_export())
    others = {path.name for path in store.source.iterdir() if ".safetensors" not in path.name}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= others
    for name in others:
        assert (store.folder("hf") / name).read_bytes() == (store.source / name).read_bytes()
    assert stop_token_ids(store.folder("hf")) == stop_token_ids(store.source) != frozenset()
