"""`gptmini train`: runs, resumed runs, texts from anywhere; what is refused, and when."""

import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from gptmini import load
from gptmini.cli import app
from gptmini.cli.options import choose_out
from gptmini.errors import ConfigError
from gptmini.train import loop
from gptmini.train.api import fit
from tests.support import SMALL, WORDS


def test_train_then_generate(gptmini, text_file: Path):
    code, out, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 0, err
    best = json.loads(Path("runs/text/best.json").read_text())["step"]
    lines = map(json.loads, Path("runs/text/metrics.jsonl").read_text().splitlines())
    assert [out] == [f"{line['sample']}\n" for line in lines if line["step"] == best]
    assert "runs/text" in err
    assert re.search(r"(?s)step 4/4 100%  loss \d.*step 4/4 100%  val \d.*bits per byte\n", err)
    assert err.count("bits per byte, lower is better\n") == 1  # the first time
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


def test_a_text_may_stand_in_the_place_of_a_configuration(gptmini, text_file: Path):
    assert gptmini("train", "text.txt", *SMALL)[0] == 0
    assert gptmini("train", "--data", "text.txt", "--out", "other", *SMALL)[0] == 0
    names = ("config.yaml", "checkpoints/step-00000004/model.safetensors")
    for name in names:
        assert Path("runs/text", name).read_bytes() == Path("other", name).read_bytes()
    code, _, err = gptmini("train", "--data", "text.txt", "text.txt")
    assert (code, "repeat --data before each text, or quote a pattern" in err) == (2, True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("My Novel (drafts)", "my-novel-drafts"),
        ("/a/b--c/*.txt", "b-c"),
        ("hf:A/Stories@main/x*", "stories"),
        ("《红楼梦》.txt", "红楼梦"),
        ("-", "text"),
    ],
)
def test_a_run_has_a_name_that_no_shell_needs_quoted(text, name):
    assert choose_out(None, text) == Path("runs", name)


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


def test_no_run_is_begun_among_other_files(gptmini, text_file: Path):
    Path("exp").mkdir()
    Path("exp/config.yaml").write_text("train:\n  steps: 2\n")
    code, _, err = gptmini("train", "exp/config.yaml", "--data", "text.txt", "--out", "exp")
    assert (code, "exp: not empty, and no run; choose another" in err) == (2, True)
    assert gptmini("train", "exp/config.yaml", "--data", "text.txt", *SMALL)[0] == 0

    Path("model").mkdir()
    for name in ("config.json", "tokenizer.json", "lock"):
        Path("model", name).write_text(f"{name}, of another program")
    for words in (["train", "text.txt"], ["train", "--from", "runs/config", "--data", "text.txt"]):
        code, _, err = gptmini(*words, "--out", "model")
        assert (code, "model: not empty, and no run; choose another" in err) == (2, True)
    with pytest.raises(ConfigError, match="not empty, and no run"):
        fit({"data": {"path": "text.txt"}}, "model")
    assert len(list(Path("model").iterdir())) == 3
    assert Path("model/lock").read_text() == "lock, of another program"


def test_a_tilde_is_the_home_folder(gptmini, text_file: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(text_file.parent / "home"))
    monkeypatch.setenv("USERPROFILE", str(text_file.parent / "home"))  # on Windows
    monkeypatch.setenv("GPTMINI_CACHE", "~/cache")
    assert gptmini("train", "text.txt", *SMALL, "--out=~/run")[0] == 0
    assert fit("home/run/request.yaml", "~/run").path == text_file.parent / "home/run"
    assert {path.name for path in Path("home").iterdir()} == {"cache", "run"}
    assert not Path("~").exists()


def test_a_run_that_was_hardly_begun_is_begun_again(gptmini, text_file: Path):
    for name in ("lock", ".tmp-1-tokenizer.json", "checkpoints/.tmp/state.json"):
        Path("half", name).parent.mkdir(parents=True, exist_ok=True)
        Path("half", name).touch()
    assert gptmini("train", "text.txt", *SMALL, "--out", "half")[0] == 0


def test_the_folder_that_holds_a_run_is_trained_on_again(gptmini, text_file: Path):
    Path("book").mkdir()
    text_file.rename("book/text.txt")
    for steps in ("4", "5"):
        words = ["train", "--data", "book", "--out", "book/run", *SMALL, "--steps", steps]
        code, _, err = gptmini(*words)
        assert (code, "skipped" in err) == (0, False), err
    code, _, err = gptmini("train", "--data", "book/run")
    problem = "book/run: a run, not a text; to resume it: gptmini train book/run\n"
    assert (code, err) == (3, f"gptmini: {problem}")


def test_a_run_is_resumed_without_the_tokenizer_file_it_began_with(gptmini, text_file: Path):
    assert gptmini("tokenizer", "train", "text.txt", "--out", "t.json")[0] == 0
    words = ["train", "text.txt", *SMALL, "--set", "tokenizer.kind=t.json"]
    assert gptmini(*words, "--out", "mine")[0] == 0
    Path("t.json").unlink()
    code, _, err = gptmini("train", "mine", "--steps", "5")
    assert code == 0, err
    assert Path("mine/checkpoints/step-00000005").is_dir()


def test_a_mistyped_run_or_configuration_is_answered_with_the_nearest(gptmini):
    for name in ("mine", "gpt2-mine"):
        Path("runs", name, "checkpoints").mkdir(parents=True)
        Path("runs", name, "config.yaml").touch()
    for name, meant in [
        ("mien", "runs/mine?"),
        ("gpt2-124", "gpt2-124m?"),
        ("nothing-like-it", "choose one of "),
        ("runs/default", "gptmini runs lists them"),
        ("runs/mien", "runs/mine?"),
    ]:
        code, _, err = gptmini("train", name)
        assert (code, f"{name}: no " in err, meant in err) == (2, True, True), err


def test_a_mistyped_text_is_answered_with_the_nearest_of_its_folder(gptmini):
    Path("texts").mkdir()
    Path("texts/My Draft.txt").write_text(WORDS)
    Path("My Draft.txt").write_text(WORDS)
    Path("runs/my-drafts/checkpoints").mkdir(parents=True)
    Path("runs/my-drafts/config.yaml").touch()
    for name in ("my draf.txt", "texts/MyDraft.txt", "texts/my draft"):
        missing = f"{name}: no such file or directory; did you mean "
        missing += f"{Path(name).with_name('My Draft.txt')}?"
        for words in (["train", name], ["train", "--data", name]):
            assert gptmini(*words) == (3, "", f"gptmini: {missing}\n")
    (line,), code = app._explain(FileNotFoundError(2, "No such file", "my draf.txt"))
    assert (code, line) == (5, "my draf.txt: no such file; did you mean My Draft.txt?")


def test_a_name_with_spaces_without_quotes_is_answered_with_its_quotes(gptmini):
    Path("My Long Draft.txt").write_text(WORDS)
    Path("runs/draft three").mkdir(parents=True)
    text = "'My Long Draft.txt'"
    for command, quoted in [
        ("train --data My Long Draft.txt", f"--data {text}"),
        ("train My Long Draft.txt --steps 3", text),
        ("data prepare --data My Long Draft.txt", f"--data {text}"),
        ("generate runs/draft three --prompt It", "'runs/draft three'"),
        ("train --from runs/draft three --data x", "--from 'runs/draft three'"),
    ]:
        code, _, err = gptmini(*command.split())
        assert (code, err) == (2, f"gptmini: quote a name with spaces: {quoted}\n")


def test_other_settings_are_refused_before_the_text_is_prepared(
    gptmini, text_file: Path, monkeypatch: pytest.MonkeyPatch
):
    words = ["train", "--data", str(text_file), *SMALL]
    code, _, err = gptmini(*words)
    assert (code, "what the model writes (after step 4)" in err) == (0, True)
    assert err.endswith("\n4 steps: too few for a model, so this is noise; pass a larger --steps\n")
    assert "0:00" not in next(line for line in err.splitlines() if line.startswith("  time "))
    code, _, err = gptmini(*words)
    assert (code, "already finished" in err) == (0, True)
    assert "what the model writes" not in err
    monkeypatch.setattr("gptmini.plan.settle.open_text", lambda *_: pytest.fail("prepared"))
    code, _, err = gptmini(*words, "--set", "train.lr=1e-4", "--set", "model.n_layer=2")
    assert code == 2
    assert "model.n_layer: 1 in runs/text, now 2" in err
    assert "train.lr: 0.012 in runs/text, now 0.0001" in err


def test_a_text_that_was_edited_gets_a_new_run_by_the_option_in_the_message(gptmini):
    for text in (WORDS * 40, f"New words. {WORDS * 40}"):
        Path("My Draft.txt").write_text(text)
        code, _, err = gptmini("train", "My Draft.txt", *SMALL)
    said = (
        "My Draft.txt: the text has changed since runs/my-draft began; to train a new model on it"
    )
    assert (code, f"{said}, pass another --out, such as runs/my-draft-2" in err) == (3, 1)
    assert gptmini("train", "My Draft.txt", *SMALL, "--out", "runs/my-draft-2")[0] == 0
    assert "such as runs/my-draft-3" in gptmini("train", "My Draft.txt", *SMALL)[2]
    Path("My Draft.txt").write_text(f"Newer words. {WORDS * 40}")
    err = gptmini("train", "My Draft.txt", *SMALL, "--out", "runs/my-draft-2")[2]
    assert "since runs/my-draft-2 began" in err
    assert "such as runs/my-draft-3" in err
    code, _, err = gptmini("train", "--from=runs/my-draft", "--data=My Draft.txt", "--steps=4")
    assert (code, "warning: runs/my-draft: may have been trained on some of what" in err) == (0, 1)
    code, _, err = gptmini("evaluate", "runs/my-draft-from-my-draft")
    assert (code, "its base may have been trained on some of this text" in err) == (0, 1)
    assert "its base may know the held-out text" in gptmini("runs")[1]


def test_a_base_is_suspected_only_of_text_that_it_may_have_seen(gptmini, text_file: Path):
    """The held-out part of a text is the same for a base and its fine-tuning, if nothing changed.

    It is another if the text was edited or its shares are others, whatever its name.
    """
    assert gptmini("train", "text.txt", *SMALL)[0] == 0
    shutil.copy("text.txt", "copy.txt")
    Path("new.txt").write_text(f"Something else. {WORDS * 40}")
    shares = ["--set", "data.validation=0.3"]
    new_part = ["--set", "data.validation_path=new.txt"]
    for number, (words, is_suspected) in enumerate(
        [
            (["text.txt"], False),
            (["copy.txt"], False),
            (["new.txt"], False),
            (["text.txt", *shares], True),
            (["copy.txt", *shares], True),
            (["text.txt", *new_part], False),
            (["new.txt", "--set", "data.validation_path=text.txt"], True),
        ]
    ):
        out = ["--steps", "1", "--out", f"tuned-{number}"]
        code, _, err = gptmini("train", "--from", "runs/text", "--data", *words, *out)
        assert (code, "may have been trained on some of what" in err) == (0, is_suspected), words
    code, _, err = gptmini("train", "--from", "tuned-3", "--data", "text.txt", *shares, "--steps=1")
    assert (code, "may have been trained on some of what" in err) == (0, True)  # as its base was


def test_fine_tuning_that_only_harms_says_that_the_base_is_the_best(gptmini, text_file: Path):
    assert gptmini("train", "text.txt", *SMALL)[0] == 0
    harm = ["--set", "train.lr=5.0", "--set", "train.muon_lr=5.0", "--steps", "4"]
    words = ["train", "--from", "runs/text", "--data", "text.txt", *harm]
    code, out, err = gptmini(*words)
    assert (code, out, err.count("fine-tuning did not help")) == (0, "", 1)
    last = err.splitlines()[-1]
    assert last.startswith("ended at step 4: fine-tuning did not help: no evaluation was better ")
    assert (
        "than runs/text, so this run has its weights; with another --out, leave out --from to"
        in last
    )
    assert "already finished at step 4; fine-tuning did not help" in gptmini(*words)[2]
    tuned, base = (load(f"runs/{name}").model.state_dict() for name in ("text-from-text", "text"))
    assert all(torch.equal(tuned[name], tensor) for name, tensor in base.items())


def test_fine_tuning_that_is_stopped_says_if_it_has_brought_nothing_yet(
    gptmini, text_file: Path, monkeypatch
):
    assert gptmini("train", "text.txt", *SMALL)[0] == 0
    update = loop.train_step

    def interrupt(training: loop.Training) -> dict[str, object]:
        signal.raise_signal(signal.SIGINT)
        return update(training)

    monkeypatch.setattr(loop, "train_step", interrupt)
    few = ["--steps", "40", "--set", "train.eval_every=20"]
    code, _, err = gptmini("train", "--from", "runs/text", "--data", "text.txt", *few)
    said = "saved; no evaluation was better than runs/text yet, so this run has its weights; run "
    assert (code, said in err) == (130, True), err


def test_a_run_that_is_extended_says_that_the_rate_rises_again(gptmini, text_file: Path):
    words = ["train", "text.txt", *SMALL]
    assert "rises again" not in gptmini(*words)[2]
    code, _, err = gptmini(*words, "--steps", "8", "--set", "train.warmup_steps=1")
    risen = "; resuming after step 4; the learning rate rises again, and so may val at first\n"
    assert (code, risen in err) == (0, True), err


def test_a_missing_tracker_is_named_before_the_text_is_prepared(
    gptmini, text_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["train", "--data", str(text_file), *SMALL, "--set", "train.log_to=wandb"]
    code, _, err = gptmini(*words)
    assert code == 5
    remedy = "run pip install 'gptmini[wandb]'"
    assert err == f"gptmini: train.log_to: wandb is not installed; {remedy}\n"


def typed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_standard_input_is_a_text(gptmini, tmp_path: Path, monkeypatch):
    for _ in range(2):  # the second time the run is there, and the text the same
        typed(monkeypatch, (WORDS * 40).encode())
        code, _, err = gptmini("train", "--data", "-", *SMALL)
        assert code == 0, err
    assert "runs/text: already finished" in err
    typed(monkeypatch, b"\xff")
    code, _, err = gptmini("train", "--data", "-", *SMALL)
    assert (code, err.startswith("gptmini: standard input: not UTF-8 at byte 0")) == (3, True)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are UTF-8")
def test_file_names_need_not_be_utf8(gptmini):
    name = os.fsdecode(b"caf\xe9.txt")
    Path(name).write_text(WORDS * 40)
    code, _, err = gptmini("train", "--data", name, *SMALL)
    assert code == 0, err
    assert "  text      caf\\udce9.txt: " in err
    code, _, err = gptmini("train", "--data", name, *SMALL, "--set", "train.steps=5")
    assert code == 0, err
    code, _, err = gptmini("evaluate")
    assert code == 0, err


def test_token_files_truncated_while_training_are_one_error(gptmini, text_file: Path, monkeypatch):

    update = loop.train_step

    def cut(training: loop.Training) -> dict[str, object]:
        if training.step == 3:
            path = training.corpus.training[0].path
            with path.open("r+b") as file:
                file.truncate(200)
        return update(training)

    monkeypatch.setattr(loop, "train_step", cut)
    code, _, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 3
    assert ".bin: truncated while in use; " in err
    monkeypatch.setattr(loop, "train_step", update)
    code, _, err = gptmini("train", "--data", str(text_file), *SMALL)
    assert code == 0, err
    assert "resuming after step 2" in err


@pytest.mark.slow
def test_a_real_training_learns(gptmini):
    """The documentation of Python, by characters; 3.25 nats is guessing by frequency alone."""
    words = ["train", "shakespeare-char-small", "--data", "builtin:python-docs", "--steps", "60"]
    assert gptmini(*words)[0] == 0
    best = json.loads(Path("runs/shakespeare-char-small/best.json").read_text())
    assert best["val_loss"] < 1.8
