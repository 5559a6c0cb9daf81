"""Publishes new weights to the engines after a step: quantised as shards, gathered, and sent in buckets."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from posttrain import store
from posttrain.checkpoint.formats.safetensors_io import CheckpointReader, TensorSpec, read_header, read_index
from posttrain.checkpoint.formats.shard_writer import write_index
from posttrain.checkpoint.param_names import HF_VISION
from posttrain.checkpoint.quantization.fp8 import Fp8Format
from posttrain.checkpoint.quantization.quantize import make_fp8
from posttrain.checkpoint.quantization.quantized_names import is_mtp
from posttrain.config.derived import fp8_settings, weight_transport
from posttrain.config.schema import Config
from posttrain.errors import CheckpointError
from posttrain.rl.engines.buckets import make_buckets
from posttrain.rl.engines.responses import NO_WEIGHTS
from posttrain.rl.weight_sync.engine_layout import EngineShards, listed
from posttrain.rl.weight_sync.proof import Digests, WeightProof
from posttrain.rl.weight_sync.sharded import ShardedTransfer

log = logging.getLogger(__name__)
MIB = 1 << 20


class WeightPublisher:
    """Sends the trainer's weights to the engines; every rank calls `publish`, rank 0 talks to the engines.

    Args:
        config: The resolved configuration.
        engine_shards: The engines and their weight layout.
        disk_folder: Output folder of the "disk" transport.
        model_folder: The checkpoint that engines started from; its config and tokenizer are copied to `disk_folder`.
        proof: Checks the engines' weights after each update; None if they do not support it.
    """

    def __init__(
        self,
        config: Config,
        engine_shards: EngineShards,
        disk_folder: Path,
        model_folder: Path,
        proof: WeightProof | None = None,
    ):
        self._config, self._engine_shards = config, engine_shards
        self._values, self._client = engine_shards.values, engine_shards.client
        self._runner, self._disk_folder, self._model_folder = engine_shards.runner, disk_folder, model_folder
        self._sharded = ShardedTransfer(config, engine_shards) if weight_transport(config) == "sharded" else None
        self._proof = proof
        self._bucket_bytes = config.engine.weight_bucket_mib * MIB
        # Engines may be new processes, which may have started without weights.
        self._may_lack_weights = True

    def publish(self, version: int) -> None:
        """Update all engines to the current weights under a version number; collective.

        Raises:
            CheckpointError: Engines started without weights, and the trainer lacks some of them.
            RuntimeError: An engine refused the update (none then serves a mixture), or holds other weights than sent.
        """
        sent = self._send(version)
        if self._proof:
            self._proof.check(version, sent)
        if self._sharded:
            self._sharded.commit_base()
        self._may_lack_weights = False

    def reconnect(self) -> None:
        """Reconnect at the next update, because an engine was replaced by another process."""
        self._engine_shards.reset()
        self._may_lack_weights = True
        if self._sharded:
            self._sharded.reset()

    @property
    def is_due_at_start(self) -> bool:
        """Whether to publish before the first rollout: weights that an engine read from a checkpoint are not verified.

        It is skipped for transports through rank 0 or shared files, which would take too long.
        """
        return self._sharded is not None

    def reverify(self) -> None:
        """Verify again that engines hold the last published weights; collective.

        Raises:
            RuntimeError: An engine holds other weights, so its samples are not from the policy.
        """
        if self._proof:
            self._proof.check_again()

    def _send(self, version: int) -> Digests | None:
        """Send the weights; return their digests if the transport computes them."""
        if self._sharded:
            begin = functools.partial(self._proof.begin, version) if self._proof else None
            return self._sharded.send(version, self._in_buckets(self._untrained()), begin)
        if self._client is None:
            for _ in self._values.gather():
                pass
            return None
        if weight_transport(self._config) == "disk":
            self._runner.run(self._client.update_weights_from_disk(version, self._write_folder(version)))
            shutil.rmtree(self._disk_folder)  # the engines have loaded them, and GLM-5's FP8 weights take 0.75 TB
        else:
            self._send_buckets(version)
        return None

    def _send_buckets(self, version: int) -> None:
        """Send the weights over HTTP; ranks gather them here and not in the event loop, which serves other requests."""
        assert self._client is not None, "rank 0 talks to the engines"
        run, client, buckets = self._runner.run, self._client, self._buckets()
        run(client.begin_update(version))
        bucket = next(buckets)
        for following in buckets:
            run(client.send_bucket(bucket))
            bucket = following
        run(client.send_bucket(bucket, last_of_version=version))
        run(client.end_update())

    def _write_folder(self, version: int) -> Path:
        """Write a checkpoint in Hub layout for the engines to load; delete leftovers of a dead attempt first."""
        folder = self._disk_folder / f"version_{version:06d}"
        shutil.rmtree(self._disk_folder, ignore_errors=True)
        with store.building(folder) as partial:
            for path in self._model_folder.iterdir():
                if path.is_file() and not path.name.startswith("model"):
                    shutil.copy(path, partial)
            weight_map: dict[str, str] = {}
            specs: dict[str, TensorSpec] = {}
            for number, bucket in enumerate(self._buckets(), start=1):
                file = f"model-{number:05d}.safetensors"
                save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, partial / file)
                weight_map |= {name: file for name, _ in bucket}
                specs |= {
                    name: TensorSpec(info.shape, info.dtype) for name, info in read_header(partial / file).items()
                }
            write_index(partial, weight_map, specs)
        return folder

    def _buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        return self._in_buckets(self._served_tensors())

    def _in_buckets(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        has_query_latent = self._config.model.architecture.q_lora_rank > 0
        return make_buckets(tensors, self._bucket_bytes, has_query_latent)

    def _served_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that engines load: FP8 codes with scales, or unquantized tensors."""
        assert self._client is not None, "rank 0 talks to the engines"
        return itertools.chain(self._whole_tensors(), self._untrained())

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the untrained tensors that engines started without weights need; only on rank 0."""
        if not self._client or not self._may_lack_weights:
            return iter(())
        if NO_WEIGHTS not in self._runner.run(self._client.weight_versions()):
            return iter(())
        num_layers, drafts = self._config.model.architecture.num_hidden_layers, self._config.engine.mtp_steps > 0
        return untrained(self._values.sent_specs, self._model_folder, num_layers, drafts)

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._values.gather():
            assert tensor is not None, "rank 0 gets every tensor"
            yield name, tensor


def untrained(
    trained: Collection[str], folder: Path, num_layers: int, drafts: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the untrained tensors that engines need when they start without weights: vision tower, MTP layers.

    Args:
        trained: Hub names of the trained tensors, including scales.
        folder: The checkpoint that the engines started from.
        num_layers: Decoder layers; the MTP layers follow them.
        drafts: Engines draft with the MTP layers, which are untrained and read from the checkpoint.

    Raises:
        CheckpointError: The checkpoint has other untrained tensors, for which engines would use noise; names them.
    """
    missing = [name for name in read_index(folder).weight_map if name not in trained]
    of_drafts = [name for name in missing if is_mtp(name, num_layers)]
    of_vision = [name for name in missing if name.startswith(HF_VISION)]
    if unknown := sorted({*missing} - {*of_drafts, *of_vision}):
        words = f"engines started without weights, and the trainer does not have {listed(unknown)}"
        raise CheckpointError("served-weights-differ", f"{folder}: {words}")
    checkpoint = CheckpointReader(folder)
    return ((name, checkpoint.tensor(name)) for name in (*of_drafts * drafts, *of_vision))


def narrowed_names(config: Config) -> tuple[str, ...]:
    """Return the ends of the names of FP32 weights that engines hold in BF16.

    SGLang 0.5.23 makes the gated norm of a delta net in the model's dtype, and its decay in FP32
    (`models/qwen3_5.py`, `RMSNormGated`).
    """
    is_narrow = config.engine.kind == "sglang" and config.engine.dtype == "bfloat16"
    return ("linear_attn.norm.weight",) if is_narrow else ()


def served_format(config: Config) -> Fp8Format | None:
    """Return the quantized format that engines serve during training; None for the Hub's own."""
    return make_fp8(fp8_settings(config), config.model.architecture.num_hidden_layers) if config.rollout.fp8 else None
