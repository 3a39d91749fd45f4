"""How much the server takes on, and how much of it one client may have.

A client is an address. No client can take so much that nothing is left for the next: it gets
another unit only while it holds less than SHARE times as many as are free. A client alone ends with
4 of 5 units, two with 4 of 9 each, and some are always free for a new one. This is the dynamic
threshold by which switches share their memory (Choudhury and Hahne 1998).
"""

from dataclasses import dataclass

SHARE = 4


@dataclass(frozen=True)
class Limits:
    """How much the server takes on; `add_reserve` adds to `max_rows` and `max_waiting`."""

    max_rows: int = 32  # texts of one client generated together
    max_waiting: int = 256  # texts of one client in the queue, and in one request
    max_tokens: int = 4096  # of a text
    max_values: int = 1 << 18  # tokens and log-probabilities in the response to a request
    max_body_bytes: int = 1 << 20
    read_seconds: int = 20  # for the headers of a request, for its body, and between requests
    request_seconds: float = 600  # from the request's first line to the response's last
    drain_seconds: int = 30  # for requests under way when the server is stopped


def add_reserve(n_of_one_client: int) -> int:
    """Add a quarter for other clients."""
    return n_of_one_client + -(-n_of_one_client // SHARE)


def is_fair(n_wanted: int, n_held: int, n_free: int, n_of_one_client: int) -> bool:
    """Tell whether a client that holds `n_held` units may have some of those that are free."""
    if n_held + n_wanted > n_of_one_client:
        return False
    # Imagine that the client takes one at a time: the last one must be fair, too.
    n_before = n_wanted - 1
    return n_held + n_before < SHARE * (n_free - n_before)
