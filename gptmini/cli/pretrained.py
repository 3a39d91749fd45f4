"""A run by the name of a pretrained model: imported into runs/ once, and used from there on."""

import difflib
import os
from pathlib import Path

from gptmini.cli.options import PRETRAINED_NAME, RUNS_FOLDER, is_run, resolve_run
from gptmini.console import say
from gptmini.errors import CheckpointError

GPT2_OWNER = "openai-community"  # of gpt2, gpt2-medium, gpt2-large and gpt2-xl


def open_run(run: Path | None, text: str = "", file: str = "") -> Path:
    """Return a run as `resolve_run` does, or that of a pretrained model, which may be imported."""
    return fetch_run(*locate_run(run), text, file)


def fetch_run(path: Path | None, source: str | None, text: str = "", file: str = "") -> Path:
    """Return the run that `locate_run` located, after importing it if that is needed."""
    if path is None or source is None:
        return resolve_run(path, text, file)
    import_once(path, source)
    return path


def locate_run(run: Path | None) -> tuple[Path | None, str | None]:
    """Return where a run is, or will be after the import of the source that comes with it.

    Without a source, `run` names no pretrained model.
    """
    if run is None or is_run(run) or not _is_pretrained(run):
        return run, None
    from gptmini.extras.interop.import_model import choose_run_name, parse_source

    source = str(run)
    if not os.path.exists(run) and "/" not in source:
        source = f"{GPT2_OWNER}/{source.removeprefix('hf:')}"
    name = choose_run_name(parse_source(source))
    path = RUNS_FOLDER / name
    if path.exists() and not is_run(path):  # the folder itself, such as an export
        path = RUNS_FOLDER / f"{name}-imported"
    return path, source


def _is_pretrained(run: Path) -> bool:
    """Check whether this is a model of others: a folder, a GGUF file or a name on the Hub."""
    if os.path.exists(run):
        # The import says what to do with checkpoints of nanoGPT (.pt) and litgpt (.pth).
        is_file = run.suffix.lower() in (".gguf", ".pt", ".pth")
        return is_file or os.path.isfile(run / "config.json") or any(run.glob("*.pt*"))
    is_misspelled = difflib.get_close_matches(run.parts[0], [RUNS_FOLDER.name], 1)
    return PRETRAINED_NAME.fullmatch(str(run)) is not None and not is_misspelled


def import_once(path: Path, source: str) -> None:
    """Import a pretrained model as the run `path`, unless it is there.

    Raises CheckpointError for a run that is another model's, and what an import raises.
    """
    from gptmini.extras.interop.import_model import parse_source, write_imported_run
    from gptmini.runs.directory import RunDirectory

    parsed = parse_source(source)
    if is_run(path):
        found = RunDirectory(path).read_newest_state().get("source", "")
        wanted = str(parsed.resolve() if isinstance(parsed, Path) else parsed)
        if found != wanted and not found.startswith(f"{wanted}@"):
            raise CheckpointError(
                f"{path}: another run, not {source}; choose a name: gptmini import {source} "
                f"--out DIR"
            )
        say(f"{source}: imported before, as {path}")
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise CheckpointError(f"{source}: no run yet; before torchrun: gptmini import {source}")
    say(f"{source}: importing it as {path}")
    write_imported_run(parsed, path, None)
