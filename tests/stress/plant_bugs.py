"""Plant bugs in gptmini, one at a time, and list those that their tests do not see.

`planted_bugs.yaml` names the bugs: in which folder of gptmini and in which function, the code that
changes, what it becomes, the mistake in a few words, and a test that must see it. Each bug is
planted in a temporary copy of the checkout, where its test runs. It runs without a C++ compiler, so
that nothing but PyTorch is needed to see a bug.
"""

import argparse
import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("planted_bugs.yaml")
COPIED = ("gptmini", "tests", "configs", "data", "scripts", "pyproject.toml", "README.md")
TIMEOUT_SECONDS = 600  # for a run of pytest; a bug that makes it hang is seen


class Bug(NamedTuple):
    """One change of one function. `function` may be `Class.method` or `function.inner`."""

    folder: str
    function: str
    mistake: str
    code: str
    becomes: str
    seen_by: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="plant only bugs whose place or name has a word")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at once")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without bugs")
    args = parser.parse_args()
    bugs = load()
    if wrong := list(find_problems(bugs)):
        sys.exit("\n".join(wrong))
    chosen = [bug for bug in bugs if matches(bug, args.words)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = Path(folder)
        if not args.trust:
            check_tests(chosen, copies, pool)
        print("\n| function | bug | seen by |\n|---|---|---|")
        unseen = 0
        results = pool.map(lambda bug: run_tests(copies, [bug.seen_by], bug), chosen)
        for bug, failed in zip(chosen, results, strict=True):
            unseen += not failed
            print(f"| {bug.function} | {bug.mistake} | {failed or 'NOT SEEN'} |", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"\n{len(chosen)} bugs, {unseen} not seen, {minutes:.0f} minutes")
    sys.exit(bool(unseen))


def matches(bug: Bug, words: list[str]) -> bool:
    """Tell whether a bug's place or name has one of the words; without words, each bug does."""
    text = f"{bug.folder} {bug.function} {bug.mistake}"
    return not words or any(word in text for word in words)


def load() -> list[Bug]:
    """Read the bugs, in the order of the file."""
    folders = yaml.load(DATA.read_text(), Loader=yaml.BaseLoader)  # where 0 and True are text
    bugs = []
    for folder, functions in folders.items():
        for function, changes in functions.items():
            bugs += [Bug(folder, function, **change) for change in changes]
    return bugs


def find_problems(bugs: list[Bug]) -> Iterator[str]:
    """Yield a line for each bug that cannot be planted, changes nothing, or has not one test."""
    for bug in bugs:
        try:
            _, changed = plant(bug)
            ast.parse(changed)
        except (ValueError, SyntaxError) as error:
            yield f"{bug.mistake}: {error}"
        if bug.becomes == bug.code:
            yield f"{bug.mistake}: {bug.code!r} stays the same"
        files = find_files(bug.seen_by)
        if len(files) != 1:
            yield f"{bug.mistake}: {bug.seen_by} is in {len(files)} files, not one"


def check_tests(bugs: list[Bug], copies: Path, pool: ThreadPoolExecutor) -> None:
    """Run the tests of these bugs without any bug; end with an error if one fails."""
    by_file: dict[Path, list[str]] = {}
    for test in dict.fromkeys(bug.seen_by for bug in bugs):
        by_file.setdefault(find_files(test)[0], []).append(test)
    results = pool.map(lambda tests: run_tests(copies, tests), by_file.values())
    for file, failed in zip(by_file, results, strict=True):
        if failed:
            sys.exit(f"{file.relative_to(ROOT)}: fails without any bug: {failed}")
        print(f"{file.relative_to(ROOT)}: passes without a bug", flush=True)


def plant(bug: Bug) -> tuple[Path, str]:
    """Return the file that has the bug's function, and its text with the bug in it.

    ValueError unless the folder has one such function, and the function such code once.
    """
    found = []
    for path in sorted((ROOT / "gptmini" / bug.folder).rglob("*.py")):
        for name, start, end in find_functions(path):
            if name == bug.function:
                found.append((path, start, end))
    if len(found) != 1:
        place = f"gptmini/{bug.folder}"
        raise ValueError(f"{place} has {len(found)} functions {bug.function}, not one")
    path, start, end = found[0]
    text = path.read_text()
    places = list(build_pattern(bug.code).finditer(text, start, end))
    if len(places) != 1:
        raise ValueError(f"{bug.function} has {bug.code!r} {len(places)} times, not once")
    return path, text[: places[0].start()] + bug.becomes + text[places[0].end() :]


@functools.cache
def find_functions(path: Path) -> list[tuple[str, int, int]]:
    """Find all functions and classes: their qualified names, and where their text begins and ends.

    A name is as in `Class.method` or `function.inner`.
    """
    text = path.read_text()
    line_starts = [0, *(end.end() for end in re.finditer("\n", text)), len(text)]
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert child.end_lineno is not None
                start = line_starts[child.lineno - 1]
                end = line_starts[child.end_lineno]
                found.append((prefix + child.name, start, end))
                inner = f"{prefix}{child.name}."
            visit(child, inner)

    visit(ast.parse(text), "")
    return found


def build_pattern(code: str) -> re.Pattern[str]:
    """Match code however its lines are broken: blanks and comments may stand between its words."""
    words = re.findall(r"\w+|[^\w\s]", code)
    whole = [rf"\b{word}\b" if re.match(r"\w", word) else re.escape(word) for word in words]
    return re.compile(r"(?:\s|#[^\n]*\n)*".join(whole))


@functools.cache
def find_files(test: str) -> list[Path]:
    """Find the files of the suite that have a test of this name."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in paths if test in [name for name, _, _ in find_functions(path)]]


def run_tests(copies: Path, tests: list[str], bug: Bug | None = None) -> str:
    """Run tests in a copy of the checkout until one fails; return its name, or nothing."""
    copy = Path(tempfile.mkdtemp(dir=copies))
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=skip)
        else:
            shutil.copy(source, copy / name)
    if bug is not None:
        path, changed = plant(bug)
        (copy / path.relative_to(ROOT)).write_text(changed)
    options = ["-n0", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["--hypothesis-profile=first failure"]  # one is enough, the smallest takes minutes
    addresses = [f"{find_files(test)[0].relative_to(ROOT)}::{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", *options, *addresses]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = str(Path(sys.executable).parent)  # a folder without a compiler
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test never ends"
    finally:
        shutil.rmtree(copy)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].split("::")[-1] if failed else done.stdout[-200:].strip()


if __name__ == "__main__":
    main()
