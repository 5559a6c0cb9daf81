"""File lists of Hub repositories at a commit, with sizes and hashes, and explanations of Hub errors.

The list is stored next to the download, so that the folder can be verified offline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import DatasetInfo, HfApi, ModelInfo
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from posttrain.checkpoint.hub.listed_files import ListedFile, Manifest, read_manifest, write_manifest
from posttrain.checkpoint.hub.retries import BadStatus, GaveUp, Retries, RetryRule, status_of
from posttrain.checkpoint.staging.file_placement import TransferStopped
from posttrain.errors import CheckpointError, ConfigError, Problem, printable
from posttrain.store import RelativeName

# Users' activity is private.
huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True


@dataclass(frozen=True)
class HubSource:
    """A repository at a pinned commit.

    Args:
        repo_id: `owner/name`.
        revision: Commit, 40 hex digits.
        repo_type: "model" or "dataset".
        key: Config section that names the repository, for messages.
        endpoint: URL of the Hub; None means `HF_ENDPOINT` or the public one.
    """

    repo_id: str
    revision: str
    repo_type: str = "model"
    key: str = "model.source"
    endpoint: str | None = None

    def __str__(self) -> str:
        return f"{self.repo_id}@{self.revision[:12]}"

    @property
    def identity(self) -> dict[str, str]:
        """Key of this repository in a list of its files."""
        return {"kind": "hub", "repo_id": self.repo_id, "revision": self.revision, "repo_type": self.repo_type}


def list_files(
    source: HubSource, kept: Path, needed: Callable[[str], bool], rule: RetryRule | None = None
) -> Manifest | None:
    """Return the needed files of a repository, with sizes and hashes.

    Args:
        source: Repository to query.
        kept: File for the Hub's answer. `HF_HUB_OFFLINE=1` reads it instead of querying the Hub.
        needed: Selects the files.
        rule: Retry rule.

    Returns:
        The list; None if offline without a stored answer.

    Raises:
        ConfigError: The repository or revision does not exist or may not be read.
        CheckpointError: None of its files is needed, or the stored answer is about another repository.
        RuntimeError: The Hub cannot be reached.
    """
    if huggingface_hub.is_offline_mode():
        return _read_kept(source, kept) if kept.exists() else None
    files = [_listed_file(source, row) for row in _ask_hub(source, rule or RetryRule()) if needed(row.rfilename)]
    if not files:
        raise CheckpointError(
            "repository-without-files", f"{source}: the repository holds none of the files that are needed"
        )
    manifest = Manifest(source.identity, tuple(sorted(files, key=lambda file: file.path)))
    write_manifest(kept, manifest)
    return manifest


def _read_kept(source: HubSource, kept: Path) -> Manifest:
    manifest = read_manifest(kept)
    if manifest.source != source.identity:
        raise CheckpointError(
            "manifest-of-another-source",
            f"{kept}: lists {dict(manifest.source)}, not {source}; delete it and run again online",
        )
    return manifest


@contextlib.contextmanager
def explained(source: HubSource, path: str = "") -> Iterator[None]:
    """Convert the library's exceptions to one message each."""
    at = f"{source}: {path}" if path else str(source)
    try:
        yield
    except TransferStopped:
        raise
    except RevisionNotFoundError as error:
        remedy = "pin a commit that the repository's page shows"
        raise ConfigError(
            [
                Problem(
                    "no-such-revision",
                    f"{source.key}.revision",
                    source.revision,
                    f"a commit of {source.repo_id}",
                    remedy,
                )
            ]
        ) from error
    except RemoteEntryNotFoundError as error:
        raise ConfigError(
            [Problem("no-such-file", source.key, at, f"a file of {source.repo_id}", "check the name")]
        ) from error
    except (HTTPError, OSError, XetDownloadError, RuntimeError) as error:
        if _status_of(error) in (401, 403) and not _content_server_of(error):
            raise ConfigError([_unreadable(source, error)]) from error
        if _is_local(error):
            raise
        raise RuntimeError(_no_answer(source, at, error)) from error


def _no_answer(source: HubSource, at: str, error: Exception) -> str:
    endpoint, status = source.endpoint or huggingface_hub.constants.ENDPOINT, _status_of(error)
    if content_server := _content_server_of(error):
        endpoint = f"{content_server}, which the Hub names for the content and which gets no token,"
    cause = error.__cause__ or error
    first_line = (str(cause).strip() or "no text").splitlines()[0]
    what = (
        f"answered with HTTP {status}"
        if status
        else (f"cannot be reached, or hung up ({type(cause).__name__}: {first_line})")
    )
    tried = f" ({error})" if isinstance(error, GaveUp) else ""
    return printable(
        f"{at}: {endpoint} {what}{tried}\n"
        f"  remedy: check the network, the proxy and HF_ENDPOINT, then run the same command again: "
        f"what is verified is kept"
    )


def _unreadable(source: HubSource, error: Exception) -> Problem:
    """Return which credential was refused: the token, its account, or a request without one. Never shows the token."""
    answer = next((found for found in (error, error.__cause__) if isinstance(found, HfHubHTTPError)), None)
    status = answer.response.status_code if answer else _status_of(error)
    has_token = bool(huggingface_hub.get_token())
    if isinstance(answer, GatedRepoError):
        what = "it is gated, and " + ("the token's account has no access" if has_token else "no token was sent")
        remedy = "it is gated: ask for access on its page, then export HF_TOKEN of that account"
    elif not has_token:
        what = "no token was sent"
        remedy = "check the name; a private or gated one needs HF_TOKEN of an account that may read it"
    elif status == 401 and not (answer and answer.response.headers.get("X-Error-Code") == "RepoNotFound"):
        what = "the token was rejected"
        remedy = "it is wrong, has expired or is another Hub's: export HF_TOKEN anew, or unset it"
    else:
        what = "the token's account sees no such repository, or may not read it"
        remedy = "check the name; a private or gated one needs HF_TOKEN of an account that may read it"
    endpoint = source.endpoint or huggingface_hub.constants.ENDPOINT
    allowed = f"an existing repository that you may read; {endpoint} answered with HTTP {status}: {what}"
    return Problem("no-such-repository", f"{source.key}.repo_id", source.repo_id, allowed, remedy)


def _content_server_of(error: BaseException) -> str:
    """Return the content server that sent the error; "" if the Hub sent it or there was no response."""
    found = (each for each in (error, error.__cause__) if isinstance(each, BadStatus))
    return next((each.content_server for each in found), "")


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error; a repository that does not exist counts as 401, as on the Hub."""
    for found in (error, error.__cause__):
        if isinstance(found, RepositoryNotFoundError):
            return 401
        if status := status_of(found):
            return status
    return None


def _is_local(error: Exception) -> bool:
    """Return whether an error is of this machine's disk (full, read-only) and not of the network."""
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)


def _ask_hub(source: HubSource, rule: RetryRule) -> Sequence[Any]:
    with explained(source):
        info = _ask_until_answered(source, Retries(rule, f"list {source}"))
    if info.sha != source.revision:
        allowed, remedy = "the full commit id, 40 hex digits", f"the Hub resolves it to {info.sha}: pin that"
        raise ConfigError([Problem("revision-not-pinned", f"{source.key}.revision", source.revision, allowed, remedy)])
    return info.siblings or []


def _ask_until_answered(source: HubSource, retries: Retries) -> ModelInfo | DatasetInfo:
    api = HfApi(endpoint=source.endpoint)
    ask = api.dataset_info if source.repo_type == "dataset" else api.model_info
    while True:
        try:
            return ask(source.repo_id, revision=source.revision, files_metadata=True)
        except HTTPError as error:
            retries.wait_after(error)


def _listed_file(source: HubSource, sibling: Any) -> ListedFile:
    name = RelativeName(sibling.rfilename, source)
    if sibling.lfs:
        return ListedFile(name, sibling.lfs.size, sha256=sibling.lfs.sha256)
    if sibling.size is None or not sibling.blob_id:
        raise RuntimeError(f"{source}: the Hub gives no size or hash for {name}; is HF_ENDPOINT a Hub?")
    return ListedFile(name, sibling.size, git_blob=sibling.blob_id)
