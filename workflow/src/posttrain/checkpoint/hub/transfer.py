"""Resumable HTTP download of one file from the Hub.

`huggingface_hub` provides URL, headers and token, but restarts a file in each process; shards of gigabytes need
resumption across processes, so this module transfers the bytes. Incomplete files are in `.download/` in the folder,
with the content id in the name, so that a changed file is never continued. Existing bytes are hashed on resumption and
new ones on arrival; the file is renamed after its hash matches the Hub's list.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from urllib.parse import urlsplit

from httpx2 import RemoteProtocolError, Response
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import build_hf_headers, get_session

from posttrain.checkpoint.hub.listed_files import ContentHashes, ListedFile, verify_file
from posttrain.checkpoint.hub.listing import HubSource, explained
from posttrain.checkpoint.hub.retries import BadStatus, Retries, RetryRule
from posttrain.checkpoint.staging.file_placement import TransferProgress, write_whole
from posttrain.errors import CheckpointError
from posttrain.store import HASH_CHUNK_BYTES, FileRecord, place_atomic
from posttrain.store.durable import naming, open_no_link
from posttrain.store.names import refuse_link

log = logging.getLogger(__name__)

STAGING = ".download"
# The second attempt covers wrong bytes of an earlier process; two mismatches are a fault of the network path.
ATTEMPTS_PER_FILE = 2
_CONTENT_RANGE = re.compile(r"bytes (?:(?P<start>\d+)-\d+|\*)/(?P<total>\d+)")


class WrongLength(Exception):
    """The server's file has another length than the Hub lists."""


class HttpFiles:
    """Files of a Hub repository over plain HTTP; see `fill_folder.Maker`.

    Args:
        source: The repository at its commit.
        rule: Retry limits.
    """

    def __init__(self, source: HubSource, rule: RetryRule):
        self._source, self._rule = source, rule

    def check(self, file: ListedFile, folder: Path) -> tuple[FileRecord | None, str]:
        """Compare a file with the list."""
        return verify_file(folder / file.path, file)

    def missing_bytes(self, file: ListedFile, folder: Path) -> int:
        """Return the bytes that have not arrived."""
        path = incomplete_path(folder, file)
        return max(0, file.size_bytes - (path.stat().st_size if path.exists() else 0))

    def make(self, file: ListedFile, folder: Path, progress: TransferProgress) -> FileRecord:
        """Receive a file or its remainder, and verify it; wrong bytes are discarded and fetched once more.

        Raises:
            CheckpointError: The bytes are wrong twice.
            RuntimeError: The connection fails, or another process fetches the file.
        """
        path, reason = incomplete_path(folder, file), ""
        with _open_alone(path) as output, explained(self._source, file.path):
            for attempt in range(1, ATTEMPTS_PER_FILE + 1):
                hashes = self._complete(output, file, progress)
                reason = hashes.misfit()
                if not reason:
                    place_atomic(file.path.below(folder), lambda temporary: os.replace(path, temporary))
                    return hashes.record()
                _empty(output, hashes, progress)
                log.warning(
                    "%s: attempt %d of %d to fetch %s: %s", self._source, attempt, ATTEMPTS_PER_FILE, file.path, reason
                )
        raise CheckpointError(
            "download-corrupt",
            f"{self._source}: {file.path} arrives with wrong bytes, {ATTEMPTS_PER_FILE} times\n  {reason}\n"
            f"  remedy: look for a proxy or mirror between here and the Hub (HF_ENDPOINT), then run again",
        )

    def _complete(self, output: FileIO, file: ListedFile, progress: TransferProgress) -> ContentHashes:
        """Receive the missing bytes, reconnecting as needed, and return the hashes of the whole file."""
        hashes = _take_up(output, file, progress)
        retries = Retries(self._rule, f"{self._source}: {file.path}", progress.pause)
        while hashes.size_bytes < file.size_bytes:
            before = hashes.size_bytes
            try:
                self._receive(output, file, hashes, progress)
            except WrongLength as error:
                log.warning("%s: %s: %s", self._source, file.path, error)
                break
            except (HTTPError, BadStatus) as error:
                retries.wait_after(error, made_progress=hashes.size_bytes > before)
        return hashes

    def _receive(self, output: FileIO, file: ListedFile, hashes: ContentHashes, progress: TransferProgress) -> None:
        """Receive over one connection, starting at `hashes.size_bytes`."""
        with self._open(file, hashes.size_bytes) as response:
            if hashes.size_bytes and response.status_code == 200:
                log.info("%s: %s: the server sends no ranges, the file begins anew", self._source, file.path)
                _empty(output, hashes, progress)
            _require_length(response, file, hashes.size_bytes)
            begun_at = hashes.size_bytes
            for chunk in response.iter_bytes():
                with naming(Path(output.name)):
                    write_whole(output, chunk)
                hashes.update(chunk)
                progress.advance(len(chunk))
                if hashes.size_bytes > file.size_bytes:
                    raise WrongLength(f"more than {file.size_bytes} bytes arrive")
        if hashes.size_bytes == begun_at:
            raise RemoteProtocolError("an answer without content")

    @contextlib.contextmanager
    def _open(self, file: ListedFile, start: int) -> Iterator[Response]:
        """Request a file from byte `start` on; resolves the URL each time, because it expires."""
        source = self._source
        url = hf_hub_url(
            source.repo_id,
            file.path,
            repo_type=source.repo_type,
            revision=source.revision,
            endpoint=source.endpoint,
        )
        found = get_hf_file_metadata(url, endpoint=source.endpoint)
        self._require_same(file, found.commit_hash, found.etag)
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        content_server = ""
        if _origin_of(found.location) != _origin_of(url):
            # The token is only for the Hub; a content server's URL carries its own permission.
            headers.pop("authorization", None)
            content_server = "://".join(_origin_of(found.location))
        if start:
            headers["Range"] = f"bytes={start}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", found.location, headers=headers, timeout=timeout) as response:
            if response.status_code == 416:
                raise WrongLength(f"nothing from byte {start} on ({response.headers.get('Content-Range', '')})")
            if response.status_code not in (200, 206):
                raise BadStatus(response.status_code, response.headers.get("Retry-After", ""), content_server)
            yield response

    def _require_same(self, file: ListedFile, commit: str | None, etag: str | None) -> None:
        """Raise if the Hub's file has changed since it was listed; a mirror's own ETag is ignored."""
        listed = file.sha256 or file.git_blob
        is_hash = bool(etag and len(etag) == len(listed) and re.fullmatch("[0-9a-f]+", etag))
        if (commit and commit != self._source.revision) or (is_hash and etag != listed):
            raise CheckpointError(
                "changed-on-hub",
                f"{self._source}: {file.path} has changed since it was listed: commit {commit}, ETag {etag}; "
                f"listed was {listed}\n  remedy: look for a mirror between here and the Hub (HF_ENDPOINT); "
                f"if the Hub itself says so, delete the list of files and run again",
            )


def incomplete_path(folder: Path, file: ListedFile) -> Path:
    """Return the path of an incomplete file, which contains the content id."""
    return folder / STAGING / f"{file.path.replace('/', '--')}.{file.content_id[:16]}.incomplete"


@contextlib.contextmanager
def _open_alone(path: Path) -> Iterator[FileIO]:
    """Open an incomplete file and lock it against other processes of this node or of the shared file system.

    Raises:
        RuntimeError: Another process holds the lock.
        CheckpointError: The folder of incomplete files is a link.
    """
    refuse_link(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0, opener=open_no_link) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"{path}: another process fetches this file; run again when it has ended") from error
        except OSError as error:
            # The store's own lock and the final hash still protect the file.
            log.info("%s: the file system has no locks (%s)", path, error.strerror)
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise RuntimeError(f"{path}: another process has just fetched this file; run again")
        yield file


def _take_up(output: FileIO, file: ListedFile, progress: TransferProgress) -> ContentHashes:
    """Hash the bytes of an earlier attempt; the final hash detects wrong ones."""
    size = os.fstat(output.fileno()).st_size
    if size > file.size_bytes:
        output.truncate(0)
    hashes = ContentHashes(file)
    with open(output.name, "rb", buffering=0) as arrived:
        while chunk := arrived.read(HASH_CHUNK_BYTES):
            hashes.update(chunk)
            progress.advance(len(chunk))
    if hashes.size_bytes:
        log.info("%s: goes on at byte %d of %d", file.path, hashes.size_bytes, file.size_bytes)
    return hashes


def _empty(output: FileIO, hashes: ContentHashes, progress: TransferProgress) -> None:
    output.truncate(0)
    progress.advance(-hashes.size_bytes)
    hashes.restart()


def _require_length(response: Response, file: ListedFile, start: int) -> None:
    """Compare the announced length with the list, before writing a byte.

    Raises:
        WrongLength: The server's file has another length, or the response starts elsewhere.
    """
    headers: Mapping[str, str] = response.headers
    if response.status_code == 206:
        announced = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if not announced or (announced["start"], announced["total"]) != (str(start), str(file.size_bytes)):
            wanted = f"bytes {start}- of {file.size_bytes}"
            raise WrongLength(f"the server sends {headers.get('Content-Range', 'no range')}, asked for were {wanted}")
    elif "Content-Encoding" not in headers and headers.get("Content-Length", str(file.size_bytes)) != str(
        file.size_bytes
    ):
        raise WrongLength(f"the server has {headers['Content-Length']} bytes, {file.size_bytes} are listed")


def _origin_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
