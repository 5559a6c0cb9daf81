import fcntl
import hashlib
import os
import shutil
import socket
import time
from dataclasses import replace

import huggingface_hub
import pytest
from tests.support.hub_server import HubServer
from tests.support.rejections import rejected
from tests.support.small_checkpoint import make_small_checkpoint

from posttrain.checkpoint.hub.client import FetchOptions, download, is_needed
from posttrain.checkpoint.hub.listed_files import ListedFile
from posttrain.checkpoint.hub.listing import HubSource
from posttrain.checkpoint.hub.retries import RetryRule
from posttrain.checkpoint.hub.transfer import incomplete_path
from posttrain.checkpoint.staging import file_placement
from posttrain.errors import ConfigError
from posttrain.store import record_files

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
SHARD_1, SHARD_2, _ = SHARDS
TOKENIZER = ["tokenizer.json", "tokenizer_config.json"]
NEEDED = ["chat_template.jinja", "config.json", *SHARDS, "model.safetensors.index.json", *TOKENIZER]
# As patient as by default, and a thousand times quicker.
QUICK = RetryRule(first_wait_seconds=0.001, longest_wait_seconds=0.01)


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def origin(tmp_path):
    return make_small_checkpoint(tmp_path / "origin")


@pytest.fixture
def source(hub, origin):
    return HubSource("owner/small", hub.add_repo("owner/small", origin), endpoint=hub.url)


@pytest.fixture
def fetch(source, tmp_path):
    def fetch(source=source, **options):
        options = FetchOptions(**{"rule": QUICK, **options})
        return download(source, tmp_path / "hf.partial", tmp_path / "hf.manifest.json", options=options)

    return fetch


@pytest.fixture
def offline(monkeypatch):
    def go_offline():
        def refuse(*_):
            raise AssertionError("the network was used")

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(socket.socket, "connect", refuse)

    return go_offline


def test_all_needed_files_arrive_with_the_hubs_hashes(fetch, hub, origin, tmp_path):
    records = fetch()
    assert sorted(os.listdir(tmp_path / "hf.partial")) == NEEDED == [record.path for record in records]
    assert tuple(replace(record, sha256="") for record in records) == record_files(origin, NEEDED)
    assert [record.path for record in records if record.sha256] == SHARDS
    assert records[2].sha256 == hashlib.sha256((origin / SHARD_1).read_bytes()).hexdigest()
    assert hub.fetched == dict.fromkeys(NEEDED, 1)


def test_progress_is_counted_in_bytes_up_to_all_of_them(fetch, hub, origin, caplog):
    caplog.set_level("INFO")
    hub.faults.wrong_bytes[SHARD_2] = 1
    fetch()
    total = sum((origin / name).stat().st_size for name in NEEDED) / 1e6
    what = f"the download of owner/small@{hub.revision('owner/small')[:12]}"
    assert f"{what}: {total:.1f} of {total:.1f} MB (100 %)" in caplog.text


def test_a_second_call_fetches_nothing(fetch, hub):
    first = fetch()
    hub.fetched.clear()
    assert fetch() == first
    assert not hub.fetched


def test_only_truncated_changed_and_lost_files_are_fetched_again(fetch, hub, tmp_path):
    first, folder = fetch(), tmp_path / "hf.partial"
    hub.fetched.clear()
    os.truncate(folder / SHARD_1, 1000)
    with open(folder / SHARD_2, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    (folder / "tokenizer.json").unlink()
    assert fetch() == first
    assert hub.fetched == {SHARD_1: 1, SHARD_2: 1, "tokenizer.json": 1}


def test_files_are_fetched_several_at_a_time(fetch, hub):
    hub.faults.bytes_per_second = 200_000
    fetch(num_workers=4)
    assert hub.most_at_once > 1


def test_bytes_that_arrive_wrong_once_are_fetched_again(fetch, hub, caplog):
    hub.faults.wrong_bytes[SHARD_2] = 1
    fetch()
    assert hub.fetched[SHARD_2] == 2
    assert f"attempt 1 of 2 to fetch {SHARD_2}: SHA-256" in caplog.text


@pytest.mark.parametrize(("name", "kind"), [(SHARD_2, "SHA-256"), ("config.json", "Git blob id")])
def test_bytes_that_stay_wrong_are_refused(fetch, hub, tmp_path, name, kind):
    hub.faults.wrong_bytes[name] = 9
    with rejected("download-corrupt", name, "2 times", kind):
        fetch()
    assert not (tmp_path / "hf.partial" / name).exists()


def incomplete(origin, tmp_path, name):
    """Return where a shard lies while it arrives."""
    sha256 = hashlib.sha256((origin / name).read_bytes()).hexdigest()
    path = incomplete_path(tmp_path / "hf.partial", ListedFile(name, (origin / name).stat().st_size, sha256))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_nothing_arrives_behind_a_link(fetch, hub, origin, tmp_path):
    """Where a file lies while it arrives can be known, because another process goes on with it."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    incomplete(origin, tmp_path, SHARD_1).symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        fetch()
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("xet", [False, True])
def test_no_folder_of_arriving_files_is_a_link(fetch, hub, tmp_path, xet):
    (tmp_path / "victim").mkdir()
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / ".download").symlink_to(tmp_path / "victim")
    with rejected("link-in-the-way", f"{tmp_path}/hf.partial/.download"):
        fetch(xet=xet)
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_cut_connection_is_resumed_at_the_byte(fetch, hub, origin, caplog):
    size = (origin / SHARD_1).stat().st_size
    hub.faults.cut_after[SHARD_1] = [size // 2, 0, 100]
    fetch()
    assert hub.fetched[SHARD_1] == 4
    assert hub.sent_bytes[SHARD_1] == size
    assert f"owner/small@{hub.revision('owner/small')[:12]}: {SHARD_1}: RemoteProtocolError" in caplog.text
    assert "retry 2 of 8 in 0.0 s" in caplog.text


def test_bytes_of_an_earlier_process_are_not_fetched_again(fetch, hub, origin, tmp_path, caplog):
    caplog.set_level("INFO")
    content = (origin / SHARD_1).read_bytes()
    incomplete(origin, tmp_path, SHARD_1).write_bytes(content[:-500])
    fetch()
    assert hub.sent_bytes[SHARD_1] == 500
    assert f"{SHARD_1}: goes on at byte {len(content) - 500} of {len(content)}" in caplog.text
    assert not (tmp_path / "hf.partial" / ".download").exists()


def test_a_file_that_had_arrived_as_a_whole_is_only_verified(fetch, hub, origin, tmp_path):
    shutil.copyfile(origin / SHARD_1, incomplete(origin, tmp_path, SHARD_1))
    fetch()
    assert SHARD_1 not in hub.fetched


@pytest.mark.parametrize("left", [lambda content: b"?" * 1000, lambda content: content + b"more"])
def test_wrong_bytes_of_an_earlier_process_cost_one_whole_transfer(fetch, hub, origin, tmp_path, left):
    content = (origin / SHARD_1).read_bytes()
    incomplete(origin, tmp_path, SHARD_1).write_bytes(left(content))
    fetch()
    assert hub.sent_bytes[SHARD_1] <= 2 * len(content)
    assert (tmp_path / "hf.partial" / SHARD_1).read_bytes() == content


def test_bytes_of_other_content_are_not_taken_up(fetch, hub, origin, tmp_path):
    incomplete(origin, tmp_path, SHARD_1).with_name(f"{SHARD_1}.{'0' * 16}.incomplete").write_bytes(b"?" * 1000)
    fetch()
    assert hub.sent_bytes[SHARD_1] == (origin / SHARD_1).stat().st_size
    assert hub.fetched[SHARD_1] == 1


def test_a_server_without_ranges_sends_the_file_anew(fetch, hub, origin, tmp_path, caplog):
    caplog.set_level("INFO")
    size = (origin / SHARD_1).stat().st_size
    hub.faults.no_ranges = True
    hub.faults.cut_after[SHARD_1] = [size // 2, 1000]
    fetch()
    assert hub.sent_bytes[SHARD_1] == size // 2 + 1000 + size
    assert "the server sends no ranges, the file begins anew" in caplog.text
    assert "100 %" in caplog.text.splitlines()[-1]


@pytest.mark.parametrize("length", [0, 1000])
def test_a_server_whose_file_is_too_short(fetch, hub, origin, tmp_path, length):
    size = (origin / SHARD_1).stat().st_size
    hub.faults.whole_length[SHARD_1] = length
    incomplete(origin, tmp_path, SHARD_1).write_bytes((origin / SHARD_1).read_bytes()[:2000])
    with rejected("download-corrupt", "2 times", f"{size} are listed"):
        fetch()
    assert not (tmp_path / "hf.partial" / SHARD_1).exists()


def test_a_file_that_has_changed_since_it_was_listed(fetch, hub, origin, tmp_path):
    hub.faults.cut_after[SHARD_1] = [1000]
    hub.on_cut = lambda: (origin / SHARD_1).write_bytes(b"another")
    with rejected("changed-on-hub", SHARD_1):
        fetch()


def test_a_busy_hub_is_asked_again_when_it_says(fetch, hub, caplog):
    hub.faults.busy = [(429, "1"), (503, ""), (500, "")]
    started = time.monotonic()
    fetch()
    assert time.monotonic() - started >= 1
    assert "HTTP 429; retry 1 of 8 in 1.0 s" in caplog.text
    assert "HTTP 503; retry 2 of 8 in 0.0 s" in caplog.text


def test_a_content_server_that_is_busy(fetch, hub, origin, caplog):
    hub.faults.busy_content = [(503, ""), (429, "0"), (500, "")]
    fetch(num_workers=1)
    assert "HTTP 429; retry 2 of 8 in 0.0 s" in caplog.text
    assert "HTTP 500; retry 3 of 8" in caplog.text
    assert all(hub.sent_bytes[name] == (origin / name).stat().st_size for name in NEEDED)


@pytest.mark.parametrize("status", [403, 404])
def test_a_content_server_that_refuses_is_not_taken_for_the_hub(fetch, hub, monkeypatch, status):
    """Its address has expired, say, or a proxy is in the way: no token would help."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.faults.busy_content = [(status, "")]
    server = hub.url.replace("127.0.0.1", "localhost")
    told = f"{server}, which the Hub names for the content and which gets no token, answered with HTTP {status}\n"
    with pytest.raises(RuntimeError, match=told):
        fetch(num_workers=1)


def test_a_hub_that_asks_for_too_much_patience_is_left_alone(fetch, hub):
    hub.faults.busy = [(429, "90000")]
    with pytest.raises(RuntimeError, match=r"answered with HTTP 429 \(1 attempts; it asks to wait for 90000 s\)"):
        fetch()


def test_a_connection_that_stays_cut_is_one_message(fetch, hub, tmp_path):
    hub.faults.cut_after[SHARD_1] = [0] * 9
    with pytest.raises(RuntimeError, match=rf"{SHARD_1}: {hub.url} cannot be reached, or hung up .*\(9 attempts\)"):
        fetch()
    hub.fetched.clear()
    fetch()
    assert hub.fetched[SHARD_1] == 1


def test_nobody_listens(fetch, hub, source):
    nobody = HubSource(source.repo_id, source.revision, endpoint="http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:9 cannot be reached(.|\n)*remedy: check the network"):
        fetch(source=nobody)


def test_a_broken_hub_is_named_with_its_status(fetch, hub):
    hub.faults.status = 503
    with pytest.raises(RuntimeError, match=rf"{hub.url} answered with HTTP 503 \(9 attempts\)"):
        fetch()


def test_the_librarys_own_transfer(fetch, hub, origin):
    """Without a Xet server it falls back to HTTP; what it brings is verified like everything else."""
    records = fetch(xet=True)
    assert tuple(replace(record, sha256="") for record in records) == record_files(origin, NEEDED)
    assert fetch() == records
    assert hub.fetched == dict.fromkeys(NEEDED, 1)


def test_the_librarys_own_transfer_of_wrong_bytes(fetch, hub, tmp_path):
    hub.faults.wrong_bytes[SHARD_2] = 1
    with rejected("download-corrupt", SHARD_2, "download.xet=false"):
        fetch(xet=True)
    assert not (tmp_path / "hf.partial" / SHARD_2).exists()


def test_another_process_that_fetches_the_same_file(fetch, origin, tmp_path):
    with open(incomplete(origin, tmp_path, SHARD_1), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process fetches this file"):
            fetch()
    fetch()


def test_a_revision_that_does_not_exist(fetch, hub, source):
    with pytest.raises(ConfigError) as raised:
        fetch(source=HubSource(source.repo_id, "0" * 40, endpoint=hub.url))
    (problem,) = raised.value.problems
    assert (problem.key, problem.value) == ("model.source.revision", "0" * 40)


def test_a_repository_that_does_not_exist(fetch, hub, source):
    with pytest.raises(ConfigError) as raised:
        fetch(source=HubSource("owner/other", source.revision, key="data", endpoint=hub.url))
    (problem,) = raised.value.problems
    assert (problem.key, problem.value) == ("data.repo_id", "owner/other")
    assert "HF_TOKEN" in problem.remedy


def test_a_gated_repository_needs_a_token(fetch, hub, origin, monkeypatch):
    revision = hub.add_repo("owner/gated", origin, token="hf_secret", gated=True)
    gated = HubSource("owner/gated", revision, endpoint=hub.url)
    with rejected("no-such-repository", "it is gated"):
        fetch(source=gated)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.tokens.clear()
    assert len(fetch(source=gated)) == 8
    assert hub.tokens == {"127.0.0.1": {"Bearer hf_secret"}, "localhost": {""}}, "the token stays with the Hub"


def test_a_disk_without_space_is_refused_before_the_first_byte(fetch, hub, source, origin, tmp_path, monkeypatch):
    total = sum((origin / record.path).stat().st_size for record in fetch())
    for path in (tmp_path / "hf.partial").iterdir():
        if path.name != SHARD_1:
            path.unlink()
    hub.fetched.clear()
    missing = total - (origin / SHARD_1).stat().st_size
    usage = file_placement.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(file_placement.shutil, "disk_usage", lambda folder: usage._replace(free=missing - 1))
    with pytest.raises(OSError, match="not enough disk space for the rest of the download of owner/small@") as refused:
        fetch()
    assert refused.value.__notes__[0].startswith(f"needed: {missing} bytes ")
    assert not hub.fetched


def test_offline_a_complete_folder_passes(fetch, hub, offline):
    online = fetch()
    offline()
    assert fetch() == online


def test_offline_missing_and_changed_files_are_listed(fetch, offline, tmp_path):
    fetch()
    offline()
    (tmp_path / "hf.partial" / SHARD_1).unlink()
    (tmp_path / "hf.partial" / "config.json").write_text("{}")
    with rejected("offline-files-incomplete", "HF_HUB_OFFLINE") as raised:
        fetch()
    assert SHARD_1 in str(raised.value)
    assert "config.json" in str(raised.value)
    assert SHARD_2 not in str(raised.value)


def test_offline_a_folder_that_somebody_put_there_is_taken(fetch, origin, offline, tmp_path):
    offline()
    shutil.copytree(origin, tmp_path / "hf.partial")
    assert fetch() == record_files(origin, NEEDED)


def test_offline_without_any_file(fetch, offline):
    offline()
    with rejected("offline-without-files", "unset HF_HUB_OFFLINE"):
        fetch()


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("model-00001-of-00282.safetensors", True),
        ("model.safetensors.index.json", True),
        ("tokenizer.model", True),
        ("merges.txt", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tools.jinja", True),
        ("pytorch_model.bin", False),
        ("pytorch_model.bin.index.json", False),
        ("consolidated.safetensors", False),
        ("consolidated.00.pth", False),
        ("original/params.json", False),
        ("modeling_custom.py", False),
        ("../outside.json", False),
    ],
)
def test_which_files_are_needed(path, needed):
    assert is_needed(path) is needed
