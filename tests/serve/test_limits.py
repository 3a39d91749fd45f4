from hypothesis import given
from hypothesis import strategies as st

from gptmini.serve.limits import add_reserve, is_fair

SIZES = st.integers(1, 300)


def take_all(n_of_one_client: int, n_clients: int) -> list[int]:
    """What greedy clients hold when each takes one unit after another, in turns, until none can."""
    held = [0] * n_clients
    n_free = add_reserve(n_of_one_client)
    is_stuck = False
    while not is_stuck:
        is_stuck = True
        for client in range(n_clients):
            if n_free and is_fair(1, held[client], n_free, n_of_one_client):
                held[client] += 1
                n_free -= 1
                is_stuck = False
    return held


@given(SIZES)
def test_a_client_alone_has_all_but_the_reserve(size: int):
    assert take_all(size, 1) == [size]


@given(SIZES, st.integers(2, 10))
def test_greedy_clients_share_alike_and_leave_room_for_another(size: int, n_clients: int):
    held = take_all(size, n_clients)
    n_free = add_reserve(size) - sum(held)
    if n_free:
        assert max(held) - min(held) <= 1
        assert is_fair(1, 0, n_free, size)
    else:  # only where the clients are as many as the units
        assert max(held) <= 4


@given(SIZES, SIZES, st.integers(0, 300), SIZES)
def test_several_are_as_fair_as_one_after_another(wanted: int, size: int, held: int, free: int):
    expected = all(is_fair(1, held + n, free - n, size) for n in range(wanted))
    assert is_fair(wanted, held, free, size) == expected
