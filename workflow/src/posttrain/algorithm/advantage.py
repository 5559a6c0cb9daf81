"""Group-relative advantages: a response is compared with the others to the same prompt.

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

`std` is the sample standard deviation (divisor n - 1). Without the division this is Dr. GRPO's estimator. A group whose
rewards are all equal teaches nothing, and a group of one has nobody to be compared with: its advantages are exactly 0.
Shapes: G groups, n samples of each.

Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2; Dr. GRPO (arXiv 2503.20783), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.types import SampleGroup

STD_EPSILON = 1e-6


def grpo_advantages(rewards: torch.Tensor, normalize_by_std: bool) -> torch.Tensor:
    """Return the advantage of each sample in its group.

    Args:
        rewards: [G, n] fp32, one row per prompt.
        normalize_by_std: Divide by the group's standard deviation.

    Returns:
        [G, n] fp32.

    Raises:
        ValueError: When a reward is not finite.

    Example:
        Rewards (1, 0, 0, 1) give (0.5, -0.5, -0.5, 0.5) / (0.57735 + 1e-6) = (0.866, -0.866, -0.866, 0.866).
    """
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~torch.isfinite(rewards)][:5].tolist()}")
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if normalize_by_std and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + STD_EPSILON)
    # Rounding may move the mean of equal rewards away from them: the rewards tell, not the difference.
    all_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(all_equal, torch.zeros_like(advantages), advantages)


def group_advantages(groups: Sequence[SampleGroup], normalize_by_std: bool) -> torch.Tensor:
    """Return the advantages of graded groups; see `grpo_advantages`.

    Args:
        groups: The rollout, all groups of one size. A prompt may have two groups: a dataset smaller than a rollout.
        normalize_by_std: Divide by the group's standard deviation.

    Returns:
        [G, n] fp32, in the order of `groups` and of their samples.

    Raises:
        ValueError: When a sample does not belong to its group's prompt, or sizes differ.
    """
    _check_groups(groups)
    rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups], dtype=torch.float32)
    return grpo_advantages(rewards, normalize_by_std)


def _check_groups(groups: Sequence[SampleGroup]) -> None:
    """Refuse samples in the wrong group: comparing them with others would be no error that anybody sees."""
    for group in groups:
        strangers = sorted({sample.prompt_id for sample in group.samples} - {group.prompt.prompt_id})
        if strangers:
            raise ValueError(f"the group of prompt {group.prompt.prompt_id} holds samples of prompts {strangers}")
    sizes = sorted({len(group.samples) for group in groups})
    if len(sizes) != 1 or sizes[0] < 1:
        raise ValueError(f"groups must have one size, and at least one sample; found sizes {sizes}")
