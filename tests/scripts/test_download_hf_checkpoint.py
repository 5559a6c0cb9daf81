import random
import resource
import signal
import subprocess
import time

import pytest
from tests.support.downloading import NEEDED, StoreFolder, from_folder, from_hub
from tests.support.hub_server import HubServer
from tests.support.killing import run_killed
from tests.support.rejections import assert_rejected
from tests.support.small_checkpoint import make_small_checkpoint

from posttrain.store import hash_file, part_receipt_of, partial_of, read_receipt, receipt_of, require_files

CANARY = "hf_canary0123456789"
LARGE = "tokenizer.model"
LARGE_BYTES = 3 << 20


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def origin(tmp_path):
    return make_small_checkpoint(tmp_path / "origin")


@pytest.fixture
def store(hub, tmp_path):
    return StoreFolder(tmp_path / "store", environment={"HF_ENDPOINT": hub.url})


def _hashes(folder):
    return {path.name: hash_file(path) for path in sorted(folder.iterdir())}


def test_a_download_survives_kills_and_ends_with_the_hubs_bytes(hub, origin, store, tmp_path):
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    rng = random.Random(1)
    for script, most in (("list_hf_checkpoint", 8), ("download_hf_checkpoint", 90), ("finalize_hf_checkpoint", 25)):
        points = sorted(rng.sample(range(1, most), min(most - 1, 10)))
        endings = run_killed(
            script,
            store.arguments(script, source),
            store.store,
            [*points, 10**9],
            env=store.environment,
            claim=(store.folder, receipt_of(store.folder)),
        )
        assert endings.count(-9) >= 2, (script, endings)
        assert endings[-1] == 0, script
    receipt = require_files(store.folder, receipt_of(store.folder), content=True)
    assert [record.path for record in receipt.files] == NEEDED
    assert _hashes(store.folder) == {name: hash_file(origin / name) for name in NEEDED}
    assert sorted(path.name for path in store.store.iterdir()) == [
        *("hf", "hf.history.jsonl", "hf.lease", "hf.manifest.json", "hf.parts", "hf.receipt.json")
    ]


def test_the_number_of_parts_makes_no_difference(hub, origin, tmp_path):
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    receipts = []
    for num_parts in (1, 3):
        hub.fetched.clear()
        store = StoreFolder(tmp_path / str(num_parts), num_parts, {"HF_ENDPOINT": hub.url})
        done = store.run_all(*source)
        assert done.returncode == 0, done.stderr
        assert hub.fetched == dict.fromkeys(NEEDED, 1)
        receipts.append(require_files(store.folder, receipt_of(store.folder), content=True))
    assert receipts[0].digest == receipts[1].digest
    assert [record.path for record in receipts[0].files] == NEEDED
    assert receipts[0].settings.keys() == {"repo_id", "revision", "manifest"}
    assert receipts[0].inputs == {}


def test_a_process_killed_in_the_middle_of_a_file_costs_no_bytes(hub, origin, store):
    (origin / LARGE).write_bytes(random.Random(2).randbytes(LARGE_BYTES))
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    assert store.run("list_hf_checkpoint", *source).returncode == 0
    hub.faults.bytes_per_second = 4 << 20
    for kills in range(1, 4):
        process = subprocess.Popen(store.command("download_hf_checkpoint"), env=store.env, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while hub.sent_bytes[LARGE] < kills * LARGE_BYTES // 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    hub.faults.bytes_per_second = 0
    done = store.run("download_hf_checkpoint")
    assert done.returncode == 0, done.stderr
    assert f"{LARGE}: goes on at byte " in done.stderr
    assert store.run("finalize_hf_checkpoint").returncode == 0
    total = sum((origin / name).stat().st_size for name in [*NEEDED, LARGE])
    assert hub.fetched[LARGE] == 4
    assert sum(hub.sent_bytes.values()) <= 1.1 * total
    require_files(store.folder, receipt_of(store.folder), content=True)


def test_a_shard_that_is_truncated_afterwards_is_the_only_one_fetched_again(hub, origin, store):
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    assert store.run_all(*source).returncode == 0
    before = read_receipt(receipt_of(store.folder)).digest
    with open(store.folder / NEEDED[3], "r+b") as file:
        file.truncate(1000)
    receipt_of(store.folder).unlink()
    refused = store.run("finalize_hf_checkpoint")
    assert refused.returncode == 1
    assert f"{NEEDED[3]}: 1000 bytes" in refused.stderr
    assert f"remedy: rm {part_receipt_of(store.folder, '*')} and run again" in refused.stderr
    hub.fetched.clear()
    for script in ("download_hf_checkpoint", "finalize_hf_checkpoint"):
        done = store.run(script)
        assert done.returncode == 0, done.stderr
    assert hub.fetched == {NEEDED[3]: 1}
    assert read_receipt(receipt_of(store.folder)).digest == before


def test_a_disk_that_becomes_full_is_one_message_and_keeps_what_is_there(hub, origin, store):
    """A limit on file sizes stands for the full disk: both end a write with an error of the system."""
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    assert store.run("list_hf_checkpoint", *source).returncode == 0
    limit = (origin / NEEDED[3]).stat().st_size
    assert (origin / NEEDED[2]).stat().st_size > limit
    done = store.run(
        "download_hf_checkpoint",
        more=["--threads", 1],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "raise the limit (`ulimit -f`)" in done.stderr
    assert "then run the same command again: what is finished is kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert store.run("download_hf_checkpoint").returncode == 0
    assert hub.sent_bytes[NEEDED[2]] <= (origin / NEEDED[2]).stat().st_size + (64 << 10)


def test_a_folder_that_is_a_link_is_not_written_to(hub, origin, store):
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    assert store.run("list_hf_checkpoint", *source).returncode == 0
    store.folder.symlink_to(origin)
    before = _hashes(origin)
    done = store.run("download_hf_checkpoint")
    assert done.returncode == 1
    assert f"set model.source.kind=folder model.source.folder={origin}" in done.stderr
    assert _hashes(origin) == before


def test_files_under_both_names_are_joined_and_verified(hub, origin, store):
    source = from_hub("owner/small", hub.add_repo("owner/small", origin))
    assert store.run("list_hf_checkpoint", *source).returncode == 0
    for folder, names in ((store.folder, NEEDED[:3]), (partial_of(store.folder), NEEDED[2:5])):
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes((origin / name).read_bytes())
    (store.folder / "README.md").write_text("of somebody\n")
    for script in ("download_hf_checkpoint", "finalize_hf_checkpoint"):
        done = store.run(script)
        assert done.returncode == 0, done.stderr
    assert hub.fetched == dict.fromkeys(NEEDED[5:], 1)
    assert sorted(_hashes(store.folder)) == NEEDED
    assert (store.store / "hf.not_needed" / "README.md").read_text() == "of somebody\n"


def test_offline_a_folder_that_was_put_there_is_adopted(origin, tmp_path):
    store = StoreFolder(tmp_path / "store", environment={"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"})
    source = from_hub("owner/small", "a" * 40)
    done = store.run_all(*source)
    assert done.returncode == 1
    assert_rejected(done.stderr, "offline-without-files", "HF_HUB_OFFLINE")
    make_small_checkpoint(store.folder)
    (store.folder / NEEDED[6]).rename(tmp_path / "tokenizer")
    done = store.run_all(*source)
    assert done.returncode == 1
    assert "no tokenizer" in done.stderr
    (tmp_path / "tokenizer").rename(partial_of(store.folder) / NEEDED[6])
    done = store.run_all(*source)
    assert done.returncode == 0, done.stderr
    receipt = require_files(store.folder, receipt_of(store.folder), content=True)
    assert [record.path for record in receipt.files] == NEEDED


def test_a_local_folder_is_linked_without_a_network(origin, tmp_path):
    store = StoreFolder(tmp_path / "store", 2, {"HF_ENDPOINT": "http://127.0.0.1:9"})
    done = store.run_all(*from_folder(origin))
    assert done.returncode == 0, done.stderr
    assert _hashes(store.folder) == {name: hash_file(origin / name) for name in NEEDED}
    assert (store.folder / NEEDED[2]).samefile(origin / NEEDED[2])


def test_the_token_appears_nowhere(hub, origin, store):
    source = from_hub("owner/private", hub.add_repo("owner/private", origin, token=CANARY))
    hub.faults.cut_after[NEEDED[2]] = [1000]
    store.environment |= {"HF_TOKEN": CANARY, "POSTTRAIN_LOG": str(store.store / "log"), "POSTTRAIN_LOG_LEVEL": "DEBUG"}
    done = store.run("list_hf_checkpoint", *source)
    assert done.returncode == 0, done.stderr
    hub.faults.busy = [(503, "")]
    process = subprocess.Popen(store.command("download_hf_checkpoint"), env=store.env, stderr=subprocess.PIPE)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    assert b"retry 1 of 8" in printed
    assert CANARY.encode() not in printed
    assert CANARY not in " ".join(map(str, process.args))
    written = [path for path in store.store.rglob("*") if path.is_file()]
    assert store.store / "log" in written
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert hub.tokens == {"127.0.0.1": {f"Bearer {CANARY}"}, "localhost": {""}}, "it is sent to the Hub alone"
