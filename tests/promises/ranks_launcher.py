"""Start ranks as forks of one process, which spares each of them seconds of imports.

Each line of stdin asks for one start, as JSON: `words` is run as `gptmini WORDS...` in `folder` by
`size` ranks, with the variables that torchrun sets. They write to the file `said`; a line of stdout
has their exit codes. `fault` breaks one thing in one rank; `none` breaks nothing. {rank} in a word
is the number of the rank.
"""

import json
import math
import os
import signal
import socket
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo  # by torch's optimizers, when the first one is made

from gptmini import files
from gptmini.cli import app
from gptmini.errors import CheckpointError
from gptmini.extras.parallel import planning, ranks, sharding  # noqa: F401 - slow to import
from gptmini.model.gpt import GPT
from gptmini.runs.directory import RunDirectory
from gptmini.train import build, loop


def nan(rank: int) -> None:
    """Rank 1's third update has a loss that is not a number."""
    loss = GPT.compute_loss
    calls = []

    def broken(*inputs: object) -> object:
        calls.append(1)
        factor = math.nan if rank == 1 and len(calls) == 3 else 1
        return loss(*inputs) * factor

    GPT.compute_loss = broken


def overflowing(rank: int) -> None:
    """Gradients of rank 1 overflow in its third micro-batch, which is of its second step."""
    loss = GPT.compute_loss
    calls = []

    def broken(*inputs: object) -> object:
        calls.append(1)
        found = loss(*inputs)
        if rank == 1 and len(calls) == 3:
            found.register_hook(lambda gradient: gradient * math.inf)
        return found

    GPT.compute_loss = broken


def seeded(rank: int) -> None:
    """Every rank draws its own initial weights."""
    seed_from = build.seed_from
    build.seed_from = lambda *words: seed_from(*words, rank)


def signalled(rank: int, number: int, victim: int = 1) -> None:
    """A rank gets a signal in its third update."""
    update = loop.train_step
    calls = []

    def interrupted(training: object) -> object:
        calls.append(1)
        if rank == victim and len(calls) == 3:
            os.kill(os.getpid(), number)
        return update(training)

    loop.train_step = interrupted


def killed(rank: int) -> None:
    """Rank 0 dies in its third update."""
    signalled(rank, signal.SIGKILL, victim=0)


def stopped(rank: int) -> None:
    signalled(rank, signal.SIGTERM)


def full(rank: int) -> None:
    """The disk of rank 0 is full at the first checkpoint."""

    def failing(*_: object) -> None:
        assert rank == 0
        raise OSError(28, "No space left on device")

    files.sync_and_hash = failing


def silent(rank: int) -> None:
    """Rank 1 hangs where rank 0 waits for what it has to say."""
    ranks.FACTS_TIMEOUT_SECONDS = 8
    if rank == 1:
        save = loop.save_checkpoint

        def hanging(training: object) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)
            save(training)

        loop.save_checkpoint = hanging


def stuck(rank: int) -> None:
    """Rank 1 hangs in its third update, while rank 0 waits in a collective."""
    ranks.COLLECTIVE_TIMEOUT_SECONDS = 8
    signalled(rank, signal.SIGSTOP)


def watched(rank: int) -> None:
    """Every rank but 0 notes the files that it opens to write."""
    if rank:

        def note(event: str, details: tuple[object, ...]) -> None:
            if event == "open" and isinstance(details[2], int) and details[2] & os.O_ACCMODE:
                print(f"rank {rank} writes {details[0]}", file=sys.stderr)

        sys.addaudithook(note)


def misread(rank: int) -> None:
    """Rank 1 reads another text."""
    opened = planning.prepare_corpus
    if rank == 1:
        planning.prepare_corpus = lambda *inputs, **options: replace(
            opened(*inputs, **options), content="another"
        )


def unreadable(rank: int) -> None:
    """Rank 0 cannot read the checkpoint; the others read none."""

    def failing(run: RunDirectory, step: int, **_: object) -> None:
        assert rank == 0
        raise CheckpointError(f"{run.checkpoints}: step {step}: damaged")

    RunDirectory.load_checkpoint = failing


TIMEOUT_SECONDS = 500
FAULTS = {
    fault.__name__: fault
    for fault in (
        nan,
        overflowing,
        seeded,
        killed,
        stopped,
        full,
        silent,
        stuck,
        watched,
        misread,
        unreadable,
    )
} | {"none": lambda _: None}


def start(rank: int, port: int, request: dict[str, Any]) -> int:
    """Fork a rank that runs the command; returns its process."""
    if process := os.fork():
        return process
    said = os.open(request["said"], os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(request["folder"])
    size = request["size"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if size > 1:
        os.environ |= dict(zip(names, map(str, (rank, rank, size, "127.0.0.1", port)), strict=True))
    words = [word.replace("{rank}", str(rank)) for word in request["words"]]
    sys.argv = ["gptmini", *words]
    code = 1
    try:
        FAULTS[request["fault"]](rank)
        app.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(request: dict[str, Any]) -> list[int]:
    """Start the ranks and wait for them; those that are stopped are ended when the others have."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ranks_of = {start(rank, port, request): rank for rank in range(request["size"])}

    def end_all(*_: object) -> None:
        for process in ranks_of.keys() - codes.keys() - stopped_ones:
            os.kill(process, signal.SIGKILL)

    codes: dict[int, int] = {}
    stopped_ones: set[int] = set()
    signal.signal(signal.SIGALRM, end_all)
    if len(ranks_of) > 1:  # they may wait for each other
        signal.alarm(TIMEOUT_SECONDS)
    while len(codes) + len(stopped_ones) < len(ranks_of):
        process, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped_ones.add(process)
        else:
            codes[process] = os.waitstatus_to_exitcode(status)
    signal.alarm(0)
    for process in stopped_ones:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        codes[process] = -signal.SIGSTOP
    return [codes[process] for process in ranks_of]


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
