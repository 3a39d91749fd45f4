"""A few threads for work that may take long, such as making tokens of a prompt."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(free: asyncio.Semaphore, function: Callable[[], T]) -> T:
    """Return what the function returns, or raise what it raises, once a thread is free for it.

    A caller that gives up leaves its thread at work, and the thread its place. The threads are
    daemons, so none of them holds up the end of the process, as those of a pool would.
    """
    await free.acquire()
    loop = asyncio.get_running_loop()
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # it cannot be cancelled any more

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # it belongs to the caller
            done.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(free.release)

    threading.Thread(target=work, name="worker", daemon=True).start()
    return await asyncio.wrap_future(done)
