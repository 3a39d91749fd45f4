"""How much the server takes on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all together."""

    max_rows: int = 32  # texts generated together
    max_waiting: int = 256  # texts in the queue, and in one request
    max_tokens: int = 4096  # of a text
    max_values: int = 1 << 18  # tokens and log-probabilities in the response to a request
    max_head_bytes: int = 1 << 15  # as in nginx; a header of 4 bytes takes 150 in memory
    max_body_bytes: int = 1 << 20
    max_pipelined: int = 16  # requests of one connection that wait for their turn
    max_preparing: int = 4  # requests whose prompts become tokens at a time
    prepare_seconds: float = 20  # for that, and the wait for it
    read_seconds: int = 20  # for the head of a request, the wait for it, and its body
    request_seconds: float = 600  # from the request's first line to the response's last
    drain_seconds: int = 30  # for requests under way when the server is stopped
