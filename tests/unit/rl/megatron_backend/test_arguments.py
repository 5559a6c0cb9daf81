"""The table of Megatron's fields, held against megatron-core's own dataclasses."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import typing
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from tests.support.flag_cases import flag_cases
from tests.support.megatron_single import test_config
from tests.support.tiny_checkpoint import TRAINED

from posttrain.config.derived import stage_chunks
from posttrain.plan.flags import megatron_flags
from posttrain.plan.flags.flag import as_mapping
from posttrain.plan.sizing.activations import most_in_flight
from posttrain.rl.megatron_backend.arguments import OBJECTS, ddp_config, optimizer_config, transformer_config

READERS = {
    "megatron.model": MLATransformerConfig,
    "megatron.ddp": DistributedDataParallelConfig,
    "megatron.optimizer": OptimizerConfig,
}
# Read by our own attention from the same object.
OURS = {"attention_chunk_tokens", "sparse_attention", "indexer_kernel", "keep_index_choice"}


@pytest.fixture(autouse=True)
def without_transformer_engine(monkeypatch):
    """Megatron looks for the one kernel that Transformer Engine brings while it checks its settings."""
    if importlib.util.find_spec("transformer_engine"):
        return
    table = megatron_flags.model_flags

    def model_flags(config):
        off = {"moe_permute_fusion": False}
        return [dataclasses.replace(item, value=off.get(item.name, item.value)) for item in table(config)]

    monkeypatch.setattr(megatron_flags, "model_flags", model_flags)


@pytest.mark.parametrize(
    ("layers", "first", "last", "stages", "chunks"),
    [
        *((8, 0, 0, 2, 1), (7, 0, 1, 3, 1), (8, 0, 0, 2, 2), (8, 0, 2, 2, 2), (16, 0, 4, 4, 2)),
        *((7, 1, 0, 3, 1), (9, 2, 1, 4, 1), (5, 2, 3, 2, 1), (16, 8, 4, 3, 2), (78, 14, 16, 8, 1), (78, 18, 0, 4, 1)),
    ],
)
def test_megatron_cuts_layers_where_we_count_them(layers, first, last, stages, chunks):
    """What is planned, staged and refused by the numbers of layers is what Megatron builds."""
    config = test_config(
        dataclasses.replace(TRAINED, num_hidden_layers=layers),
        pipeline_model_parallel_size=stages,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        virtual_pipeline_model_parallel_size=chunks,
    )
    settings, counted = transformer_config(config), stage_chunks(config)
    for stage, chunk in itertools.product(range(stages), range(chunks)):
        start = get_transformer_layer_offset(settings, chunk, stage)
        assert counted[stage][chunk] == range(start, start + get_num_layers_to_build(settings, chunk, stage))
    assert sorted(itertools.chain(*itertools.chain(*counted))) == list(range(layers))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_what_is_planned_in_flight_is_what_megatrons_schedule_lets_in(stages, chunks):
    saved, batches = [1.0, 3.0, 9.0][:chunks], 6 * stages
    table = [chunk for _, chunk in get_schedule_table(batches, chunks, stages)]
    for stage in range(stages):
        group = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        virtual = chunks if chunks > 1 else None
        talk = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        _, _, ahead, both = get_pp_rank_microbatches(batches, chunks, stages, p2p_communicator=talk)
        held, most = sum(saved[chunk] for chunk in table[:ahead]), 0.0
        for turn in range(both):
            held += saved[table[ahead + turn]]
            most = max(most, held)
            held -= saved[-1 - table[turn]]
        assert most_in_flight(saved, stages, stage) == most


@pytest.mark.parametrize("reader", READERS)
def test_every_field_exists_with_that_type(reader):
    kinds = {field.name: field.type for field in dataclasses.fields(READERS[reader])}
    resolved_kinds = typing.get_type_hints(READERS[reader])
    for resolved in flag_cases().values():
        for item in megatron_flags.megatron_flags(resolved.config)[reader]:
            if item.name not in OURS | set(OBJECTS):
                assert item.name in kinds, f"{reader} has no {item.name}"
                assert _fits(item.value, resolved_kinds[item.name]), f"{item.name} = {item.value!r}"


def _fits(value, kind):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Union:
        return any(_fits(value, each) for each in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


@pytest.mark.parametrize("name", ["tiny-embedded", "glm5-h200-recipe", "glm5-h200-no_recompute", "glm5-gb300-recipe"])
def test_megatron_takes_the_values(name):
    """A CUDA branch is built too: what its settings ask of a GPU is only asked when a rank starts.

    Not with offload: the precision-aware optimizer asks for Transformer Engine's version at once.
    """
    config = flag_cases()[name].config
    table = {reader: as_mapping(flags) for reader, flags in megatron_flags.megatron_flags(config).items()}
    built = {
        "megatron.model": transformer_config(config),
        "megatron.ddp": ddp_config(config),
        "megatron.optimizer": optimizer_config(config),
    }
    for reader, settings in built.items():
        for field, value in table[reader].items():
            meant = OBJECTS[field][value] if field in OBJECTS else value
            assert getattr(settings, field) == meant, f"{reader} {field}"


def test_words_become_objects():
    settings = transformer_config(flag_cases()["glm5-h200-recipe"].config)
    assert settings.params_dtype is torch.bfloat16
    assert settings.activation_func is F.silu
    assert settings.dsa_indexer_topk == 2048
