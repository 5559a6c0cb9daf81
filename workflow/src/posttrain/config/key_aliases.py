"""Other trainers' names for our keys, for suggestions."""

from __future__ import annotations

from collections.abc import Mapping

# Last part of a name in TRL, verl, slime or miles -> our key; docs/coming-from.md explains differences.
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "learningrate"), "optimizer.lr"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), "optimizer.clip_grad"),
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "optimizer.eps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style"), "optimizer.lr_schedule"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_iters"), "optimizer.lr_warmup_steps"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_fraction"), "optimizer.lr_warmup_share"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "group_size"), "rollout.num_samples_per_prompt"),
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "rollout_max_response_len", "max_new_tokens"),
        "rollout.max_response_tokens",
    ),
    **dict.fromkeys(("max_prompt_length", "rollout_max_prompt_len"), "rollout.max_prompt_tokens"),
    **dict.fromkeys(("train_batch_size", "generation_batch_size"), "rollout.rollout_batch_size"),
    "ppo_mini_batch_size": "training.global_batch_size",
    **dict.fromkeys(("max_steps", "total_training_steps", "num_rollout"), "training.num_steps"),
    **dict.fromkeys(("epsilon", "eps_clip", "cliprange"), "algorithm.clip_ratio_low"),
    **dict.fromkeys(("epsilon_high", "eps_clip_high"), "algorithm.clip_ratio_high"),
    **dict.fromkeys(("delta", "clip_ratio_c", "eps_clip_c"), "algorithm.clip_ratio_dual"),
    **dict.fromkeys(("loss_type", "loss_mode", "adv_estimator", "advantage_estimator"), "algorithm.preset"),
    "loss_agg_mode": "algorithm.loss_aggregation",
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), "algorithm.normalize_by_std"),
    "importance_sampling_level": "algorithm.ratio_level",
    **dict.fromkeys(
        ("gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static"),
        "engine.mem_fraction_static",
    ),
    **dict.fromkeys(("vllm_tensor_parallel_size", "rollout_num_gpus_per_engine"), "engine.gpus_per_engine"),
    **dict.fromkeys(("max_num_seqs", "sglang_max_running_requests"), "engine.max_running_requests"),
    "gradient_checkpointing": "trainer.recompute_granularity",
    **dict.fromkeys(("ppo_max_token_len_per_gpu", "max_token_len_per_gpu"), "trainer.max_tokens_per_gpu"),
    **dict.fromkeys(("save_steps", "save_freq"), "trainer.save_interval"),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), "trainer.keep_checkpoints"),
    **dict.fromkeys(("reward_funcs", "rm_type", "custom_reward_function"), "data.reward"),
    **dict.fromkeys(("train_files", "train_dataset", "prompt_data"), "data.train_file"),
    **dict.fromkeys(("val_files", "eval_prompt_data"), "data.heldout_file"),
    "project_name": "logging.wandb_project",
}


def key_of(name: str) -> str:
    """Return our key for another trainer's name, with or without a section; "" if unknown."""
    return OTHER_NAMES.get(name.rpartition(".")[2].lstrip("-").replace("-", "_").lower(), "")
