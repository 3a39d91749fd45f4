"""Every gptmini command of the READMEs and docs/ runs, on small models; what they name exists."""

import gzip
import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gptmini.config import load
from gptmini.data import fetch
from gptmini.data.hub_dataset import parse_dataset_name
from gptmini.extras.interop.export import export_run
from gptmini.extras.serve import server
from tests.local_hub import LocalHub
from tests.samples import CHAT_TOKENIZER, run_of
from tests.support import needs_posix, run_command

ROOT = Path(__file__).parents[2]
READMES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - set((ROOT / "docs").glob("*.zh.md"))),
    *(ROOT / folder / "README.md" for folder in ("configs", "data", "scripts", "tests")),
    ROOT / "scripts" / "RESULTS.md",
]
# Their commands are those of the English pages.
TRANSLATIONS = [*ROOT.glob("*.zh.md"), *sorted((ROOT / "docs").glob("*.zh.md"))]
SMALL = [
    "model.n_layer=2",
    "model.d_model=32",
    "model.context_length=32",
    "train.steps=2",
    "train.batch_size=4",
    "train.lr=1e-3",
    "sample.max_new_tokens=8",
]
SMALL_WORDS = [word for setting in SMALL for word in ("--set", setting)]
TEXT = "".join(
    f"{n}. It was the best of times, it was the worst of times. ROMEO:\n" for n in range(99)
)
SPLITS = ("train", "validation")  # of a dataset on the Hub
FILE_OPTIONS = ("--data", "--prompt-file", "--file")


def blocks(language: str, readme: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", readme.read_text(), re.DOTALL)


def gptmini_commands(readme: Path) -> list[list[str]]:
    """The words of each command, the parts of pipes and lists apart."""
    commands: list[list[str]] = [[]]
    for line in "\n".join(blocks("sh", readme)).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                commands.append([])
            else:
                commands[-1].append(word)
    return [words for words in commands if words[:1] == ["gptmini"]]


def files_of(words: list[str]) -> Iterator[str]:
    """The texts that a command reads."""
    pairs = list(pairwise(words))
    yield from (word for option, word in pairs if option in FILE_OPTIONS)
    for option, word in pairs:
        if option == "--set" and word.startswith(("data.path=", "data.validation_path=")):
            yield word.partition("=")[2]
    if words[1:3] == ["tokenizer", "train"]:
        yield words[3]


def publish(words: list[str], hub: LocalHub, folder: Path) -> None:
    """Put the models and datasets that a command names on the Hub."""
    for name in files_of(words):
        if name.startswith("hf:"):
            dataset = parse_dataset_name(name)
            place = (dataset.path or "data").partition("/")[0]
            files = {f"{place}/{split}-0000.parquet": parquet() for split in SPLITS}
            hub.add(dataset.name, files, "dataset")
    if words[1] == "import" and not words[2].startswith("runs/"):
        if not (folder / "published").exists():
            sizes = {"n_layer": 2, "context_length": 32}  # those of SMALL, for fine-tuning
            run_of(folder / "small", activation="swiglu", norm="rmsnorm", **sizes)
            export_run(folder / "small", folder / "published")
        files = {path.name: path.read_bytes() for path in (folder / "published").iterdir()}
        hub.add(words[2], files)


def parquet() -> bytes:
    arrow = pytest.importorskip("pyarrow", reason="needs the extra data")
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(arrow.table({"text": [TEXT]}), buffer)
    return buffer.getvalue()


def provide(name: str, folder: Path) -> None:
    """Make a text of that name, unless it is there or needs no file."""
    if name.startswith("hf:"):
        return
    path = folder / re.sub(r"\*+", "a", name)
    if name == "-" or name.startswith("builtin:") or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = TEXT.replace("\n", "<|endoftext|>") if "stories" in name else TEXT
    if ".json" in name:
        content = json.dumps(dict.fromkeys(("text", "story", "body"), TEXT))
    if not path.suffix:
        path.mkdir()
        (path / "b.txt").write_text(TEXT)
        path /= "a.txt"
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    elif name.endswith(".zst"):
        pyarrow = pytest.importorskip("pyarrow")
        path.write_bytes(pyarrow.compress(content.encode(), "zstd", asbytes=True))
    else:
        path.write_text(content)


def made_small(words: list[str]) -> list[str]:
    """A command with settings that make it take about a second."""
    if any(word.endswith("config.yaml") for word in words):  # a run, which is small already
        return words
    less = {"--seeds": "1", "--minutes": "0.02", "--steps": "2", "--ranks": "4"}
    words = [less.get(option, word) for option, word in pairwise(["", *words])]
    words = [word.replace("mha,gqa:2,mqa,window:64", "mha,gqa:2") for word in words]
    if words[1] in ("train", "size") or (words[1] == "compare" and "runs/" not in words[2]):
        words = [*words, *SMALL_WORDS]
    if "--minutes" in words:  # which would choose one head for so small a width
        words = [*words, "--set", "model.n_head=4"]
    short = ["--max-new-tokens", "3"]
    extra = {"generate": short, "chat": short, "serve": ["--port", "0"]}
    return words + extra.get(words[1], [])


def runs_of(words: list[str]) -> Iterator[str]:
    """The runs that a command reads; `--out` names one that it writes."""
    for option, word in pairwise(words):
        if word.startswith("runs/") and option != "--out":
            yield word.removesuffix("/config.yaml")


def train_missing_runs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the runs that a page takes from another page; exports and comparisons are its own."""
    for name in runs_of(words):
        if words[1] == "chat":
            run_of(Path(name), CHAT_TOKENIZER)
        elif not Path(name).exists():
            provide("my.txt", Path())
            command = ["gptmini", "train", "my.txt", "--out", name, *SMALL_WORDS]
            assert run_command(command, monkeypatch) == 0


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_runs(
    readme: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    local_hub: LocalHub,
):
    """Each page in a folder of its own, with the texts, runs and models that it names."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("builtins.input", lambda _: sys.exit())  # somebody who types nothing
    monkeypatch.setattr(server, "serve", lambda _, listening: listening.close())
    monkeypatch.setattr(fetch, "fetch", lambda name, folder: folder / f"{name}.txt")
    (tmp_path / "stdin.txt").write_text(TEXT)
    provide("data/tinyshakespeare.txt", folder)
    for words in gptmini_commands(readme):
        for name in files_of(words):
            provide(name, folder)
        publish(words, local_hub, tmp_path)
        train_missing_runs(words, monkeypatch)
        with (tmp_path / "stdin.txt").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code = run_command(made_small(words), monkeypatch)
        assert not code, f"{shlex.join(words)}\n{capfd.readouterr().err}"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    (example,) = blocks("python", READMES[0])
    text, few = '{"path": "my.txt"}', '{"path": "my.txt"}, "train": {"steps": 2}'
    assert text in example
    example = example.replace(text, few)
    monkeypatch.chdir(tmp_path)
    assert run_command(["gptmini", "train", *SMALL_WORDS], monkeypatch) == 0
    provide("my.txt", tmp_path)
    capfd.readouterr()
    exec(example, {})
    assert capfd.readouterr().out.strip()


def test_the_client_of_the_serving_page_gets_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = ROOT / "docs" / "serving.md"
    (example,) = blocks("python", page)
    curl = next(block for block in blocks("bash", page) if block.startswith("curl "))
    monkeypatch.chdir(tmp_path)
    provide("my.txt", tmp_path)
    assert run_command(["gptmini", "train", "my.txt", *SMALL_WORDS], monkeypatch) == 0
    command = [sys.executable, "-m", "gptmini", "serve", "runs/my", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()  # "runs/my, step 2: http://...; the API is ..."
            url = re.search(r"http://[\d.:]+", line)
            assert url, line
            client = example.replace("http://127.0.0.1:8000", url[0])
            texts = subprocess.run([sys.executable, "-c", client], capture_output=True, check=True)
            if shutil.which("curl"):
                words = shlex.split(curl.replace("http://127.0.0.1:8000", url[0]))
                answer = subprocess.run(words, capture_output=True, check=True).stdout
                assert json.loads(answer)["choices"][0]["text"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=600)
    assert texts.stdout.strip()


def test_no_configuration_has_the_name_of_a_text():
    """Both would name a run in runs/, and the second one would be refused."""
    pages = "".join(page.read_text() for page in READMES)
    configurations = set(re.findall(r"\btrain,? ([\w-]+)\.ya?ml", pages))
    texts = set(re.findall(r"--data ([\w-]+)\.", pages))
    assert "first" in configurations
    assert "my" in texts
    assert not configurations & texts


@needs_posix
@pytest.mark.parametrize(("code", "requeued"), [(0, False), (143, True), (2, False), (137, False)])
def test_the_slurm_script_queues_a_job_again_only_if_it_was_stopped(tmp_path, code, requeued):
    """With stand-ins for Slurm's commands; one task of four ends with the code."""
    (script,) = [
        block
        for block in blocks("bash", ROOT / "docs" / "several-processes.md")
        if "#SBATCH" in block
    ]
    commands = {
        "scontrol": 'echo "$*" >> log; [[ $1 == requeue ]] || echo machine-1',
        "srun": """highest=0
            for SLURM_PROCID in 0 1 2 3; do
                export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID SLURM_NTASKS=4
                "$@"
                code=$?
                if (( code > highest )); then highest=$code; fi
            done
            exit "$highest\"""",
        "gptmini": 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK $MASTER_ADDR:$MASTER_PORT $*" >> ranks; '
        f"if [[ $RANK == 2 ]]; then exit {code}; fi",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    variables["SLURM_JOB_NODELIST"] = "machine-[1-4]"
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=variables, check=False)
    assert ended.returncode == code
    ranks = (tmp_path / "ranks").read_text().splitlines()
    assert ranks == [
        f"{rank}/4 {rank} machine-1:29500 train first.yaml --out /shared/runs/first"
        for rank in range(4)
    ]
    assert ("requeue 7" in (tmp_path / "log").read_text()) == requeued


def test_every_yaml_example_is_a_configuration(tmp_path: Path):
    for readme in READMES:
        for example in blocks("yaml", readme):
            (tmp_path / "example.yaml").write_text(example)
            load.load_config(tmp_path / "example.yaml", [])


def test_code_that_the_page_on_extending_quotes_is_in_the_files_it_names():
    page = (ROOT / "docs" / "extending.md").read_text()
    quotes = list(re.finditer(r"```(?:python|cpp)\n(.*?)```", page, re.DOTALL))
    assert quotes
    for quote in quotes:
        file = re.findall(r"`((?:gptmini|tests)/[\w/.]+)`", page[: quote.start()])[-1]
        source = (ROOT / file).read_text()
        for part in quote[1].split("    ...\n"):
            assert part in source, f"{file} has changed: {part}"


def test_every_script_that_is_named_exists():
    texts = "".join(path.read_text() for path in READMES)
    named = set(re.findall(r"python ((?:scripts|tests)/[\w/]+\.py)", texts))
    assert named
    assert all((ROOT / name).is_file() for name in named)
    for script in (ROOT / "scripts").rglob("*.py"):
        is_package = (script.parent / "__init__.py").exists()
        named_path = script.parent if is_package else script
        name = str(named_path.relative_to(ROOT / "scripts"))
        assert name in texts, f"{name} is in no README"


@pytest.mark.parametrize(
    "readme", READMES + TRANSLATIONS, ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_and_pictures_exist(readme: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", readme.read_text()):
        if not target.startswith(("http://", "https://")):
            path, _, heading = target.partition("#")
            file = readme.parent / path if path else readme
            assert file.exists(), target
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if heading else []
            anchors = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings]
            assert not heading or heading in anchors, target


def test_the_readme_begins_with_a_picture():
    lines = (ROOT / "README.md").read_text().splitlines()
    first_picture = next(number for number, line in enumerate(lines) if line.startswith("!["))
    assert first_picture < 20


def test_questions_that_the_code_cites_stand_in_the_log():
    log = (ROOT / "scripts" / "LOG.md").read_text()
    cited = []
    for file in (ROOT / "gptmini").rglob("*.py"):
        words = re.sub(r"\s+(# )?", " ", file.read_text())
        cited += re.findall(r"scripts/LOG\.md: ([^?]+\?)", words)
    assert len(cited) > 20
    assert [question for question in cited if f"### {question}\n" not in log] == []
