import random
import warnings

import pytest
import torch
from tests.support.algorithms import objective, settings

from posttrain.rl.algorithm.advantage import grpo
from posttrain.types import Prompt, Trajectory, TrajectoryGroup


def _group(prompt_id: int, rewards: list[float], sample_prompt_id: int | None = None) -> TrajectoryGroup:
    owner = prompt_id if sample_prompt_id is None else sample_prompt_id
    samples = tuple(
        Trajectory.of_response((1, 2), (3,), (-0.5,), 0, prompt_id=owner, sample_index=i, reward=reward)
        for i, reward in enumerate(rewards)
    )
    return TrajectoryGroup(Prompt(prompt_id, ({"role": "user", "content": "?"},), "label"), samples)


def grpo_advantages(rewards: torch.Tensor, normalize_by_std: bool) -> torch.Tensor:
    return grpo.advantages(rewards, torch.ones_like(rewards), settings(normalize_by_std=normalize_by_std))


def group_advantages(groups: list[TrajectoryGroup], normalize_by_std: bool) -> torch.Tensor:
    return objective(normalize_by_std=normalize_by_std).advantages(groups)


# Worked out by hand: mean, sample standard deviation (divisor n - 1), 1e-6 added to it.
HAND_TABLE = [
    # rewards (1, 0, 0, 1): mean 1/2, std sqrt(4 * 1/4 / 3) = 0.5773503
    ([1.0, 0.0, 0.0, 1.0], True, [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    ([1.0, 0.0, 0.0, 1.0], False, [0.5, -0.5, -0.5, 0.5]),
    # rewards (1, 0, 0, 0): mean 1/4, std sqrt((9/16 + 3/16) / 3) = 1/2
    ([1.0, 0.0, 0.0, 0.0], True, [1.4999970, -0.4999990, -0.4999990, -0.4999990]),
    # rewards (2, -1): mean 1/2, std sqrt(2 * 9/4) = 2.1213203
    ([2.0, -1.0], True, [0.7071064, -0.7071064]),
    ([2.0, -1.0], False, [1.5, -1.5]),
    # one sample: nobody to compare with
    ([1.0], True, [0.0]),
    ([1.0], False, [0.0]),
]


@pytest.mark.parametrize(("rewards", "normalize", "expected"), HAND_TABLE)
def test_hand_table(rewards, normalize, expected):
    advantages = grpo_advantages(torch.tensor([rewards]), normalize)
    assert torch.allclose(advantages, torch.tensor([expected]), rtol=0, atol=2e-7)


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_teach_exactly_nothing(normalize):
    # The FP32 mean of seven times 0.1 is not 0.1: the difference alone would not be zero.
    rewards = torch.full((1, 7), 0.1)
    assert (rewards - rewards.mean()).abs().max() > 0
    assert grpo_advantages(rewards, normalize).tolist() == [[0.0] * 7]


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_teach_nothing_whichever_sample_has_none(normalize):
    for place in range(8):
        rewards = torch.full((1, 8), 0.1)
        rewards[0, place] = torch.nan
        assert grpo_advantages(rewards, normalize).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("reward", [100.0, -100.0, 1e-3, 0.0, 3e30, 1e-38])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_rewards_that_differ_by_rounding_are_equal(normalize, reward, steps):
    rewards = torch.full((1, 4), reward)
    for _ in range(steps if reward else 0):
        rewards[0, 1] = rewards[0, 1].nextafter(torch.tensor(torch.inf))
    assert grpo_advantages(rewards, normalize).tolist() == [[0.0] * 4]
    sums = torch.tensor([[0.1 + 0.2 + 99.7, 99.7 + 0.2 + 0.1, 0.2 + 99.7 + 0.1]], dtype=torch.float64)
    assert grpo_advantages(sums.float(), normalize).tolist() == [[0.0] * 3]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1000.0, 1e10, 1e17, 1e30, 2.0**126])
def test_rewards_that_differ_by_more_are_those_of_an_exact_reference(scale):
    random_numbers = torch.rand(20, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) - 0.5
    rewards = (random_numbers * 2 * scale).float()
    rewards[::3, 0] = torch.nan
    for row in rewards:
        exact = row[~row.isnan()].double()
        difference = exact - exact.mean()
        whitened = difference / ((difference.square().sum() / (len(exact) - 1)).sqrt() + 1e-6)
        for normalize, wanted in ((False, difference), (True, whitened)):
            found = grpo_advantages(row[None], normalize)[0]
            assert found.isfinite().all()
            torch.testing.assert_close(
                found[~row.isnan()].double(), wanted, rtol=1e-5, atol=float(wanted.abs().max()) * 1e-6
            )
    one_up = torch.full((1, 4), 100.0)
    one_up[0, 0] += 1e-4
    assert grpo_advantages(one_up, True)[0, 0] > 1


def test_equal_rewards_of_one_group_leave_the_others_alone():
    rewards = torch.tensor([[0.1] * 7, [1.0] + [0.0] * 6, [0.3] * 7])
    advantages = grpo_advantages(rewards, False)
    assert advantages[[0, 2]].tolist() == [[0.0] * 7] * 2
    assert advantages[1].tolist() == pytest.approx([6 / 7] + [-1 / 7] * 6)


def test_usual_rewards_keep_the_bits_of_torchs_formulas():
    rewards = torch.rand(50, 8, generator=torch.Generator().manual_seed(3))
    difference = rewards - rewards.nanmean(dim=1, keepdim=True)
    assert torch.equal(grpo_advantages(rewards, False), difference)
    assert torch.equal(grpo_advantages(rewards, True), difference / (rewards.std(dim=1, keepdim=True) + 1e-6))


def test_a_missing_reward_is_no_measure_of_the_others():
    """Of rewards near 1e-8, and of two that are left."""
    assert grpo_advantages(torch.tensor([[1e-8, 3e-8, torch.nan]]), False).tolist()[0][1] == pytest.approx(1e-8)
    left = grpo_advantages(torch.tensor([[1.0, torch.nan, 0.0]]), True).tolist()[0]
    assert left == pytest.approx([0.7071058, 0.0, -0.7071058])


def test_a_group_of_one_has_no_standard_deviation_to_warn_of():
    with warnings.catch_warnings(action="error"):
        assert grpo_advantages(torch.tensor([[1.0]]), True).tolist() == [[0.0]]


def test_groups_do_not_see_each_other():
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    together = grpo_advantages(rewards, True)
    for row in range(5):
        assert torch.equal(together[row], grpo_advantages(rewards[row : row + 1], True)[0])
    assert together.mean(dim=1).abs().max() < 1e-6


def test_shift_and_scale_of_the_rewards_do_not_matter():
    rewards = torch.rand(5, 8, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(grpo_advantages(rewards, True), grpo_advantages(3 * rewards + 2, True), atol=1e-4)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match=r"finite, got \[inf\]$"):
        group_advantages([_group(1, [1.0, float("inf")])], True)
    with pytest.raises(ValueError, match=r"got \[nan(, nan){4}\]$"):
        group_advantages([_group(i, [float("nan")] * 4) for i in range(2)], True)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_sample_without_a_reward_is_compared_with_nobody(estimator, normalize):
    chosen = {"advantage_estimator": estimator, "normalize_by_std": normalize}
    whole = [_group(1, [1.0, 0.25, 0.0]), _group(2, [0.5, 0.0, 0.5])]
    with_more = [_group(1, [1.0, None, 0.25, 0.0]), _group(2, [0.5, 0.0, None, 0.5])]
    expected = objective(**chosen).advantages(whole).tolist()
    found = objective(**chosen).advantages(with_more).tolist()
    assert found[1] == found[6] == 0.0
    assert [found[i] for i in (0, 2, 3, 4, 5, 7)] == pytest.approx(expected, rel=1e-6)
    nobody = objective(**chosen).advantages([_group(1, [None, None]), _group(2, [None, 1.0])])
    assert nobody.tolist() == [0.0] * 4


def test_groups_of_samples_equal_their_rewards():
    rewards = [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    groups = [_group(i, row) for i, row in enumerate(rewards)]
    random.Random(0).shuffle(groups)
    expected = grpo_advantages(torch.tensor([rewards[group.prompt.prompt_id] for group in groups]), True)
    assert torch.equal(group_advantages(groups, True), expected.flatten())


def test_a_group_of_one_and_whole_numbers_as_rewards():
    assert group_advantages([_group(1, [3])], True).tolist() == [0.0]
    advantages = group_advantages([_group(1, [1, 0])], False)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.5, -0.5]


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([_group(1, [1.0, 0.0], sample_prompt_id=2)], "the group of prompt 1 holds trajectories of prompts"),
        ([_group(1, [1.0, 0.0]), _group(2, [0.0])], r"sizes \[1, 2\]"),
        ([_group(1, [])], r"sizes \[0\]"),
        ([], r"sizes \[\]"),
    ],
)
def test_wrong_groups_are_an_error(groups, text):
    with pytest.raises(ValueError, match=text):
        group_advantages(groups, True)
