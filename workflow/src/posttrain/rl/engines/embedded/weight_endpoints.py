"""Weight updates over HTTP: begin, buckets of tensors, end; or from a folder on disk.

The API is SGLang's; the guarantee is stronger. Tensors are collected in a spare set, and /end_weight_update
swaps it in as a whole, with the version of the last bucket. An update that lacks a tensor or had a bad bucket
is dropped there, and the old weights keep serving under their old version. So is one whose sender was killed, when the
next update begins or memory is released.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from posttrain.errors import CheckpointError
from posttrain.rl.engines.checksums import combined_checksum
from posttrain.rl.engines.embedded.model import LoadedModel, fill_from_folder
from posttrain.rl.engines.embedded.requests import RequestError, read_json
from posttrain.rl.engines.embedded.weights import WeightError, WeightUpdate
from posttrain.rl.engines.embedded.worker import Worker
from posttrain.rl.engines.tensor_payload import PayloadError, deserialize_bucket

log = logging.getLogger(__name__)

# There is no persistent cache and no CUDA graph, so releasing them only blocks requests.
WEIGHTS, TAGS = "weights", ("kv_cache", "weights", "cuda_graph")
NO_UPDATE_OPEN = "no weight update is open; call /begin_weight_update first"


class WeightEndpoints:
    """Endpoints that change, rename or hash the weights; one call at a time.

    Args:
        loaded: The model.
        worker: Runs the model.
    """

    def __init__(self, loaded: LoadedModel, worker: Worker):
        self._weights, self._worker = loaded.weights, worker
        self._update: WeightUpdate | None = None
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the HTTP routes of these endpoints."""
        calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "/begin_weight_update": self.begin,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/end_weight_update": self.end,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weight_version": self.update_version,
            "/weights_checker": self.check_weights,
            "/flush_cache": self.flush_cache,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }
        return [web.post(path, self._handler(call)) for path, call in calls.items()]

    def begin(self, body: dict[str, Any]) -> dict[str, Any]:
        """Open an update."""
        self._update = self._weights.begin_update()
        return {}

    def update_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        """Receive one bucket."""
        if self._update is None:
            raise WeightError(NO_UPDATE_OPEN)
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or not payloads or body.get("load_format") is not None:
            raise RequestError("serialized_named_tensors: a list with one payload, and no load_format, is needed")
        self._update.add(deserialize_bucket(payloads[0]))
        self._update.version = body.get("weight_version") or self._update.version
        return {}

    def end(self, body: dict[str, Any]) -> dict[str, Any]:
        """Serve the update, or drop it if incomplete."""
        if self._update is None:
            raise WeightError(NO_UPDATE_OPEN)
        update, self._update = self._update, None
        self._serve(update, update.version)
        return {}

    def update_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load a checkpoint folder and serve it."""
        self._update = None
        if not isinstance(body.get("model_path"), str):
            raise RequestError("model_path: the folder of a checkpoint is needed")
        if body.get("abort_all_requests"):
            self._worker.abort("", everything=True)
        update = self._weights.begin_update()
        fill_from_folder(update, Path(body["model_path"]))
        self._serve(update, body.get("weight_version"))
        return {"num_paused_requests": 0}

    def update_version(self, body: dict[str, Any]) -> dict[str, Any]:
        """Set the version of the serving weights."""
        if not isinstance(body.get("new_version"), str):
            raise RequestError("new_version: text is needed")
        self._weights.version = body["new_version"]
        return {"new_version": self._weights.version}

    def check_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        """Hash every served tensor, or run one of our weight commands (`posttrain_weights.engine_handlers`)."""
        action = body.get("action", "checksum")
        if isinstance(action, str) and action.startswith("{"):
            with self._worker.weights_may_change():
                return {"ranks": [self._told(json.loads(action))]}
        if action != "checksum":
            raise RequestError(f"action {action!r}: the embedded engine knows 'checksum', and orders about its weights")
        with self._worker.weights_may_change():
            checksums = self._weights.checksums()
        combined = combined_checksum(checksums)
        return {
            "ranks": [{"checksums": checksums, "per_gpu_checksum": combined}],
            "per_engine_checksum": combined,
        }

    def _told(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a weight command in the form of a single SGLang rank."""
        held = self._weights
        calls: dict[str, Callable[..., str]] = {"parts": held.parts, "digest": held.digest, "digests": held.digests}
        told = calls[order.pop("call")](**order)
        return {"checksums": {"answer": told}, "parallelism_info": [{"tp_rank": 0}]}

    def flush_cache(self, body: dict[str, Any]) -> dict[str, Any]:
        """Wait until no request has a cache; there is no prefix cache to flush."""
        seconds = float(body.get("timeout", 0))
        if not self._worker.wait_without_cache(seconds):
            raise WeightError(f"requests run or wait, also after {seconds:g} s")
        return {}

    def release_memory(self, body: dict[str, Any]) -> dict[str, Any]:
        """Release the weights' memory; generation is refused until it is resumed and filled."""
        tags = _tags(body)
        self._update = None
        self._worker.fall_asleep(tags)
        if WEIGHTS in tags:
            self._weights.release()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return {}

    def resume_memory(self, body: dict[str, Any]) -> dict[str, Any]:
        """Allocate released memory again."""
        tags = _tags(body)
        self._worker.wake_up(tags)
        if WEIGHTS in tags:
            self._weights.resume()
        return {}

    def _serve(self, update: WeightUpdate, version: str | None) -> None:
        with self._worker.weights_may_change():
            self._weights.serve(update, version)
        log.info("serving weight version %s (%d tensors of the MTP layer left out)", version, update.num_skipped)

    def _handler(self, call: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
        """Return a handler that runs `call` outside the event loop and reports success like SGLang."""

        async def handle(request: web.Request) -> web.Response:
            body = {**request.query, **await read_json(request)}
            async with self._one_at_a_time:
                try:
                    answer = await asyncio.to_thread(call, body)
                except (WeightError, PayloadError, CheckpointError) as error:
                    log.error("%s: %s", request.path, error)
                    return web.json_response({"success": False, "message": str(error)}, status=400)
            return web.json_response({"success": True, "message": "Success", **answer})

        return handle


def _tags(body: dict[str, Any]) -> set[str]:
    """Return a request's tags; as in SGLang, no tags means all."""
    tags = {*(body.get("tags") or TAGS)}
    if unknown := tags - {*TAGS}:
        raise RequestError(f"tags: {', '.join(TAGS)} are known, not {', '.join(sorted(map(str, unknown)))}")
    return tags
