"""Which precision is deployed, and by which number."""

from dataclasses import replace

import pytest

from posttrain.config.deployment import ORIGINAL, Deployment
from posttrain_serving.precision.deployment import Measured, lost_points, table_of, verdict
from posttrain_serving.precision.divergence import Divergence

FAR = Divergence(mean=0.004, p99=0.05, largest=0.2, same_first=0.98, num_tokens=1000)
BF16 = Measured(ORIGINAL, 0.8, 0.0, 0.2, None, None, "sglang", 160.0, 1000.0)
FP8 = Measured("fp8", 0.797, 0.3, 0.8, FAR, replace(FAR, mean=0.005), "sglang", 80.0, 1500.0)
NVFP4 = Measured("nvfp4", 0.79, 1.0, 2.4, replace(FAR, mean=0.015), replace(FAR, mean=0.02), "embedded", 45.0, 1600.0)
BOUNDS = Deployment()


def test_the_cost_is_memory_by_time():
    """160 GiB for 1,000 seconds, in hours."""
    assert pytest.approx(160 / 3.6) == BF16.gib_hours_per_million_tokens


def test_the_cheapest_within_both_bounds_is_deployed():
    best, said = verdict([BF16, FP8, NVFP4], BOUNDS)
    assert best == "fp8"
    assert said == (
        "deploy fp8: 14.8 GiB-hours per million tokens (original 44.4; nvfp4 7.81 but loses 1.0 points, and up to 2.4 "
        "(95 %), allowed are less than 1)"
    )
    for most, best in ((2.4, "fp8"), (2.5, "nvfp4")):
        assert verdict([BF16, FP8, NVFP4], replace(BOUNDS, max_loss_points=most))[0] == best
    assert verdict([BF16], BOUNDS) == (ORIGINAL, f"deploy {ORIGINAL}: 44.4 GiB-hours per million tokens")
    assert FP8.as_dict()["gib_hours_per_million_tokens"] == pytest.approx(80 / 1500 * 1e6 / 3600)
    assert FP8.as_dict()["precision"] == "fp8"
    assert [one.why_not(BOUNDS) for one in (BF16, FP8)] == ["", ""]


def test_too_far_from_the_original_is_not_deployed_however_it_scores():
    far = replace(FP8, loss_points=-1.0, loss_points_at_most=-0.2, divergence=replace(FAR, mean=0.02))
    best, said = verdict([BF16, far], BOUNDS)
    assert best == ORIGINAL
    assert "fp8 14.8 but KL 0.0200 nats, allowed is less than 0.02" in said


def test_slow_is_expensive():
    assert verdict([BF16, replace(FP8, tokens_per_second=100.0)], BOUNDS)[0] == ORIGINAL


def graded(*passes):
    """Samples of prompts, each a tuple."""
    return [(number, bool(ok)) for number, samples in enumerate(passes) for ok in samples]


def test_losses_are_counted_prompt_by_prompt():
    """Lost: half of one prompt and a whole one; won: half of another. 1.0 of four, net."""
    before = {"heldout": graded((1, 1), (1, 1), (0, 0)), "suite": graded((1, 1))}
    after = {"heldout": graded((1, 0), (0, 0), (1, 0)), "suite": graded((1, 1))}
    loss, at_most = lost_points(before, after)
    assert loss == pytest.approx(25.0)
    assert at_most > 50
    with pytest.raises(ValueError, match="4 and 3 prompts"):
        lost_points(before, {"heldout": after["heldout"]})


def test_one_sample_per_prompt_is_tangos_interval():
    """Of 20 prompts eight are lost and three won."""
    before = {"heldout": graded(*[(1,)] * 8, *[(0,)] * 3, *[(1,)] * 9)}
    after = {"heldout": graded(*[(0,)] * 8, *[(1,)] * 3, *[(1,)] * 9)}
    assert lost_points(before, after) == pytest.approx((25.0, 52.5), abs=0.05)


def test_a_precision_that_loses_nothing_is_seen_as_such():
    """512 prompts x 4 samples of which every tenth differs, as often won as lost: less than a point at most."""
    before = [((1, 1, 1, 1) if prompt % 20 else (1, 1, 1, 0)) for prompt in range(512)]
    after = [((1, 1, 1, 1) if prompt % 20 != 7 else (1, 0, 1, 1)) for prompt in range(512)]
    loss, at_most = lost_points({"heldout": graded(*before)}, {"heldout": graded(*after)})
    assert abs(loss) < 0.1
    assert 0.5 < at_most < 1


def test_no_difference_among_few_is_no_proof():
    same = {"heldout": graded(*[(1,)] * 100)}
    assert lost_points(same, same) == (0.0, pytest.approx(3.7, abs=0.01))
    many = {"heldout": graded(*[(1,)] * 400)}
    assert lost_points(many, many)[1] < 1


def test_the_table_has_a_cell_for_each_number():
    head, rows = table_of([BF16, FP8])
    assert {len(head)} == {len(row) for row in rows}
    assert rows[0][2:10] == (*[""] * 7, "sglang")
    assert rows[1] == (
        "fp8",
        "79.7%",
        "0.30",
        "0.80",
        "0.00400",
        "0.0500",
        "98.0%",
        *("0.00500", "98.0%", "sglang"),
        "80",
        "1,500",
        "14.81",
    )
