"""Many prompts from one JSON lines file to another, in batches; an interrupted call can resume."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptmini import files
from gptmini.config.settings import SampleConfig
from gptmini.console import show_item_progress
from gptmini.errors import DataError
from gptmini.generate.run import Run

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

    Sample n is what the same prompt gives alone. `prompts` may be -, standard input. `settings` are
    those of the section `sample`, `how` the other arguments of Run.start. DataError if the prompts
    cannot be read, or if `out` was made of other prompts, settings or weights.
    """
    if not (inputs := list(_read_prompts(prompts))):
        raise DataError(f"{prompts}: is empty; write one prompt per line")
    # Batch size and guesses are left out: they do not change the texts.
    sampling = run.build_sample_config(settings).model_dump()
    origin = json.dumps([run.fingerprint, sampling, how.get("special", False), samples, inputs])
    made_of = hashlib.sha256(origin.encode()).hexdigest()[:16]
    jobs = [(place, number) for place in range(len(inputs)) for number in range(samples)]
    done = _count_finished_lines(out, made_of)
    with (
        out.open("a", encoding="utf-8") as file,
        show_item_progress("text", len(jobs), done) as advance,
    ):
        for start in range(done, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            batch_prompts = [inputs[place]["prompt"] for place, _ in batch]
            numbers = [number for _, number in batch]
            texts = run.start(batch_prompts, numbers, **settings, **how).finish()
            for (place, _), text in zip(batch, texts, strict=True):
                line = inputs[place] | text.to_dict() | {"made_of": made_of}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            files.sync(file.fileno())
            advance(len(batch))


def _read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts, each as an object with `prompt`."""
    stdin = str(path) == "-"
    name = "standard input" if stdin else str(path)
    data = sys.stdin.buffer.read() if stdin else path.read_bytes()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            entry = json.loads(line)
            json.dumps(entry, ensure_ascii=False).encode()  # refuses lone surrogates
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error}); correct this line") from None
        entry = {"prompt": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise DataError(f'{where}: no prompt; write "TEXT" or {{"prompt": "TEXT"}}')
        if settings := [key for key in entry if _is_setting(key)]:
            raise DataError(
                f"{where}: has {', '.join(settings)}, but settings apply to all prompts; "
                "give them on the command line and rename or remove them here"
            )
        if taken := entry.keys() & OUTPUT_KEYS:
            raise DataError(f"{where}: key {min(taken)!r} is reserved for the output; rename it")
        yield entry


def _is_setting(key: str) -> bool:
    return key in SampleConfig.model_fields or key == "max_tokens"  # the latter is other programs'


def _count_finished_lines(out: Path, made_of: str) -> int:
    """How many lines are already written; a last line cut off by a crash is removed."""
    if not out.exists():
        return 0
    data = out.read_bytes()
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
        files.atomic_write_bytes(out, complete)
    return complete.count(b"\n")
