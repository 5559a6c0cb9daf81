import threading
import time
from concurrent.futures import wait

import pytest
import torch

from posttrain.rl.engines.embedded.model import load_model
from posttrain.rl.engines.embedded.requests import Row
from posttrain.rl.engines.embedded.worker import Work, Worker

WAIT_SECONDS = 20


def row(name, length=4):
    return Row(name, (5, 6, 7), length, 1.0, 0, frozenset())


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, torch.float32).model


@pytest.fixture
def make_worker(model):
    workers = []

    def make(merge_requests=False, version=lambda: "1"):
        worker = Worker(model, version, merge_requests, max_batch_rows=5)
        worker.start()
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.stop(WAIT_SECONDS)
        assert not worker.is_alive


class Gate:
    """Stops a request after its first token until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, responses):
        self.reached.set()
        assert self.opened.wait(WAIT_SECONDS)


def test_every_request_is_its_own_batch(make_worker):
    worker = make_worker()
    futures = [worker.submit(Work([row(f"{i}"), row(f"{i}b")])) for i in range(3)]
    assert [r.row.request_id for f in futures for r in f.result(WAIT_SECONDS)] == [
        "0",
        "0b",
        "1",
        "1b",
        "2",
        "2b",
    ]
    assert (worker.counters.num_batches, worker.counters.num_responses) == (3, 6)
    assert worker.counters.num_output_tokens == 24


def test_requests_that_wait_are_merged_up_to_the_limit(make_worker):
    worker, gate = make_worker(merge_requests=True), Gate()
    first = worker.submit(Work([row("first")], gate))
    assert gate.reached.wait(WAIT_SECONDS)
    # 2 + 2 rows fit into 5, the third request does not
    rest = [worker.submit(Work([row(f"{i}"), row(f"{i}b", length=2)])) for i in range(3)]
    gate.opened.set()
    wait([first, *rest], WAIT_SECONDS)
    assert worker.counters.num_batches == 3
    assert [len(r.output_ids) for r in rest[1].result()] == [4, 2]


def test_a_stream_sees_every_token_of_its_own_rows(make_worker):
    seen = []
    work = Work([row("a", length=3)], lambda responses: seen.append([len(r.output_ids) for r in responses]))
    make_worker().submit(work).result(WAIT_SECONDS)
    assert seen == [[1], [2], [3]]


def test_weights_change_between_batches_and_before_the_next_one(make_worker):
    worker, gate = make_worker(version=lambda: version[0]), Gate()
    version, changed = ["1"], threading.Event()
    running, waiting = Work([row("running")], gate), Work([row("waiting")])
    worker.submit(running)
    assert gate.reached.wait(WAIT_SECONDS)

    def change():
        with worker.weights_may_change():
            version[0] = "2"
        changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    assert not changed.wait(0.2)
    worker.submit(waiting)
    gate.opened.set()
    running.done.result(WAIT_SECONDS)
    waiting.done.result(WAIT_SECONDS)
    thread.join(WAIT_SECONDS)
    assert (running.weight_version, waiting.weight_version) == ("1", "2")


def test_a_pause_in_place_holds_a_batch_between_two_tokens_and_lets_weights_change(make_worker):
    worker = make_worker()
    work = Work([row("long", length=200)], lambda responses: first.set())
    first = threading.Event()
    future = worker.submit(work)
    assert first.wait(WAIT_SECONDS)
    worker.pause("in_place")
    with worker.weights_may_change():
        assert not future.done()
    time.sleep(0.1)
    assert not future.done()
    worker.resume()
    assert len(future.result(WAIT_SECONDS)[0].output_ids) == 200


def test_an_aborting_pause_answers_what_runs_and_what_waits(make_worker):
    worker, gate = make_worker(), Gate()
    running = worker.submit(Work([row("running", length=100)], gate))
    waiting = worker.submit(Work([row("waiting")]))
    assert gate.reached.wait(WAIT_SECONDS)
    worker.pause("abort")
    gate.opened.set()
    (cut,), (never,) = running.result(WAIT_SECONDS), waiting.result(WAIT_SECONDS)
    assert cut.finish_reason["type"] == never.finish_reason["type"] == "abort"
    assert (len(cut.output_ids), len(never.output_ids)) == (1, 0)
    later = worker.submit(Work([row("later")]))
    assert not later.done()
    worker.resume()
    assert later.result(WAIT_SECONDS)[0].finish_reason["type"] == "length"


def test_one_request_is_aborted_by_its_id(make_worker):
    worker, gate = make_worker(), Gate()
    future = worker.submit(Work([row("a", length=9), row("b", length=9)], gate))
    assert gate.reached.wait(WAIT_SECONDS)
    worker.abort("a", everything=False)
    gate.opened.set()
    first, second = future.result(WAIT_SECONDS)
    assert (first.finish_reason["type"], second.finish_reason["type"]) == ("abort", "length")


def test_a_failing_batch_fails_its_request_and_the_next_one_works(make_worker, model):
    worker = make_worker()
    with torch.no_grad():
        kept = model.lm_head.weight.clone()
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        worker.submit(Work([row("a")])).result(WAIT_SECONDS)
    with torch.no_grad():
        model.lm_head.weight.copy_(kept)
    assert worker.submit(Work([row("b")])).result(WAIT_SECONDS)


def test_a_request_given_up_while_it_waits_is_not_computed(make_worker):
    worker, gate = make_worker(), Gate()
    running = worker.submit(Work([row("running")], gate))
    assert gate.reached.wait(WAIT_SECONDS)
    given_up = worker.submit(Work([row("given up")]))
    assert given_up.cancel()
    gate.opened.set()
    running.result(WAIT_SECONDS)
    worker.submit(Work([row("after")])).result(WAIT_SECONDS)
    assert worker.counters.num_responses == 2


@pytest.mark.parametrize(("modes", "is_held"), [(["in_place"], True), (["in_place", "retract"], False)])
def test_a_request_whose_cache_is_dropped_does_not_hold_a_flush_up(make_worker, modes, is_held):
    worker, first = make_worker(), threading.Event()
    future = worker.submit(Work([row("long", length=200)], lambda responses: first.set()))
    assert first.wait(WAIT_SECONDS)
    for mode in modes:
        worker.pause(mode)
    worker.submit(Work([row("waits")]))
    assert worker.wait_without_cache(0.3 if is_held else WAIT_SECONDS) is not is_held
    worker.resume()
    assert len(future.result(WAIT_SECONDS)[0].output_ids) == 200
    assert worker.wait_without_cache(WAIT_SECONDS)


def test_responses_that_ended_before_new_weights_keep_their_version(make_worker):
    version, gate = ["1"], Gate()
    worker = make_worker(version=lambda: version[0])
    future = worker.submit(Work([row("short", length=1), row("long", length=3)], gate))
    assert gate.reached.wait(WAIT_SECONDS)
    worker.pause("retract")
    gate.opened.set()
    with worker.weights_may_change():
        version[0] = "2"
    worker.resume()
    short, long = future.result(WAIT_SECONDS)
    assert (short.versions, long.versions) == (["1"], ["1", "2", "2"])
