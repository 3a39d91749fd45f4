"""A few threads for work that may take long, such as making tokens of a prompt."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Runs functions in at most `count` threads at a time; other callers wait.

    A caller that gives up leaves its thread at work, and the thread its place. The threads are
    daemons, so none of them holds up the end of the process, as those of a pool would.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def run(self, function: Callable[[], T]) -> T:
        """Return what the function returns, or raise what it raises."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                conclude = partial(done.set_result, function())
            except BaseException as error:  # it belongs to the caller
                conclude = partial(done.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, conclude)

        def end(conclude: Callable[[], None]) -> None:
            self._free.release()
            if not done.cancelled():
                conclude()

        threading.Thread(target=work, name="worker", daemon=True).start()
        return await done
