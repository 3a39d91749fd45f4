"""Time the preparation of texts: python scripts/bench/text.py [--quick] [--large GIGABYTES]

The same text, the sources of Python's standard library, as every kind of corpus and with every
tokenizer. Rows take turns; the tables give medians and ratios to the first row. Another table sets
the processor time that gpt2 takes beside that of tiktoken alone on the same text. --large adds a
generated text of that size, with the gpt2 encoding if its files are available, in its own process
to measure peak memory.
"""

import argparse
import csv
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import tiktoken

from gptmini.config.settings import Config, DataConfig
from gptmini.data.corpus import prepare_corpus
from gptmini.data.sources import find_source
from gptmini.errors import DataError
from gptmini.tokenizer.load import create_tokenizer


def write_kinds(documents: list[str], folder: Path) -> dict[str, str]:
    """Write the documents as every kind of corpus: titles and file names."""
    (folder / "texts").mkdir()
    for number, document in enumerate(documents):
        (folder / "texts" / f"{number:05d}.txt").write_text(document)
    (folder / "one.txt").write_text("".join(documents))
    (folder / "parted.txt").write_text("<|endoftext|>".join(documents))
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "lines.jsonl").write_text(lines)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 6))
    packed = pyarrow.compress(lines.encode(), "zstd", asbytes=True)
    (folder / "lines.jsonl.zst").write_bytes(packed)
    with (folder / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerows([["text"], *([document] for document in documents)])
    table = pyarrow.table({"text": documents})
    pyarrow.parquet.write_table(table, folder / "column.parquet")
    return {
        "a text file": "one.txt",
        "a text file with a separator": "parted.txt",
        "a folder": "texts",
        "JSON lines": "lines.jsonl",
        "JSON lines, gzip": "lines.jsonl.gz",
        "JSON lines, zstd": "lines.jsonl.zst",
        "CSV": "rows.csv",
        "Parquet": "column.parquet",
    }


def prepare(path: Path, kind: str) -> tuple[float, float]:
    """Prepare a text without a cache: megabytes per second, and bytes per token."""
    separator = "<|endoftext|>" if path.name == "parted.txt" else None
    config = Config.model_validate(
        {"data": {"path": str(path), "separator": separator}, "tokenizer": {"kind": kind}}
    )
    with tempfile.TemporaryDirectory() as cache:
        started = time.perf_counter()
        corpus = prepare_corpus(config, Path(cache))
        seconds = time.perf_counter() - started
    texts = corpus.training + corpus.validation
    size = sum(text.text_bytes for text in texts)
    return size / 1e6 / seconds, size / sum(map(len, texts))


def print_table(
    title: str, rows: Mapping[str, Callable[[], tuple[float, float]]], rounds: int
) -> None:
    """Time the rows in turns and print a Markdown table."""
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, measure in rows.items():
            results[name].append(measure())
    speeds = {name: statistics.median(speed for speed, _ in runs) for name, runs in results.items()}
    base = next(iter(speeds.values()))
    print(f"\n| {title} | bytes per token | MB/s | to the first |\n|---|---|---|---|")
    for name, speed in speeds.items():
        print(f"| {name} | {results[name][0][1]:.2f} | {speed:.1f} | {speed / base:.2f} x |")


def compare_with_tiktoken(path: Path) -> None:
    """Print the processor time of preparing a text by gpt2, and of tiktoken alone on its chunks.

    Processor time counts all threads, and hardly depends on what else the machine does.
    """
    size = path.stat().st_size / 1e6
    started = time.process_time()
    prepare(path, "gpt2")
    ours = time.process_time() - started
    texts = [chunk.text for chunk in find_source([str(path)], DataConfig()).iter_chunks()]
    encoding = tiktoken.get_encoding("gpt2")
    started = time.process_time()
    encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
    alone = time.process_time() - started
    print("\n| gpt2, processor time | ms per MB |\n|---|---|")
    print(f"| gptmini, from the file to the token files | {1000 * ours / size:.0f} |")
    print(f"| tiktoken's encode_ordinary_batch, text in memory | {1000 * alone / size:.0f} |")


def prepare_large(gigabytes: float, documents: list[str], kind: str, folder: Path) -> None:
    """Prepare a text far larger than the memory this should take."""
    path = folder / "large.txt"
    written = number = 0
    with path.open("w") as file:
        while written < gigabytes * 1e9:
            document = documents[number % len(documents)]
            written += file.write(f"# copy {number}\n{document}\n")
            number += 1
    command = [sys.executable, "-m", "gptmini", "data", "prepare", "--data", str(path)]
    command += ["--set", f"tokenizer.kind={kind}", "--cache", str(folder / "cache")]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    size = path.stat().st_size
    print(
        "\n| large text | tokenizer | GB | seconds | MB/s | peak MiB |\n|---|---|---|---|---|---|"
    )
    print(
        f"| one file | {kind} | {size / 1e9:.2f} | {seconds:.0f} | {size / 1e6 / seconds:.1f} | "
        f"{peak:.0f} |"
    )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument(
        "--quick", action="store_true", help="one round on a small part of the text"
    )
    options.add_argument("--large", type=float, default=0, metavar="GIGABYTES")
    chosen = options.parse_args()
    pieces = find_source(["builtin:python-code"], DataConfig()).iter_chunks()
    documents = [piece.text for piece in pieces][:: 50 if chosen.quick else 1]
    rounds = 1 if chosen.quick else 3
    kinds = ["byte", "char"]
    try:
        create_tokenizer("gpt2", None, ())
        kinds.append("gpt2")
    except DataError:
        print("warning: gpt2: no encoding files; set TIKTOKEN_CACHE_DIR", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_kinds(documents, folder)
        for vocab_size in (1024, 4096, 16384):
            tokenizer = create_tokenizer("bpe", vocab_size, documents)
            kind = str(folder / f"bpe-{vocab_size}.json")
            Path(kind).write_text(tokenizer.to_json())
            kinds.append(kind)
        bpe = str(folder / "bpe-4096.json")
        corpora = {title: partial(prepare, folder / file, bpe) for title, file in files.items()}
        print_table("corpus", corpora, rounds)
        file = folder / "one.txt"
        rows = {Path(kind).stem: partial(prepare, file, kind) for kind in kinds}
        print_table("tokenizer", rows, rounds)
        if "gpt2" in kinds:
            compare_with_tiktoken(file)
        if chosen.large:
            prepare_large(chosen.large, documents, "gpt2" if "gpt2" in kinds else "byte", folder)


if __name__ == "__main__":
    main()
