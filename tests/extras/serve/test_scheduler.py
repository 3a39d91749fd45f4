"""The scheduler's queue, without a server."""

import threading

import pytest

from gptmini.extras.serve.scheduler import Request, Scheduler, TokenEvents
from gptmini.generate.engine import TorchEngine
from gptmini.generate.run import Run
from tests.core.generate.samples import run_of


@pytest.fixture(scope="module")
def run() -> Run:
    return run_of()


def make_request(run: Run, callback=lambda events: None) -> Request:
    sample = run.build_sample_config({"max_new_tokens": 3, "bias": {}, "temperature": 1.0})
    text = run.create_text(0, "ab", sample)
    return Request(text, None, False, callback)


def test_texts_are_served_in_the_order_they_came(run: Run):
    order: list[int] = []
    all_ended = threading.Event()
    requests = []
    for number in range(4):

        def note_the_end(events: TokenEvents | Exception, number: int = number) -> None:
            assert isinstance(events, list)
            if events[-1].finish_reason:
                order.append(number)
            if len(order) == 4:
                all_ended.set()

        requests.append(make_request(run, note_the_end))

    def deliver(deliveries) -> None:
        for callback, events in deliveries:
            callback(events)

    scheduler = Scheduler(run, max_rows=1, max_waiting=4, deliver=deliver)
    assert scheduler.submit(requests)
    scheduler.start()
    assert all_ended.wait(600)
    scheduler.stop()
    assert order == [0, 1, 2, 3]


def test_others_get_a_token_for_each_step_s_worth_of_work_on_prompts(run: Run):
    """A step of two texts costs as much as 18 tokens of a prompt: 16 for the weights and 2."""
    scheduler = Scheduler(run, max_rows=2, max_waiting=2, deliver=lambda deliveries: None)
    scheduler.running = [make_request(run) for _ in range(2)]
    work_before_steps = []
    total = 0
    scheduler._step = lambda engine, requests: work_before_steps.append((total, len(requests)))
    for work in (17, 1, 17, 2, 18, 5):
        total += work
        scheduler._record_work(TorchEngine(run.model), work)
    assert work_before_steps == [(18, 2), (37, 2), (55, 2)]


def test_a_request_that_does_not_fit_the_queue_is_refused_as_a_whole(run: Run):
    scheduler = Scheduler(run, max_rows=1, max_waiting=4, deliver=lambda deliveries: None)
    assert scheduler.submit([make_request(run) for _ in range(3)])
    assert not scheduler.submit([make_request(run) for _ in range(2)])
    assert len(scheduler.waiting) == 3
    assert scheduler.submit([make_request(run)])
    assert not scheduler.submit([make_request(run)])


def test_texts_that_nobody_waits_for_any_more_leave_the_queue(run: Run):
    scheduler = Scheduler(run, max_rows=1, max_waiting=2, deliver=lambda deliveries: None)
    scheduler.running = [make_request(run)]  # has the only row
    gone, other = make_request(run), make_request(run)
    assert scheduler.submit([gone, other])
    gone.text.finish_reason = "gone"
    assert scheduler._admit()
    assert list(scheduler.waiting) == [other]
