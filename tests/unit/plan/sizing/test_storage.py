from posttrain.plan.sizing.model_size import count_parameters, model_weights, mtp_weights
from posttrain.plan.sizing.storage import storage


def test_glm5_by_hand(resolved):
    needed = storage(resolved("glm5").config)
    mtp = 9_952_920_320
    assert needed.hf == 1_487_822_475_264 + 2 * mtp + 4 * 256 == needed.torch_dist == needed.hf_export
    assert needed.trained_weights == 2 * 743_911_199_232
    # The frozen indexer is saved without optimizer state: queries, keys, head weights, and the keys' LayerNorm.
    indexer = 78 * (2048 * 32 * 128 + 6144 * 128 + 6144 * 32 + 2 * 128)
    assert needed.training_checkpoint == 14 * 743_911_199_232 - 12 * indexer
    assert needed.num_training_checkpoints == 3
    # It is evaluated in FP8, before and after training.
    assert needed.shared_bytes == 3 * needed.hf + 2 * needed.rollout_fp8 + 3 * needed.training_checkpoint
    # Its engines sleep while the trainer loads, and begin with the trainer's weights.
    assert needed.node_local_bytes == needed.torch_dist
    awake = storage(resolved("glm5", set="engine.sleep=never engine.weight_transport=tensor").config)
    assert awake.node_local_bytes == needed.torch_dist + needed.rollout_fp8


def test_the_model_in_fp8_is_made_for_who_loads_it(resolved):
    """Engines that begin empty need no more of it than what they draft with."""
    source, never = "evaluation.precision=source", "engine.sleep=never engine.weight_transport="
    sizes = {
        words: (needed.rollout_fp8, needed.rollout_start)
        for words in ("", source, f"{source} engine.mtp_steps=2", f"{source} {never}sharded", f"{source} {never}tensor")
        for needed in [storage(resolved("glm5", set=words).config)]
    }
    whole, drafts = (
        756_162_687_872,
        sum(weight.fp8_bytes for weight in mtp_weights(resolved("glm5").config.model.architecture)),
    )
    assert list(sizes.values()) == [(whole, 0), (0, 0), (0, drafts), (0, 0), (whole, 0)]
    assert 9.9e9 < drafts < 10.3e9


def test_without_fp8_the_source_is_staged_instead(resolved):
    needed = storage(resolved("glm5", set="rollout.fp8=false engine.sleep=never engine.weight_transport=tensor").config)
    assert needed.rollout_fp8 == needed.export_fp8 == 0
    assert needed.node_local_bytes == 2 * needed.hf


def test_tiny_is_counted_in_its_own_precision(resolved):
    config = resolved("tiny").config
    arch = config.model.architecture
    needed = storage(config)
    indexer = 4 * (48 * 4 * 16 + 64 * 16 + 64 * 4 + 2 * 16)
    assert needed.training_checkpoint == 16 * 292_352 - 12 * indexer
    assert needed.hf == sum(weight.bf16_bytes for weight in [*model_weights(arch), *mtp_weights(arch)])


def test_a_model_without_indexer_has_state_for_all_it_trains(resolved):
    config = resolved("qwen3_4b").config
    parameters = count_parameters(model_weights(config.model.architecture))
    assert storage(config).training_checkpoint == 14 * parameters


def test_what_lies_on_shared_storage_is_the_sum_of_its_parts(resolved):
    drafting = storage(resolved("glm5", set="evaluation.precision=source engine.mtp_steps=2").config)
    assert drafting.rollout_start > 0
    assert drafting.store_bytes == 2 * drafting.hf + drafting.rollout_start
    kept = storage(resolved("glm5", set="algorithm.routing_replay=true trainer.keep_checkpoints=4").config)
    assert kept.kept_routes > 0
    assert kept.run_bytes == 5 * kept.training_checkpoint + kept.hf + kept.kept_routes
    assert kept.shared_bytes == kept.store_bytes + kept.run_bytes
    in_bf16 = storage(resolved("glm5", set="rollout.fp8=false engine.mtp_steps=2").config)
    assert (in_bf16.rollout_fp8, in_bf16.rollout_start, in_bf16.export_fp8) == (0, 0, 0)
