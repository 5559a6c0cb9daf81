#!/bin/bash
# kubeflow-trainer-api 2.3.0, Python 3.11.
#
# Its models declare a quantity as "number or text", and pydantic reads the number as a float: `nvidia.com/gpu: 8`
# comes out of from_dict(...).to_dict() as 8.0. Kubernetes rejects fractions of extended resources by value, and any
# comparison with the manifest that was written fails by text. One would expect 8 to stay 8.
# Here: the models check manifests in tests; no manifest is taken from them.
#
# Seen on 2026-11-28:
#   {"limits": {"nvidia.com/gpu": 8.0, "memory": "1Gi"}}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet kubeflow-trainer-api==2.3.0
output=$("$folder/venv/bin/python" -c '
from kubeflow_trainer_api.models import IoK8sApiCoreV1ResourceRequirements as Requirements

print(Requirements.from_dict({"limits": {"nvidia.com/gpu": 8, "memory": "1Gi"}}).to_json())')
echo "$output"
[ "$output" = '{"limits": {"nvidia.com/gpu": 8.0, "memory": "1Gi"}}' ]
