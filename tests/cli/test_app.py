import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.core

from gptmini import __version__, console
from gptmini.analysis.attention_maps import spell_token
from gptmini.cli import app, generate
from gptmini.config.load import iter_settings
from gptmini.config.settings import Config
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.analysis.test_page_data import data_of
from tests.support import SMALL


def test_train_then_generate(gptmini, text_file: Path):
    code, out, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 0, err
    assert out  # the sample
    assert "runs/text" in err
    assert re.search(r"(?s)step 4/4 100%  loss \d.*step 4/4 100%  val \d.*bits/byte", err)
    assert "\r" not in err  # no progress bar where nobody looks
    code, out, err = gptmini("generate", "--prompt", "The ", "--max-new-tokens", "5")
    assert code == 0, err
    assert out.startswith("The ")
    assert err == "runs/text, step 4\n"
    words = ["generate", "runs/text", "--prompt", "The ", "--max-new-tokens", "5"]
    assert gptmini(*words) == (0, out, "")
    greedy = ["generate", "--prompt", "a", "--temperature", "0", "--max-new-tokens", "40"]
    assert gptmini(*greedy)[1] == gptmini(*greedy, "--no-cache")[1]


@pytest.mark.parametrize("attention", ["mha", "gqa:2", "mqa"])
def test_the_attention_switch(gptmini, text_file: Path, attention: str):
    assert gptmini("train", "--data", str(text_file), "--attention", attention, *SMALL)[0] == 0
    run = f"runs/text-{attention.replace(':', '')}"
    assert gptmini("generate", run, "--prompt", "x", "--max-new-tokens", "3")[0] == 0
    config = Path(run, "config.yaml").read_text()
    assert f"variant: {attention[:3]}" in config


def test_a_run_needs_nothing_else(gptmini, text_file: Path, tmp_path: Path):
    assert (
        gptmini("train", "--data", str(text_file), "--set", "tokenizer.kind=char", *SMALL)[0] == 0
    )
    text_file.unlink()
    for file in (tmp_path / "cache").iterdir():
        if file.is_file():
            file.unlink()
    Path("runs/text").rename("elsewhere")
    assert gptmini("generate", "elsewhere", "--prompt", "the ")[0] == 0
    code, out, _ = gptmini("generate", "elsewhere", "--prompt", "é")  # unseen in training
    assert (code, out[0]) == (0, "é")


ERRORS = [
    (["train", "nothere"], 2, "nothere: no such configuration"),
    (["train", "nothere.yaml"], 2, "nothere.yaml: no such file"),
    (
        ["train", "--set", "train.stepz=3"],
        2,
        "train.stepz: no such setting; did you mean train.steps?",
    ),
    (["train", "--set", "train.lr"], 2, "not an assignment; write --set train.lr=VALUE"),
    (["train", "--set", "foo.bar=1"], 2, "--set foo.bar: no such section; choose one of model, "),
    (["train", "--set", "train.n_embd=3"], 2, "did you mean model.d_model?"),
    (["train", "--attention", "gqa:3"], 2, "gqa:3: 4 heads (n_head) cannot share 3 KV heads; use"),
    (["train", "--attention", "gqa:x"], 2, "write gqa:2"),
    (["train", "--attention", "gqa"], 2, "write gqa:2"),
    (["train", "--attention", "window"], 2, "write window:64"),
    (["train", "--attention", "foo"], 2, "must be mha, mqa, gqa:N or window:N"),
    (["train", "--attention", "mqa:4"], 2, "variant mqa has 1 KV head, not 4"),
    (["train", "--steps", "0"], 2, "--steps: must be at least 1, not 0"),
    (["train", "--data", "none.txt"], 3, "none.txt: no such file"),
    (["train", "--errors", "skip"], 2, "--errors: must be strict or replace, not 'skip'"),
    (["train", "--set", "data.weights=[1,2]"], 2, "data.weights: 2 weights for 1 paths"),
    (
        ["train", "--set", "tokenizer.vocab_size=999"],
        2,
        "tokenizer.vocab_size: only kind bpe has a choice",
    ),
    (["train", "--data", "builtin:x"], 3, "choose builtin:python-docs"),
    (["train", "--set", "tokenizer.kind=x"], 3, "choose one of auto, byte, char"),
    (["train", "--set", "model.vocab_size=9"], 2, "model.vocab_size: 9"),
    (["train", "--cache", "/dev/null/x"], 5, "--cache"),
    (["train", "--foo"], 2, "no such option: --foo"),
    (["train", "--lr", "1"], 2, "use --set train.lr=VALUE, or see gptmini train --help"),
    (["train", "--step", "1"], 2, "did you mean --steps? see gptmini train --help"),
    (["train", "--epochs", "3"], 2, "use --steps or --minutes, or see gptmini train --help"),
    (["train", "--resume"], 2, "name the run: gptmini train RUN, or see gptmini train --help"),
    (["train", "--finetune", "runs/a"], 2, "use --from RUN, or see gptmini train --help"),
    (["train", "--steps", "x"], 2, "--steps: expected a whole number, not 'x'; see gptmini train"),
    (["generate", "--samples=0"], 2, "--samples: must be at least 1, not 0; see gptmini generate"),
    (["train", "--attention", "window:0"], 2, "--attention window:0: must be at least 1, not 0"),
    (["train", "--data", "a.txt", "b.txt", "c.txt"], 2, "repeat --data before each text, or quote"),
    (["generate", "--prompt", "It", "was", "so"], 2, "put the text after --prompt"),
    (["settings", "foo"], 2, "foo: no such setting; gptmini settings lists all"),
    (["train", "--steps"], 2, "--steps: needs a value; see gptmini train --help"),
    (["train", "a", "b"], 2, "unexpected arguments: b; see gptmini train --help"),
    (["trian"], 2, "did you mean 'train'? see gptmini --help"),
    (["tokenizer", "tran"], 2, "did you mean 'train'? see gptmini tokenizer --help"),
    (["generate"], 4, "runs: no run here"),
    (["generate", "nothere"], 4, "nothere: no run here"),
]


@pytest.mark.parametrize(("words", "code", "line"), ERRORS)
def test_errors_are_one_line_with_a_remedy(gptmini, words, code, line):
    found, out, err = gptmini(*words)
    assert (found, out) == (code, "")
    assert line in err
    *progress, failure = err.splitlines()  # a slow machine shows how it reads the text
    assert all(line.startswith(("learning the vocabulary", "preparing")) for line in progress)
    assert failure.startswith("gptmini: ")
    assert "; " in failure or "must be" in failure or "did you mean" in failure
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_a_text_may_stand_in_the_place_of_a_configuration(gptmini, text_file: Path):
    assert gptmini("train", "text.txt", *SMALL)[0] == 0
    assert gptmini("train", "--data", "text.txt", "--out", "other", *SMALL)[0] == 0
    names = ("config.yaml", "checkpoints/step-00000004/model.safetensors")
    for name in names:
        assert Path("runs/text", name).read_bytes() == Path("other", name).read_bytes()
    code, _, err = gptmini("train", "--data", "text.txt", "text.txt")
    assert (code, "repeat --data before each text, or quote a pattern" in err) == (2, True)


def test_the_name_of_a_run_resumes_it(gptmini, text_file: Path):
    words = ["train", "text.txt", *SMALL, "--set", "train.patience=null"]
    assert gptmini(*words, "--steps", "8", "--set", "train.warmup_steps=1")[0] == 0
    assert gptmini(*words, "--set", "train.warmup_steps=1", "--out", "mine")[0] == 0
    for name in ("mine", "mine/config.yaml"):
        code, _, err = gptmini("train", name, "--steps", "8")
        assert code == 0, err
        assert sorted(path.name for path in Path("runs").iterdir()) == ["text"]
        for file in ("config.yaml", "tokenizer.json"):
            assert Path("runs/text", file).read_bytes() == Path("mine", file).read_bytes()
        assert Path("mine/checkpoints/step-00000008").is_dir()


def test_a_wrong_run_or_text_is_named_without_torch(tmp_path: Path):
    Path(tmp_path, "run").mkdir()
    Path(tmp_path, "run/config.yaml").touch()
    for words in (
        "generate nothere",
        "evaluate nothere",
        "evaluate run --data nothere.txt",
        "train nothere.txt --data nothere.txt",
    ):
        check = (
            f"import sys; sys.argv = {['gptmini', *words.split()]}\n"
            "from gptmini.cli.app import main\n"
            "try: main()\n"
            "finally: assert 'torch' not in sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", check], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode > 1, done.stderr
        assert "Traceback" not in done.stderr


def test_a_run_is_suggested_for_a_name_that_is_nearly_its(gptmini):
    Path("runs/my").mkdir(parents=True)
    Path("runs/my/config.yaml").touch()
    for name in ("my", "runs/myy"):
        code, _, err = gptmini("generate", name)
        assert (code, f"{name}: no run here; did you mean runs/my?" in err) == (4, True)


def test_a_mistyped_run_or_configuration_is_answered_with_the_nearest(gptmini):
    for name in ("mine", "gpt2-mine"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").touch()
    for name, meant in [
        ("runs/mien", "runs/mine?"),
        ("mien", "runs/mine?"),
        ("gpt2-124", "gpt2-124m?"),
        ("nothing-like-it", "choose one of "),
    ]:
        code, _, err = gptmini("train", name)
        assert (code, f"{name}: no " in err, meant in err) == (2, True, True), err


def test_other_settings_are_refused_before_the_text_is_prepared(
    gptmini, text_file: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ["train", "--data", str(text_file), *SMALL]
    code, _, err = gptmini(*words)
    assert (code, "sample from the best checkpoint" in err) == (0, True)
    assert "0:00" not in next(line for line in err.splitlines() if line.startswith("  run "))
    code, _, err = gptmini(*words)
    assert (code, "already finished" in err) == (0, True)
    assert "sample from" not in err
    monkeypatch.setattr("gptmini.plan.decide.prepare_corpus", lambda *_: pytest.fail("prepared"))
    code, _, err = gptmini(*words, "--set", "train.lr=1e-4", "--set", "model.n_layer=2")
    assert code == 2
    assert "model.n_layer: 1 in runs/text, now 2" in err
    assert "train.lr: 0.002 in runs/text, now 0.0001" in err


def test_a_missing_tracker_is_named_before_the_text_is_prepared(
    gptmini, text_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["train", "--data", str(text_file), *SMALL, "--set", "train.log_to=wandb"]
    code, _, err = gptmini(*words)
    assert code == 5
    assert err == (
        "gptmini: train.log_to: wandb is not installed; run pip install wandb, or remove it from "
        "train.log_to\n"
    )


def test_threads_are_set_before_torch_is_loaded(tmp_path: Path):
    check = (
        "import os, sys\n"
        "from gptmini.cli.app import main\n"
        "try: main()\n"
        "finally: print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    for words in ("train nothere", "generate nothere", "evaluate nothere"):
        command = [sys.executable, "-c", check, *words.split(), "--threads", "3"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.stdout == "3 False\n", done.stderr


def test_threads_wait_asleep_unless_the_user_says_how(tmp_path: Path):
    check = (
        "import os\n"
        "from gptmini.cli.app import main\n"
        "try: main()\n"
        "finally: print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_WAIT", "GOMP"))}
    for given, expected in [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", check, "--version"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=plain | given,
        )
        assert done.stdout.splitlines()[-1] == expected, done.stderr


def test_out_must_not_be_a_file(gptmini, text_file: Path):
    code, _, err = gptmini("train", "--data", "text.txt", "--out", "text.txt")
    assert (code, "--out text.txt: a file, not a directory" in err) == (2, True)


def test_help_is_a_command_too(gptmini):
    assert gptmini("help") == gptmini("--help") == gptmini("-help")
    assert gptmini("help", "data", "fetch") == gptmini("data", "fetch", "--help")


def test_settings_lists_every_key_with_its_choices_default_and_meaning(gptmini):
    code, out, _ = gptmini("settings")
    assert code == 0
    for key, _ in iter_settings(Config().model_dump()):
        assert re.search(rf"^{key.replace('.', '[.]')}: .+ \(default: .+\)\n    \w", out, re.M), key
    assert "model.norm: layernorm, rmsnorm (default: layernorm)" in out
    one = gptmini("settings", "train.lr")
    assert one[1].startswith("train.lr: number (default: 0.002)\n    Peak learning rate")
    assert gptmini("settings", "lr") == gptmini("settings", "learning_rate") == one
    keys = [line for line in gptmini("settings", "data")[1].splitlines() if line[0] != " "]
    assert all(line.startswith("data.") for line in keys)
    assert len(keys) > 5


def test_a_run_resumes_with_other_sampling_settings(gptmini, text_file: Path):
    words = ["train", "--data", str(text_file), *SMALL]
    assert gptmini(*words)[0] == 0
    code, _, err = gptmini(*words, "--set", "sample.bias={e: -2}", "--set", "sample.stop=[x]")
    assert code == 0, err
    other = [*words, "--out", "other", "--set", "sample.bias={e: -2}"]
    assert gptmini(*other)[0] == 0
    assert gptmini(*words, "--out", "other")[0] == 0


def test_wrong_settings_when_generating(gptmini, text_file: Path):
    assert gptmini("train", "--data", str(text_file), *SMALL)[0] == 0
    for words, line in [
        (["--temperature", "-1"], "--temperature: must be at least 0, not -1"),
        (["--temperature", "nan"], "--temperature: must be a finite number"),
        (["--top-k", "0"], "--top-k: "),
        (["--top-p", "1.5"], "--top-p: "),
        (["--max-new-tokens", "-1"], "--max-new-tokens: "),
        (["--seed", "-1"], "--seed: "),
        (["--min-p", "1"], "--min-p: "),
        (["--set", "sample.repetition_penalty=0"], "sample.repetition_penalty"),
        (["--stop", ""], "--stop"),
        (["--set", "sample.bias=e"], "--set sample.bias: "),
        (["--set", "sample.bias={e: nan}"], "sample.bias.e: expected a number"),
        (["--set", "sample.ban=[é]"], "sample.ban: 'é' is not one token"),
        (["--samples", "0"], "--samples: must be at least 1"),
        (["--weights", "int4"], "--weights int4: not supported"),
        (["--prompt-file", "x"], "--prompt: cannot be combined with --prompt-file"),
        (["-i"], "--prompt: cannot be combined with --interactive"),
        (["--device", "mps"], "device mps: unknown; use auto, cpu or cuda"),
        (["--set", "sample.overflow=error", "--max-new-tokens", "99"], "do not fit the context of"),
    ]:
        code, out, err = gptmini("generate", "runs/text", "--prompt", "The ", *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert line in err


def test_inspect_prints_numbers_with_or_without_a_picture(gptmini, text_file: Path, monkeypatch):
    assert gptmini("train", "--data", str(text_file), "--attention", "gqa:2", *SMALL)[0] == 0
    code, out, err = gptmini("inspect", "--prompt", "the fox")
    assert (code, err) == (0, "runs/text-gqa2: step 4\n")
    assert [line.split()[:3] for line in out.splitlines()[1:5]] == [
        ["0", "0", "0"],
        ["0", "1", "0"],
        ["0", "2", "1"],
        ["0", "3", "1"],
    ]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, picture_out, err = gptmini("inspect", "--prompt", "the fox", "--out", "a.png")
    assert (code, picture_out) == (5, out)
    assert "pip install matplotlib" in err
    for words, line in [
        ([], "--prompt: missing"),
        (["--prompt", "x" * 99], "--prompt: 99 tokens; give between 1 and 16"),
        (["--prompt", "x", "--layer", "1"], "--layer 1: this model has layers 0 to 0"),
        (["--prompt", "x", "--head", "-1"], "--head -1: this model has heads 0 to 3"),
        (["--mask", "window:0"], "--mask window:0: unknown mask"),
        (["--mask", "causal", "--prompt", "x"], "--prompt: does not work with --mask"),
        (["runs/text-gqa2", "--mask", "causal"], "RUN: does not work with --mask"),
        (["--prompt", "x", "--size", "9"], "--size: works only with --mask"),
        (["--mask", "causal", "--out", "a.txt"], "ends in .png"),
        (["--prompt", "x" * 99, "--out", "a.txt"], "ends in .png"),  # before the work
        (["--prompt", "x" * 99, "--out", "a.html"], "--prompt: 99 tokens; give between 1 and 16"),
        (["--mask", "causal", "--out", "a.html"], "ends in .png, .pdf, .svg\n"),
        (["--mask", "causal", "--generate", "3"], "--generate: does not work with --mask"),
        (
            ["--prompt", "x", "--generate", "3", "--out", "a.png"],
            "works only with a page; add --out",
        ),
        (["--prompt", "x", "--generate", "16", "--out", "a.html"], "generate at most 15"),
    ]:
        code, _, err = gptmini("inspect", *words)
        assert (code, err.count("\n")) == (2, 1)
        assert line in err
    assert gptmini("inspect", "--mask", "window:2")[1].startswith("x . .")
    assert gptmini("inspect", "--mask", "causal", "--size", "24")[1].count("\n") == 24 + 2


def test_inspect_writes_a_page_of_prompt_and_continuation(gptmini, text_file: Path):
    assert gptmini("train", "--data", str(text_file), *SMALL)[0] == 0
    words = ["inspect", "--prompt", "the <b>", "--out", "a.html"]
    code, _, err = gptmini(*words, "--generate", "5", "--layer", "0", "--head", "2")
    assert (code, err) == (0, "runs/text: step 4\na.html: written\n")
    data = data_of(Path("a.html").read_bytes())
    assert data["title"] == "runs/text"
    assert data["lead"].endswith("It reads 12 tokens, the last 5 of which it generated itself.")
    (part,) = data["parts"]
    assert part["start"] == [0, 2]
    drawn = gptmini(
        *("generate", "--prompt", "the <b>", "--max-new-tokens", "5"),
        *("--weights", "float32", "--json"),
    )[1]
    tokens = [*b"the <b>", *json.loads(drawn)["samples"][0]["tokens"]]
    spelled = [part["spellings"][n] for n in part["tokens"]]
    assert spelled == [spell_token(ByteTokenizer(), token) for token in tokens]
    assert gptmini(*words)[0] == 0
    assert data_of(Path("a.html").read_bytes())["parts"][0]["drawn"] == 0


def test_an_internal_error_is_one_line_and_a_traceback_only_with_debug(gptmini, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(generate, "resolve_run", broken)
    code, _, err = gptmini("generate")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("gptmini: internal error: ZeroDivisionError()")
    assert "--debug" in err
    for words in (["--debug", "generate"], ["generate", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["gptmini", *words])
        with pytest.raises(ZeroDivisionError):
            app.main()


def test_control_characters_are_shown_not_obeyed():
    assert (
        console.escape_control_characters("a\x1b[31mé\n\t\x07東\x9b")
        == "a\\x1b[31mé\n\t\\x07東\\x9b"
    )
    ordinary = "\u3000l\u00a0homme\u202f! \u200d"
    assert console.escape_control_characters(ordinary + "\r\n") == ordinary + "\n"


def test_help_answers_without_torch():
    check = (
        "import sys; sys.argv = ['gptmini', '--help']\n"
        "from gptmini.cli.app import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'pydantic', 'tiktoken'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "generate" in done.stdout


def test_the_version(gptmini):
    assert gptmini("--version") == (0, f"gptmini {__version__}\n", "")


def test_help_lists_train_and_generate_first(gptmini):
    commands = re.findall(r"^  ([a-z]+)  ", gptmini("--help")[1].partition("Commands:")[2], re.M)
    assert commands[:2] == ["train", "generate"]
    described = " ".join(gptmini("train", "--help")[1].split())
    assert f"for {Config().train.steps} steps" in described
    assert sorted(commands[2:10]) == sorted(
        ["serve", "score", "evaluate", "inspect", "compare", "size", "convert", "plot"]
    )
    assert commands[10:] == ["export", "import", "settings", "data", "tokenizer"]


def test_help_at_80_columns_is_whole_and_in_users_words(gptmini, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def check(group: typer.core.TyperGroup, *words: str) -> None:
        for name, command in group.commands.items():
            text = gptmini(*words, name, "--help")[1]
            assert text.startswith(f"Usage: gptmini {' '.join([*words, name])} ")
            assert max(map(len, text.splitlines())) <= 80
            assert not re.search(r"<(int|float|str|path|list|file)|<=x|x>=|default: \(", text), text
            assert "{" not in text.splitlines()[0]
            assert not re.search(r"\.\.\.$", text.partition("Commands:")[2], re.M), text
            if isinstance(command, typer.core.TyperGroup):
                check(command, *words, name)

    check(typer.main.get_command(app.app))


def test_a_closed_pipe_is_not_an_error(gptmini, text_file: Path, tmp_path: Path):
    assert gptmini("train", "--data", str(text_file), *SMALL)[0] == 0
    command = f"'{sys.executable}' -m gptmini generate runs/text --max-new-tokens 4000 | head -c 5"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout) == 5


def test_a_closed_output_is_not_an_error(gptmini, text_file: Path):
    assert gptmini("train", "--data", str(text_file), *SMALL)[0] == 0
    command = f"'{sys.executable}' -m gptmini generate runs/text --prompt The"
    expected = gptmini("generate", "--prompt", "The")[1]
    for closed, out in (("2>&-", expected), (">&-", ""), (">&- 2>&-", "")):
        done = subprocess.run(
            ["bash", "-c", f"{command} {closed}"], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, out, ""), closed


def test_a_killed_run_resumes_to_the_same_weights(gptmini, text_file: Path, tmp_path: Path):
    """A real process, killed by -9 after its first checkpoint, ends like an undisturbed one."""
    words = [
        "train",
        "--data",
        str(text_file),
        *SMALL,
        "--steps",
        "300",
        "--set",
        "train.save_every=20",
        "--set",
        "train.patience=null",
        "--out",
    ]
    assert gptmini(*words, "whole")[0] == 0
    environment = os.environ | {"GPTMINI_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "gptmini", *words, "killed"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
    )
    while process.poll() is None and not list(
        Path("killed/checkpoints").glob("step-*/manifest.json")
    ):
        pass
    process.kill()
    assert process.wait() != 0
    assert gptmini(*words, "killed")[0] == 0
    name = "checkpoints/step-00000300/model.safetensors"
    assert Path("whole", name).read_bytes() == Path("killed", name).read_bytes()


@pytest.mark.slow
def test_a_real_training_learns(gptmini):
    """The documentation of Python, by characters; 3.25 nats is guessing by frequency alone."""
    words = ["train", "shakespeare-char-small", "--data", "builtin:python-docs", "--steps", "150"]
    assert gptmini(*words)[0] == 0
    best = json.loads(Path("runs/shakespeare-char-small/best.json").read_text())
    assert best["val_loss"] < 1.6
