"""Continue the prompts of a JSON Lines file in batches and write the texts to another one.

The output is in the order of the input, so an interrupted call resumes behind its last whole line.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gptmini import files
from gptmini.config.settings import SampleConfig
from gptmini.console import show_item_progress
from gptmini.errors import DataError, MachineError
from gptmini.generate.run import Run

SETTINGS = {*SampleConfig.model_fields, "max_tokens"}  # the last as other programs call it
OUTPUT_KEYS = {"number", "text", "tokens", "logprobs", "finish_reason", "made_of"}


def generate_file(
    run: Run,
    prompts: Path,
    out: Path,
    samples: int,
    batch_size: int,
    settings: dict[str, Any],
    **how: Any,
) -> None:
    """Write one JSON line per sample of each prompt, in order, with the other keys of its input.

    Sample n of a prompt is the text that the prompt gives alone with number n. `prompts` may be -,
    standard input. `settings` override those of the section `sample`; `how` are further arguments
    of `Run.start`. Raises DataError if the prompts cannot be read, or if `out` comes from other
    prompts, settings or weights; MachineError while another process writes `out`.
    """
    if not (entries := list(_read_prompts(prompts))):
        raise DataError(f"{prompts}: is empty; write one prompt per line")
    # Batch size and drafts are left out: they change no text.
    sampling = run.build_sample_config(settings).model_dump()
    origin = json.dumps([run.fingerprint, sampling, how.get("special", False), samples, entries])
    made_of = hashlib.sha256(origin.encode()).hexdigest()[:16]
    # Each is a prompt, with the other keys of its line, and the number of a sample.
    jobs = [(entry, number) for entry in entries for number in range(samples)]
    with files.name_in_errors(out), out.open("a+b") as file:
        if not files.try_lock(file.fileno()):
            raise MachineError(
                f"{out}: another process is writing it; wait for it, or choose another --out"
            )
        done = _count_finished_lines(file, out, made_of)
        with show_item_progress("text", len(jobs), done) as advance:
            for start in range(done, len(jobs), batch_size):
                batch = jobs[start : start + batch_size]
                texts = [entry["prompt"] for entry, _ in batch]
                numbers = [number for _, number in batch]
                generated = run.start(texts, numbers, **settings, **how).finish()
                for (entry, _), text in zip(batch, generated, strict=True):
                    line = entry | text.to_dict() | {"made_of": made_of}
                    file.write(f"{json.dumps(line, ensure_ascii=False)}\n".encode())
                # A whole batch reaches the disk before it counts as done.
                file.flush()
                files.sync(file.fileno())
                advance(len(batch))


def _read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the prompts, each as an object with the key `prompt`."""
    if str(path) == "-":
        name = "standard input"
        data = sys.stdin.buffer.read()
    else:
        name = str(path)
        data = path.read_bytes()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            entry = json.loads(line)
            json.dumps(entry, ensure_ascii=False).encode()  # fails for lone surrogates
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error}); correct this line") from None
        entry = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise DataError(f'{where}: no prompt; write "TEXT" or {{"prompt": "TEXT"}}')
        if settings := [key for key in entry if key in SETTINGS]:
            raise DataError(
                f"{where}: has {', '.join(settings)}, but settings apply to all prompts; "
                "give them on the command line and rename or remove them here"
            )
        if reserved := entry.keys() & OUTPUT_KEYS:
            raise DataError(f"{where}: key {min(reserved)!r} is reserved for the output; rename it")
        yield entry


def _count_finished_lines(file: BinaryIO, out: Path, made_of: str) -> int:
    """Count the lines already written, and remove a last line that a crash cut off."""
    file.seek(0)
    data = file.read()
    complete = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            same = json.loads(line)["made_of"] == made_of
        except (ValueError, KeyError, TypeError, RecursionError):
            same = False
        if not same:
            raise DataError(
                f"{out}:{number}: made of other prompts, settings or weights; choose another --out"
            )
    if len(complete) < len(data):
        file.truncate(len(complete))
    return complete.count(b"\n")
