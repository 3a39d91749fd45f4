"""Many prompts from one file to another, in batches, going on where an earlier call ended."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptmini import files
from gptmini.console import counted
from gptmini.errors import DataError
from gptmini.generate.run import Run

ADDED = {"number", "text", "tokens", "logprobs", "finish_reason", "made_of"}


def generate(
    run: Run,
    prompts: Path,
    out: Path,
    samples: int,
    batch_size: int,
    settings: dict[str, Any],
    **how: Any,
) -> None:
    """Write a JSON line for every sample of every prompt, in order, with whatever came along.

    Sample n of a prompt is that of the same prompt alone. `settings` are those of the section
    `sample`, `how` is what else Run.start takes. DataError if the prompts cannot be read, or if
    `out` is of other prompts, settings or weights.
    """
    if not (inputs := list(_read(prompts))):
        raise DataError(f"{prompts}: is empty; write a prompt on each line")
    sampling = run.sampling(settings).model_dump()
    words = json.dumps([run.fingerprint, sampling, how.get("special", False), samples, inputs])
    made_of = hashlib.sha256(words.encode()).hexdigest()[:16]
    jobs = [(place, number) for place in range(len(inputs)) for number in range(samples)]
    done = _resume(out, made_of)
    with out.open("a", encoding="utf-8") as file, counted("text", len(jobs), done) as advance:
        for start in range(done, len(jobs), batch_size):
            batch = jobs[start : start + batch_size]
            texts = [inputs[place]["prompt"] for place, _ in batch]
            numbers = [number for _, number in batch]
            ended = run.start(texts, numbers, **settings, **how).finish()
            for (place, _), sample in zip(batch, ended, strict=True):
                line = inputs[place] | vars(sample) | {"made_of": made_of}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            files.sync(file.fileno())
            advance(len(batch))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts, each as an object with `prompt`."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: no JSON in Unicode ({error}); mend it") from None
        found = {"prompt": found} if isinstance(found, str) else found
        if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
            raise DataError(f'{path}:{number}: neither a text nor an object with "prompt"; mend it')
        if taken := found.keys() & ADDED:
            raise DataError(f"{path}:{number}: has {min(taken)}, which is added here; rename it")
        yield found


def _resume(out: Path, made_of: str) -> int:
    """How many lines there are already; a line cut by a crash is dropped."""
    if not out.exists():
        return 0
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            same = json.loads(line)["made_of"] == made_of
        except (ValueError, KeyError, TypeError, RecursionError):
            same = False
        if not same:
            raise DataError(
                f"{out}:{number}: not made of these prompts and settings; name another --out"
            )
    if len(whole) < len(data):
        files.replace(out, whole)
    return whole.count(b"\n")
