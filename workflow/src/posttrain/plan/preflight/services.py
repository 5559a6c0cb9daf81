"""Checks that the Hugging Face Hub is reachable."""

from __future__ import annotations

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from posttrain.config.data import UNPINNED, sources_of
from posttrain.plan.preflight.report import Finding, failed, ok, skipped
from posttrain.store import Paths, receipt_of, suite_folders

# A Hub that takes longer for one request is too slow to load a model from, and the check must stay short.
HUB_TIMEOUT_SECONDS = 10.0


def check_hub_sources(paths: Paths) -> list[Finding]:
    """Check that every Hub repository of the configuration is accessible at its revision."""
    config = paths.resolved.config
    sources = []
    if config.model.source.kind == "hub":
        source = config.model.source
        sources.append(("model.source", "model", source.repo_id, source.revision, receipt_of(paths.hf)))
    for name, data in sources_of(config.data).items():
        if data.kind == "hub":
            key = f"data.sources.{name}" if name else "data"
            sources.append((key, "dataset", data.repo_id, data.revision, receipt_of(paths.dataset)))
    for name, suite in config.evaluation.suites.items():
        if suite.kind == "hub":
            made = receipt_of(suite_folders(config)[name])
            sources.append((f"evaluation.suites.{name}", "dataset", suite.repo_id, suite.revision, made))
    findings = []
    for key, kind, repo_id, revision, receipt in sources:
        if receipt.exists():
            findings.append(skipped(f"Hub {kind} {repo_id}", f"downloaded already ({receipt})"))
        else:
            findings.append(check_repository(key, kind, repo_id, revision))
    return findings


def check_repository(key: str, kind: str, repo_id: str, revision: str) -> Finding:
    """Query the Hub for one revision of a repository.

    Args:
        key: Config section of the repository.
        kind: "model" or "dataset".
        repo_id: `owner/name`.
        revision: Commit.
    """
    name = f"Hub {kind} {repo_id}"
    if constants.is_offline_mode():
        return skipped(name, "HF_HUB_OFFLINE is set; the download step will use what is there")
    endpoint = constants.ENDPOINT
    if revision == UNPINNED:
        remedy = "copy it from the repository's page"
        return failed("revision-not-pinned", name, f"{key}.revision", UNPINNED, f"a commit of {repo_id}", remedy)
    try:
        HfApi().repo_info(repo_id, revision=revision, repo_type=kind, timeout=HUB_TIMEOUT_SECONDS)
        # A gated repository shows its metadata without granting access to its files.
        HfApi().auth_check(repo_id, repo_type=kind)
    except RevisionNotFoundError:
        remedy = "copy the commit from the repository's page"
        return failed("no-such-revision", name, f"{key}.revision", revision, f"a commit of {repo_id}", remedy)
    except GatedRepoError:
        found, allowed = f"{repo_id}: access is restricted", "a repository that the token may read"
        remedy = "accept its terms on the Hub and set HF_TOKEN in the environment"
        return failed("no-access", name, f"{key}.repo_id", found, allowed, remedy)
    except RepositoryNotFoundError:
        remedy = "correct the name, or set HF_TOKEN in the environment if it is private"
        allowed = f"a {kind} repository on {endpoint}"
        return failed("no-such-repository", name, f"{key}.repo_id", f"{repo_id}: not found", allowed, remedy)
    except (HTTPError, OSError) as error:
        found, allowed = (
            f"{type(error).__name__}: {error}".splitlines()[0],
            f"an answer of {endpoint} in time",
        )
        remedy = "check the network and HF_ENDPOINT; model.source.kind=folder takes files that are here"
        return failed("hub-unreachable", name, f"{key}.repo_id", found, allowed, remedy)
    return ok(name, f"revision {revision[:12]} is visible at {endpoint}")
