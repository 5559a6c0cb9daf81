"""What is wrong with traces: each test changes one call of ranks that agree."""

from dataclasses import replace

import pytest
from tests.support.megatron_single import CONFIG_DIR

from posttrain.plan.resolve import resolve
from posttrain_rehearsal.traces import Call, Trace, find_problems

GIB = 1 << 30
CONFIG = resolve({"site": "local", "model": "glm5_4layer"}, CONFIG_DIR).config
SUM = Call(
    "allreduce_", "7", (0, 1), ((8,),), "torch.float32", 32, None, "1 train", "rl/megatron_backend/train_step.py:9"
)
SEND = Call("send", "9", (0, 1), ((4, 2),), "torch.bfloat16", 16, 1, "1 train", "rl/megatron_backend/train_step.py:8")
RECEIVE = replace(SEND, name="recv_", peer=0)
GRADIENTS = replace(
    SUM, place="rl/megatron_backend/train_step.py:7 megatron/core/distributed/param_and_grad_buffer.py:3"
)


def phase(step, name, *holders):
    peak = sum(size for _, _, size in holders)
    return {"step": step, "name": name, "peak": peak, "holders": holders, "host_peak": 0, "waits": {}}


WEIGHTS = ("weights", "rl/megatron_backend/model.py:103", 4 * GIB)
PHASES = [phase(1, "train", WEIGHTS), phase(2, "rollout")]


def trace(rank, *calls, **more):
    return Trace(rank, 1.0, None, PHASES, [[0, 1]], calls, **more)


def told(*traces, **more):
    return [f"{problem}" for problem in find_problems(CONFIG, traces, 6.0, **more)]


def test_ranks_that_agree_have_no_problem():
    assert told(trace(0, SUM, SEND), trace(1, SUM, RECEIVE)) == []


@pytest.mark.parametrize("other", [(), (replace(SUM, name="broadcast_"),), (replace(SUM, shapes=((9,),)),)])
def test_another_call_of_a_member_is_a_hang(other):
    (found,) = told(trace(0, SUM), trace(1, *other))
    assert "hang: rank 0 calls allreduce_" in found
    assert "look at rl/megatron_backend/train_step.py:9" in found


def test_a_call_of_a_backward_pass_is_named_with_the_line_before_it():
    backward = replace(SUM, place="megatron/core/transformer/moe/fused_a2a.py:199")
    (found,) = told(trace(0, SUM, backward), trace(1, SUM))
    assert "look at megatron/core/transformer/moe/fused_a2a.py:199, after rl/megatron_backend/train_step.py:9" in found


def test_amounts_that_values_decide_may_differ():
    there = replace(SUM, name="deepep dispatch")
    assert told(trace(0, there), trace(1, replace(there, shapes=((5,),)))) == []


@pytest.mark.parametrize("received", [(), (replace(RECEIVE, shapes=((4, 3),)),)])
def test_what_is_sent_has_to_be_received(received):
    (found,) = told(trace(0, SEND), trace(1, *received))
    assert "rank 0 sends send" in found
    assert "rank 1 receives" in found


def test_gradients_are_added_up_once_for_an_update():
    calls = [GRADIENTS, GRADIENTS, replace(GRADIENTS, phase="2 train")]
    (found,) = told(trace(0, *calls), trace(1, *calls))
    assert "2 times in step 1 and 1 times in step 2" in found
    assert "no_sync_func" in found


def test_all_ranks_make_the_same_groups():
    (found,) = told(trace(0), replace(trace(1), groups=[[0, 1], [0]]))
    assert "ranks 0 and 1 make another group number 1" in found


def test_other_groups_come_before_who_waits_in_them():
    waited = {"type": "HangError", "message": "rank 1 waits", "trace": ""}
    first, other = (replace(trace(rank), error=waited) for rank in (0, 1))
    found, hang = told(replace(first, groups=[[0, 1], [0]]), replace(other, groups=[[0, 1], [1]]))
    assert "make another group number 1" in found
    assert "hang: rank 1 waits" in hang
    assert len(told(first, replace(other, groups=[]))) == 1, "the rank that ended sooner has fewer"


def test_who_waits_for_a_rollout_on_its_gpu_is_named():
    told_all = replace(SUM, name="broadcast_", phase="1 rollout", place="rl/megatron_backend/plain_data.py:61")
    (found,) = told(trace(0, told_all), trace(1, told_all))
    assert "rank 0 waits in NCCL's broadcast_ at rl/megatron_backend/plain_data.py:61 while engines answer" in found
    of_host = replace(told_all, of_host=True)
    assert told(trace(0, of_host), trace(1, of_host)) == []


@pytest.mark.parametrize(
    ("kind", "name", "is_told"),
    [
        *(("weights", name, True) for name in ("rollout", "save")),
        *(("optimizer", name, True) for name in ("rollout", "save", "mismatch", "weight_sync")),
        ("gradients", "old_logprobs", True),
        *(("weights", name, False) for name in ("weight_sync", "mismatch", "train")),
        ("optimizer", "train", False),
    ],
)
def test_what_does_not_sleep_in_the_turn_of_others_is_named(kind, name, is_told):
    awake = kind, "rl/megatron_backend/model.py:103", GIB
    found = told(replace(trace(0), phases=[*PHASES, phase(1, name, awake)]))
    assert ["1.000 GiB" in words and f"of {kind} are awake on rank 0 in {name}" in words for words in found] == (
        [True] * is_told
    )
    before = replace(trace(0), phases=[*PHASES, phase(0, name, awake)])
    assert told(before) == [], "before the first step a rank has just loaded"


def test_what_outlives_its_step_is_named():
    kept = ("activations", "rl/megatron_backend/weights.py:150", GIB)
    phases = [PHASES[0], phase(2, "rollout", kept)]
    (found,) = told(replace(trace(0), phases=phases))
    assert "1.000 GiB of rl/megatron_backend/weights.py:150 outlive their step on rank 0" in found


@pytest.mark.parametrize(
    ("made", "is_told"),
    [
        ("megatron/core/fusions/fused_bias_dropout.py:58", True),
        ("megatron/core/pipeline_parallel/p2p_communication.py:331", False),
        ("transformer_engine/pytorch/cpp_extensions/gemm.py:64", False),
    ],
)
def test_what_megatron_makes_for_us_outlives_its_step_but_for_the_last_message(made, is_told):
    kept = ("activations", f"rl/megatron_backend/train_step.py:176 {made}", GIB)
    found = told(replace(trace(0), phases=[PHASES[0], phase(2, "rollout", kept)]))
    assert [made in problem for problem in found] == [True] * is_told


def test_too_little_memory_names_what_holds_most():
    room = CONFIG.hardware.memory_gib_per_gpu - 6
    assert told(trace(0), left_out_gib=lambda rank, phase: room - 4) == []
    (found,) = told(trace(0), left_out_gib=lambda rank, phase: room - 4 + 0.1)
    assert "on rank 0 in train, most of it weights of rl/megatron_backend/model.py:103" in found


def test_who_waited_for_a_rank_that_failed_is_no_finding():
    where = 'Traceback\n  File "/x/posttrain/algorithm/clip.py", line 12, in f\n  File "/y/torch/x.py", line 1, in g'
    failed = {"type": "TypeError", "message": "no", "trace": where}
    waited = {"type": "HangError", "message": "rank 1 waits", "trace": ""}
    (found,) = told(replace(trace(0), error=failed), replace(trace(1), error=waited))
    assert "TypeError on rank 0: no" in found
    assert "algorithm/clip.py:12" in found


def part(key, *ranks):
    return {"part": [key, [0], [8]], "ranks": [*ranks], "place": "rl/megatron_backend/model.py:103"}


@pytest.mark.parametrize(
    ("of_0", "of_4", "found"),
    [
        # TP4: ranks 0 and 4 are data-parallel ones, 0 and 1 share a layer.
        (part("norm", 0, 4), part("norm", 0, 4), []),
        (part("expert 0", 0, 4), part("expert 1", 0, 4), ["expert 0 with rank 4's, of another part"]),
        (part("norm", 0), part("norm", 4), ["norm without rank 4, which holds it, too"]),
    ],
)
def test_gradients_are_added_up_over_those_who_hold_the_weight(of_0, of_4, found):
    told_ = told(trace(0, reductions=[of_0]), trace(1, reductions=[part("norm", 1, 5)]), trace(4, reductions=[of_4]))
    assert len(told_) == len(found)
    assert all(
        words in one and "rl/megatron_backend/model.py:103" in one for words, one in zip(found, told_, strict=True)
    )


def counted(found, what="tokens in an update", where="rl/megatron_backend/train_step.py:9"):
    return [(what, 8, 8, where), (what, found, 8, where)]


@pytest.mark.parametrize("what", ["tokens in an update", "routed tokens in a step", "spoiled updates left out"])
def test_what_ranks_count_is_counted_once(what):
    assert told(trace(0, counted=counted(8))) == []
    (found,) = told(trace(0, counted=counted(16, what)))
    assert f"rank 0 counts 16 {what} of 8" in found
    assert "look at rl/megatron_backend/train_step.py:9" in found


@pytest.mark.parametrize(("shapes", "count"), [(((4, 2),), 1), (((4, 3),), 2)])
def test_a_message_of_another_shape_comes_before_what_fails_for_it(shapes, count):
    failed = {"type": "RuntimeError", "message": "no", "trace": ""}
    found = told(trace(0, SEND, SEND), replace(trace(1, replace(RECEIVE, shapes=shapes)), error=failed))
    assert len(found) == count
    assert "RuntimeError on rank 1: no" in found[-1]
    assert count == 1 or "rank 0 sends send" in found[0]


def test_a_sum_is_looked_for_where_it_was_made():
    (found,) = told(trace(0, counted=counted(16, where="")), trace(1, counted=counted(16)))
    assert "rank 1 counts 16 tokens in an update of 8" in found
    assert "look at rl/megatron_backend/train_step.py:9" in found


def test_gradients_are_added_up_after_the_last_micro_batch():
    (found,) = told(trace(0), trace(1, late=["rl/megatron_backend/model.py:105"]))
    assert "rank 1 gives gradients away to be added up" in found
    assert "look at rl/megatron_backend/model.py:105, and at `no_sync_func`" in found
