"""The scheduler's queue, and the shares of clients, without a server."""

import threading
from collections import Counter
from collections.abc import Iterable

import pytest

from gptmini.generate.engine import TorchEngine
from gptmini.generate.filters import LogitsProcessor
from gptmini.generate.run import Run
from gptmini.serve.scheduler import Request, Scheduler, TokenEvents
from tests.analysis.samples import run_of


@pytest.fixture(scope="module")
def run() -> Run:
    return run_of()


def make_request(run: Run, callback=lambda events: None, client: str = "") -> Request:
    sample = run.build_sample_config({"max_new_tokens": 3, "bias": {}, "temperature": 1.0})
    processor = LogitsProcessor(sample, None)
    text = run.create_text(0, "ab", sample)
    return Request(text, sample, processor, None, False, callback, client)


def make_requests(run: Run, client: str, n: int) -> list[Request]:
    return [make_request(run, client=client) for _ in range(n)]


def count_clients(found: Iterable[Request]) -> Counter[str]:
    return Counter(request.client for request in found)


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


def test_rows_are_left_for_others_and_come_first_come_first_served_otherwise(run: Run):
    scheduler = Scheduler(run, 32, 256, lambda _: None)
    assert scheduler.submit(make_requests(run, "greedy", 100))
    scheduler._fill_rows()
    assert count_clients(scheduler.running) == {"greedy": 32}
    for number in range(8):
        assert scheduler.submit(make_requests(run, f"normal {number}", 1))
    scheduler._fill_rows()
    assert len(scheduler.running) == 40
    assert count_clients(scheduler.waiting) == {"greedy": 68}
    # When texts of the greedy one end, others need not wait behind those that it has in the queue.
    for request in scheduler.running[:4]:
        request.text.finish_reason = "length"
    scheduler.running = [each for each in scheduler.running if not each.text.finish_reason]
    assert scheduler.submit(make_requests(run, "late", 2))
    scheduler._fill_rows()
    assert count_clients(scheduler.running)["late"] == 2


def test_the_queue_has_places_for_others(run: Run):
    scheduler = Scheduler(run, 1, 10, lambda _: None)
    assert scheduler.submit(make_requests(run, "greedy", 10))
    assert not scheduler.submit(make_requests(run, "greedy", 1))
    assert scheduler.submit(make_requests(run, "normal", 1))
    assert not scheduler.submit(make_requests(run, "normal", 10))


def test_clients_take_turns_with_their_prompts(run: Run):
    scheduler = Scheduler(run, 32, 256, lambda _: None)
    greedy = make_requests(run, "greedy", 3)
    normal = make_requests(run, "normal", 2)
    scheduler.running = greedy + normal
    order = []
    unready = list(scheduler.running)
    while unready:
        request = scheduler._take_turn(unready)
        order.append(scheduler.running.index(request))
        unready.remove(request)
    assert order == [0, 3, 1, 4, 2]
    scheduler.running = normal  # a client that has left is forgotten
    scheduler._take_turn(normal)
    assert scheduler._last_prefills.keys() == {"normal"}


def test_a_step_has_at_most_as_many_texts_of_one_client_as_of_all_others(run: Run):
    scheduler = Scheduler(run, 32, 256, lambda _: None)
    greedy = make_requests(run, "greedy", 30)
    assert scheduler._choose_for_step(greedy) == greedy
    normal = [each for number in range(10) for each in make_requests(run, f"normal {number}", 1)]
    chosen = scheduler._choose_for_step(greedy + normal)
    assert count_clients(chosen)["greedy"] == 10
    assert all(each in chosen for each in normal)
    few = scheduler._choose_for_step(greedy + normal[:1])
    assert count_clients(few) == {"greedy": 8, "normal 0": 1}


def test_texts_that_are_left_out_come_next(run: Run):
    scheduler = Scheduler(run, 32, 256, lambda _: None)
    greedy = make_requests(run, "greedy", 20)
    normal = make_requests(run, "normal", 1)
    n_steps = Counter[int]()
    for _ in range(5):
        for request in scheduler._choose_for_step(greedy + normal):
            request.last_turn = n_steps.total() + 1
            n_steps[id(request)] += 1
    assert n_steps[id(normal[0])] == 5
    assert {n_steps[id(request)] for request in greedy} == {2}
