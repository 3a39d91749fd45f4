"""The scheduler's queue, without a server."""

import threading

import pytest

from gptmini.generate.filters import LogitsProcessor
from gptmini.generate.run import Run
from gptmini.serve.scheduler import Request, Scheduler, TokenEvents
from tests.analysis.samples import run_of


@pytest.fixture(scope="module")
def run() -> Run:
    return run_of()


def make_request(run: Run, callback=lambda events: None) -> Request:
    sample = run.build_sample_config({"max_new_tokens": 3, "bias": {}, "temperature": 1.0})
    processor = LogitsProcessor(sample, None)
    return Request(run.create_text(0, "ab", sample), sample, processor, None, False, callback)


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
    assert all_ended.wait(60)
    scheduler.stop()
    assert order == [0, 1, 2, 3]


def test_a_request_that_does_not_fit_the_queue_is_refused_as_a_whole(run: Run):
    scheduler = Scheduler(run, max_rows=1, max_waiting=4, deliver=lambda deliveries: None)
    assert scheduler.submit([make_request(run) for _ in range(3)])
    assert not scheduler.submit([make_request(run) for _ in range(2)])
    assert len(scheduler.waiting) == 3
    assert scheduler.submit([make_request(run)])
    assert not scheduler.submit([make_request(run)])
