"""Intervals of changes among the same prompts; Newcombe's and Wilson's are tried with the verdict."""

import functools
import math

import numpy as np
import pytest

from posttrain.report.intervals import Z, paired_change, rate_change, reward_change, wilson

# Of 2,000 simulations at a true 2.5 %, so many or fewer reject in 99.9 % of cases.
NUM_SIMULATIONS, MOST_FALSE = 2000, 73
SIZES, SAMPLES = (64, 128, 256, 512), (1, 2, 4, 8, 16)


def counted(lost, won, count):
    return [-1.0] * lost + [1.0] * won + [0.0] * (count - lost - won)


@pytest.mark.parametrize("count", [20, 400, 10_000])
def test_no_pair_that_differs_bounds_the_change_by_their_number(count):
    assert paired_change(counted(0, 0, count), 1.0) == pytest.approx(
        (0, -(Z**2) / (count + Z**2), Z**2 / (count + Z**2))
    )
    one_of_16 = Z**2 / (count + Z**2) / 16
    assert paired_change(counted(0, 0, count), 1 / 16) == pytest.approx((0, -one_of_16, one_of_16))


@pytest.mark.parametrize(
    ("lost", "won", "count", "low", "high"),
    [
        # Found by maximising the constrained likelihood numerically, with scipy.
        (8, 3, 20, -0.5253, 0.0790),
        (4, 1, 100, -0.0900, 0.0195),
        (0, 5, 64, 0.0171, 0.1702),
        (0, 4, 64, 0.0023, 0.1500),
        (30, 12, 512, -0.0617, -0.0108),
    ],
)
def test_one_sample_per_prompt_gives_tangos_interval(lost, won, count, low, high):
    change, *ends = paired_change(counted(lost, won, count), 1.0)
    assert change == pytest.approx((won - lost) / count)
    assert ends == pytest.approx([low, high], abs=1e-4)
    mirrored = paired_change(counted(won, lost, count), 1.0)
    assert mirrored == pytest.approx((-change, -ends[1], -ends[0]))


def test_a_loss_among_pairs_is_bounded_as_often_as_it_says():
    """97.5 % of experiments have the true loss below the upper end, each counted with its exact probability."""
    count, lost, won = 40, 0.15, 0.05
    covered = 0.0
    for b in range(count + 1):
        for c in range(count + 1 - b):
            ways = math.comb(count, b) * math.comb(count - b, c)
            probability = ways * lost**b * won**c * (1 - lost - won) ** (count - b - c)
            covered += probability * (-paired_change(counted(b, c, count), 1.0)[1] >= lost - won)
    assert covered == pytest.approx(0.975, abs=0.01)


def test_all_lost_and_all_won():
    assert paired_change(counted(10, 0, 10), 1.0)[:2] == (-1.0, -1.0)
    change, low, high = paired_change(counted(0, 10, 10), 1.0)
    assert (change, high) == (1.0, 1.0)
    assert 0 < low < 1


def test_few_that_differ_by_unlike_amounts_count_as_parts_of_the_largest():
    few = [0.5, 0.25, 0.25, -0.25, 0.5, *[0.0] * 59]
    assert paired_change(few, 0.25)[1:] == pytest.approx((-0.0146, 0.0613), abs=1e-4)


@pytest.mark.parametrize("count", [6, 7, 30])
def test_unlike_amounts_are_judged_by_a_variance_that_follows_the_supposed_mean(count):
    """Six prompts that differ are enough. An end lies Z standard deviations of its own mean away, with its skew."""
    found = np.array([0.1 * 1.3**number * (-1) ** (number % 4) for number in range(count)] + [0.0] * 10)
    change, low, high = paired_change(found.tolist(), 0.1)
    variance, third = (((found - found.mean()) ** power).mean() for power in (2, 3))
    for end, sign in ((low, -1), (high, 1)):
        reach = sign * (end - change)
        assert reach > 0
        skewed = variance + reach**2 + reach * max(0, sign * third / variance)
        assert len(found) * reach**2 == pytest.approx(Z**2 * skewed)


def test_without_skew_it_is_the_interval_of_a_self_normalised_sum():
    """A change is significant where sum(d) > Z sqrt(sum(d^2)): McNemar's test, and a sign-flip test's normal form."""
    for shift in (0.05, 0.12, 0.2):
        differences = np.concatenate([shift + side * np.linspace(0.1, 0.7, 16) for side in (-1, 1)])
        change, low, high = paired_change(differences.tolist(), 0.01)
        reach = Z * differences.std() / math.sqrt(len(differences) - Z**2)
        assert (change, low, high) == pytest.approx((shift, shift - reach, shift + reach))
        assert (low > 0) == (differences.sum() > Z * math.sqrt((differences**2).sum()))


def test_skew_widens_the_side_that_it_hides():
    """Rare losses of unlike size: as for a Poisson count, whose upper end is x + Z^2/2 + Z sqrt(x + Z^2/4)."""
    losses = [-1.0] * 8 + [-0.999] * 8 + [0.0] * 9984
    change, low, high = (10_000 * end for end in paired_change(losses, 1.0))
    assert -low == pytest.approx(16 + Z**2 / 2 + Z * math.sqrt(16 + Z**2 / 4), rel=0.01)
    assert -high == pytest.approx(16 - Z * 4, rel=0.01)
    assert change == pytest.approx(-15.992)


def result(rows, num_samples, has_partial_credit=False):
    rates = [rate for _, rate, _ in rows]
    return {
        "pass_rate": sum(rates) / len(rates),
        "num_prompts": len(rows),
        "num_samples": num_samples,
        "has_partial_credit": has_partial_credit,
        "by_prompt": rows,
    }


def test_prompts_are_paired_by_their_ids():
    before = result([[7, 0.5, 0.5], [3, 1.0, 1.0], [5, 0.0, 0.1]], 2, True)
    after = result([[3, 1.0, 1.0], [5, 0.5, 0.6], [7, 1.0, None]], 2, True)
    assert rate_change(before, after) == paired_change([0.5, 0.0, 0.5], 0.5)
    # Ungraded in one of them: no reward to compare.
    assert reward_change(before, after) == paired_change([0.0, 0.5], pytest.approx(0.45))


def test_where_no_prompt_differs_the_least_step_bounds_the_change():
    """One response in the evaluation that takes more of them; of rewards, that share of their range."""
    before, after = (result([[i, 0.5, 0.25 + 2 * (i % 2)] for i in range(20)], count, True) for count in (2, 4))
    end = Z**2 / (20 + Z**2) / 4
    assert rate_change(before, after) == rate_change(after, before) == pytest.approx((0, -end, end))
    assert reward_change(before, after) == reward_change(after, before) == pytest.approx((0, -2 * end, 2 * end))


def test_other_prompts_and_results_of_older_versions_are_independent_groups():
    before, after = result([[0, 0.5, 0.5], [1, 1.0, 1.0]], 2), result([[0, 0.5, 0.5], [2, 1.0, 1.0]], 2)
    older = {"pass_rate": 0.75, "num_prompts": 2}
    assert rate_change(before, after) == rate_change(older, older) == rate_change(before, older)
    assert rate_change(before, before) != rate_change(older, older)
    assert reward_change(before, after) is None


def test_rewards_of_0_and_1_are_not_judged_twice():
    rows = [[prompt, 0.5, 0.5] for prompt in range(8)]
    assert reward_change(result(rows, 2), result(rows, 2)) is None
    assert reward_change(result(rows, 2, True), result(rows, 2)) == (0, 0, 0)


# ---- error rates and power ----


def drawn(rng, before, after, samples, alike):
    """Return differences of pass rates, simulations x prompts; a share of samples is drawn once for both."""
    change = np.zeros(before.shape)
    for _ in range(samples):
        old = rng.random(before.shape)
        new = np.where(rng.random(before.shape) < alike, old, rng.random(before.shape))
        change += (new < after).astype(int) - (old < before)
    return change / samples


def beta(a, b):
    return lambda rng, shape: rng.beta(a, b, shape)


def few_vary(rate, count):
    """All prompts but so many are always right, or always wrong."""

    def draw(_, shape):
        rates = np.broadcast_to(np.arange(shape[1]) % 2, shape).astype(float)
        rates[:, :count] = rate
        return rates

    return draw


DIFFICULTIES = {
    "even": (beta(1, 1), 0.0),
    "even, most answers alike": (beta(1, 1), 0.8),
    "easy or hard": (beta(0.3, 0.3), 0.0),
    "easy or hard, most answers alike": (beta(0.3, 0.3), 0.8),
    "nearly all known": (beta(1, 0.05), 0.0),
    "hard": (beta(2, 8), 0.0),
    "8 vary": (few_vary(0.5, 8), 0.0),
    "10 vary": (few_vary(0.5, 10), 0.0),
    "4 seldom": (few_vary(0.1, 4), 0.0),
    "all but one right": (few_vary(0.5, 1), 0.0),
}


def shifted(rates, points):
    """Return rates with a mean that is so many points higher, each by the same amount as far as it can."""
    low, high = 0.0, 1.0
    for _ in range(40):
        step = math.copysign((low + high) / 2, points)
        moved = np.clip(rates + step, 0, 1)
        low, high = (abs(step), high) if abs((moved - rates).mean()) < abs(points) / 100 else (low, abs(step))
    return moved


def rejected(differences, step, value=0.0):
    """Return the shares of simulations whose interval lies above a value, and below it."""
    ends = np.array([paired_change(row, step)[1:] for row in differences.tolist()])
    return (ends[:, 0] > value).sum(), (ends[:, 1] < value).sum()


def t_statistics(differences, value=0.0):
    spread = differences.std(axis=1, ddof=1) / math.sqrt(differences.shape[1])
    mean = differences.mean(axis=1) - value
    return np.divide(mean, spread, out=np.where(mean, np.copysign(np.inf, mean), 0.0), where=spread > 0)


@functools.cache
def few_seeds():
    return np.random.default_rng(44)


def test_no_change_is_seldom_called_one():
    """A small part of `make test-faults PART=statistics`."""
    for samples, name in ((1, "even"), (4, "8 vary"), (16, "easy or hard")):
        draw, alike = DIFFICULTIES[name]
        rates = draw(few_seeds(), (400, 64))
        above, below = rejected(drawn(few_seeds(), rates, rates, samples, alike), 1 / samples)
        assert max(above, below) <= 21, (samples, name)  # the 99.9th percentile of 400 at 2.5 %


def test_five_points_are_found_with_several_samples():
    """512 prompts x 4 samples: a paired t test finds 96 %, two independent groups of 512 trials found 20 %."""
    rates = beta(1, 1)(few_seeds(), (200, 512))
    above, _ = rejected(drawn(few_seeds(), rates, shifted(rates, 5), 4, 0.0), 1 / 4)
    assert above >= 180


@pytest.mark.faults("statistics")
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", DIFFICULTIES)
def test_error_rates(name, count, samples):
    """One of 600 counts may be beyond its 99.9th percentile by chance: it is drawn once more."""
    draw, alike = DIFFICULTIES[name]

    def most_false(number):
        rng = np.random.default_rng([count, samples, list(DIFFICULTIES).index(name), number])
        rates = draw(rng, (NUM_SIMULATIONS, count))
        false = [*rejected(drawn(rng, rates, rates, samples, alike), 1 / samples)]
        if rates.mean() > 0.06:
            # Non-inferiority: the true loss is the margin.
            after = shifted(rates, -1)
            lossy = drawn(rng, rates, after, samples, alike)
            false.append(rejected(lossy, 1 / samples, (after - rates).mean())[0])
        return max(false)

    assert most_false(0) <= MOST_FALSE or most_false(1) <= MOST_FALSE


@pytest.mark.faults("statistics")
@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", ["even", "even, most answers alike", "easy or hard", "hard"])
def test_power_is_that_of_a_calibrated_t_test(name, count, samples):
    """Its critical values are quantiles of 20,000 simulations of the same null.

    Where a handful of prompts differ, by one or two steps, a statistic has few values: the t test that knows its null
    may reject at a value that another null has too often.
    """
    is_sparse = "alike" in name and count <= 128 and samples <= 2
    allowed = (0.12 if is_sparse else 0.05 if samples == 1 else 0.03) * NUM_SIMULATIONS
    rng = np.random.default_rng([count, samples])
    draw, alike = DIFFICULTIES[name]
    null = draw(rng, (20_000, count))
    worst, best = np.quantile(t_statistics(drawn(rng, null, null, samples, alike)), (0.025, 0.975))
    rates = null[:NUM_SIMULATIONS]
    for points in (5, -5):
        found = drawn(rng, rates, shifted(rates, points), samples, alike)
        above, below = rejected(found, 1 / samples)
        t = t_statistics(found)
        ours, calibrated = (above, (t > best).sum()) if points > 0 else (below, (t < worst).sum())
        assert ours >= calibrated - allowed, points
    # Non-inferiority within five points, where nothing is lost.
    lossy = drawn(rng, null, shifted(null, -5), samples, alike)
    best = np.quantile(t_statistics(lossy, -0.05), 0.975)
    found = drawn(rng, rates, rates, samples, alike)
    ours, calibrated = rejected(found, 1 / samples, -0.05)[0], (t_statistics(found, -0.05) > best).sum()
    assert ours >= calibrated - allowed


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_bounds_of_a_rate_are_rates(rate):
    for count in range(1, 2000):
        _, low, high = wilson(rate, count)
        assert 0 <= low <= rate <= high <= 1, count
