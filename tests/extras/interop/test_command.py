"""`gptmini export` and `import` as they are typed."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import gptmini as package
from gptmini import console
from gptmini.errors import ConfigError, GptminiError
from gptmini.extras.interop import export as exporting
from gptmini.extras.interop import import_model as importing
from gptmini.model.gpt import GPT
from tests.samples import CHAT_TOKENIZER, run_of


def test_a_run_goes_out_and_comes_back(gptmini, tmp_path, monkeypatch):
    run_of(tmp_path / "runs" / "my")
    code, out, err = gptmini("export")
    assert (code, out) == (0, "runs/my-hf\n")
    assert "runs/my: written as a qwen3\nproof: read back, its logits differ by at most " in err
    assert "AutoModelForCausalLM.from_pretrained('runs/my-hf')" in err
    names = {path.name for path in Path("runs/my-hf").iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors", "README.md"),
    }
    assert "context of 40 tokens" in Path("runs/my-hf/README.md").read_text()
    assert json.loads(Path("runs/my-hf/config.json").read_text())["rope_scaling"] is None
    code, _, err = gptmini("import", "runs/my-hf", "--out", "runs/a b", "--context-length", "20")
    assert code == 0
    assert "runs/a b: 0.1 M parameters, context 20, vocabulary 300" in err
    assert "gptmini generate 'runs/a b' --prompt TEXT" in err
    with monkeypatch.context() as windows:
        windows.setattr(console, "IS_WINDOWS", True)
        _, _, err = gptmini("import", "runs/my-hf", "--out", "runs/c d")
    assert 'gptmini generate "runs/c d" --prompt TEXT' in err
    assert gptmini("generate", "runs/a b", "--prompt", "It", "--max-new-tokens", "2")[0] == 0
    assert gptmini("evaluate", "runs/a b")[0] == 3
    code, _, err = gptmini("train", "runs/a b")
    assert code == 2
    assert "cannot be resumed; begin a new run with --from" in err


def test_gguf_comes_with_the_lines_to_run_it(gptmini, tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    run_of(tmp_path / "runs" / "my")
    code, out, err = gptmini("export", "runs/my", "--to", "gguf")
    assert (code, out) == (0, "runs/my-f16.gguf\n")
    assert "proof: rounding to f16 changes logits by at most" in err
    assert "llama-completion -m runs/my-f16.gguf -p TEXT" in err
    assert "echo 'FROM ./my-f16.gguf' > runs/Modelfile && ollama create my -f" in err
    _, _, err = gptmini("export", "runs/my", "--to", "gguf", "--out", "it's.gguf")
    (line,) = [line for line in err.splitlines() if "ollama" in line]
    assert shlex.split(line)[1:4] == ["echo", "FROM ./it's.gguf", ">"]
    run_of(tmp_path / "runs" / "chat", CHAT_TOKENIZER)
    assert "llama-cli -m runs/chat-f16.gguf" in gptmini("export", "runs/chat", "--to", "gguf")[2]


def test_wrong_usage_is_named(gptmini, tmp_path, monkeypatch):
    run_of(tmp_path / "runs" / "my")
    run_of(tmp_path / "runs" / "other", activation="gelu")
    for words, code, line in (
        (("export", "--to", "onnx"), 2, "Invalid value for '--to': 'onnx' is not one of"),
        (("export", "--weights", "f16"), 2, "--weights"),
        (("export", "runs/other"), 2, "model.attention.qk_norm: True, but must be False in"),
        (("export", "runs/none"), 4, "runs/none: no run here"),
        (("import", "runs/my"), 2, "runs/my: already exists"),
        (("import", "nowhere"), 4, "nowhere/config.json: no such file or directory; give"),
        (("import",), 2, "missing argument"),
    ):
        found, out, err = gptmini(*words)
        assert (found, out) == (code, ""), words
        assert line in err.lower() or line in err, err
    monkeypatch.setattr(exporting, "MAX_RELATIVE_DIFFERENCE", 0.0)
    code, out, err = gptmini("export", "runs/my")
    assert (code, out) == (1, "")
    assert "gptmini: runs/my-hf: not written: logits differ by" in err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["my", "other"]


def test_a_checkpoint_of_nanogpt_or_litgpt_is_refused_by_its_name(gptmini, tmp_path):
    for name in ("out/ckpt.pt", "checkpoints/Owner/Tiny/lit_model.pth"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"PK\3\4")
        for source in (name, str(Path(name).parent)):
            code, _, err = gptmini("import", source)
            assert code == 4
            assert f"{name}: a pickle" in err


def test_a_model_of_its_own_is_not_exported(tmp_path):
    """Its tensors would fit gptmini's model, which computes another function."""

    class Doubled(GPT):
        """A model of one's own."""

    path = run_of(tmp_path / "run").path
    run = package.load(path, weights="float32", model=Doubled)
    with pytest.raises(ConfigError, match="the model is a Doubled, which no other program"):
        package.export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "out", "to", "weights"),
    [
        ([], "my.0 2-hf", "hf", "f16"),
        (["--out", "a/b"], "a/b", "hf", "f16"),
        (["--to", "gguf"], "my.0 2-f16.gguf", "gguf", "f16"),
        (["--to", "gguf", "--weights", "q8_0"], "my.0 2-q8_0.gguf", "gguf", "q8_0"),
        (["--to", "gguf", "--weights", "f32", "--out", "c"], "c", "gguf", "f32"),
    ],
)
def test_each_option_reaches_the_export(gptmini, monkeypatch, words, out, to, weights):
    run_of(Path("my.0 2").absolute())
    exported: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> exporting.Export:
        exported.append(arguments)
        return exporting.Export(Path("unused"), "llama", 0.25, 0.5, 2.0, 1234, False)

    monkeypatch.setattr(exporting, "export_run", note)
    code, printed, err = gptmini("export", "my.0 2", *words)
    assert (code, printed) == (0, f"{out}\n"), err
    assert exported == [(Path("my.0 2"), Path(out), to, weights)]
    assert "differ by at most 2.5e-01 (the largest is 2.0) on 1,234 tokens" in err
    assert f"rounding to {weights} changes logits by at most 5.0e-01" in err


@pytest.mark.parametrize(
    ("words", "out", "context_length"),
    [
        (["a/my.model 0.2"], "runs/my.model 0.2", None),
        (["a/my.0.2.gguf"], "runs/my.0.2", None),
        (["a/b", "--out", "c d"], "c d", None),
        (["a/b", "--context-length", "1"], "runs/b", 1),
    ],
)
def test_each_option_reaches_the_import(gptmini, monkeypatch, words, out, context_length):
    Path(words[0]).mkdir(parents=True)
    imported: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> None:
        imported.append(arguments)
        raise GptminiError("noted")

    monkeypatch.setattr(importing, "write_imported_run", note)
    gptmini("import", *words)
    assert imported == [(Path(words[0]), Path(out), context_length)]


def test_a_folder_that_is_a_dot_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "my 0.2.gguf").mkdir()
    monkeypatch.chdir(tmp_path / "my 0.2.gguf")
    assert importing.choose_run_name(Path()) == "my 0.2"
    assert importing.choose_run_name(Path("..")) == tmp_path.name
