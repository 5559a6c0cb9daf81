"""Whether a manifest is a JobSet, by the types of Kubeflow's client, which are generated from JobSet's own API.

Those types refuse wrong kinds of values and missing ones; a field that they do not know is lost on the way through
them, and so is found. A CRD's own schema, with its choices and limits, is checked beside them where there is one:

    kubectl get crd jobsets.jobset.x-k8s.io -o yaml > crd.yaml
    JOBSET_CRD=crd.yaml pytest tests/unit/cluster
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

# RFC 1035, which the names of services and of JobSet's jobs and pods follow.
_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"


def check_jobset(manifest: dict[str, Any]) -> None:
    """Raise ValueError, pydantic's or jsonschema's error where a JobSet controller would refuse the manifest."""
    parsed = JobsetV1alpha2JobSet.from_dict(manifest)
    assert parsed is not None
    if (known := parsed.to_dict()) != manifest:
        raise ValueError(f"the API does not know all of it: {manifest} became {known}")
    name = manifest["metadata"]["name"]
    for job in manifest["spec"]["replicatedJobs"]:
        longest = f"{name}-{job['name']}-{job['replicas'] - 1}-{job['template']['spec']['completions'] - 1}-abcde"
        if not re.fullmatch(_NAME, longest):
            raise ValueError(f"pods would be called {longest}")
    if crd := os.environ.get("JOBSET_CRD"):
        jsonschema.Draft202012Validator(_schema_of(Path(crd))).validate(manifest)


@lru_cache
def _schema_of(crd: Path) -> dict[str, Any]:
    versions = yaml.safe_load(crd.read_text())["spec"]["versions"]
    return next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1alpha2")
