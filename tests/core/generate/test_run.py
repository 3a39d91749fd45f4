import copy
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gptmini.config.settings import Config
from gptmini.errors import ConfigError, DataError, MachineError, explain_missing_part
from gptmini.generate.filters import compute_logprob
from gptmini.generate.precision import round_weights
from gptmini.generate.run import Run, load_run
from gptmini.generate.sequence import Sequence
from gptmini.machine import CPP_COMPILERS, find_compiler
from gptmini.model.gpt import GPT, create_undrawn
from gptmini.runs.directory import RunDirectory
from gptmini.tokenizer.bpe_tokenizer import BpeTokenizer
from gptmini.tokenizer.tokenizers import ByteTokenizer, CharTokenizer
from tests.support import tiny, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    config = tiny(data={"path": str(folder / "text.txt")}, train={"steps": 3})
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained: Path) -> Run:
    return load_run(trained)


def facts(samples: list[Sequence]) -> list[dict]:
    return [sample.to_dict() for sample in samples]


def test_a_run_streams_what_it_generates_and_repeats_itself(run: Run):
    text = run.generate("the ", max_new_tokens=30, top_k=None)
    assert text == "".join(run.stream("the ", max_new_tokens=30, top_k=None))
    assert text != run.generate("the ", max_new_tokens=30, top_k=None, seed=2)
    assert run.generate([]) == []
    with pytest.raises(ConfigError, match=r"sample.temperature: must be at least 0"):
        run.generate("x", temperature=-1.0)


def test_a_list_of_prompts_gives_the_texts_that_each_has_alone(run: Run):
    prompts = ["the ", "a", "the "]
    texts = run.generate(prompts, max_new_tokens=9, temperature=2.0)
    assert texts == [run.generate(each, max_new_tokens=9, temperature=2.0) for each in prompts]
    assert run.generate([]) == []


def test_decoding_is_the_reverse_of_encoding(run: Run):
    tokens = run.encode("the é")
    assert run.decode(tokens) == run.decode(torch.tensor(tokens)) == "the é"


def test_an_empty_prompt_starts_where_the_run_says(run: Run):
    document = run.tokenizer.eos_token_id
    settings = {"max_new_tokens": 1, "temperature": 0}
    for start, token in [({}, 32), ({"start": "x"}, 120), ({"start": None}, document)]:
        with torch.no_grad():
            logits = run.model(torch.tensor([[token]]))[0, -1]
        (sample,) = run.start([""], **settings, **start).finish()
        assert sample.tokens == [int(logits.argmax())]


def test_prompts_together_are_what_they_are_alone(run: Run):
    prompts = ["the ", "", "a dog and a fox " * 3, "é"]
    generation = run.start(prompts, max_new_tokens=40, temperature=1.5, logprobs=True)
    pieces: dict[int, str] = dict.fromkeys(range(4), "")
    for number, piece in generation:
        pieces[number] += piece
    assert [sample.text for sample in generation.samples] == list(pieces.values())
    for number, prompt in enumerate(prompts):
        alone = run.start([prompt], [number], max_new_tokens=40, temperature=1.5, logprobs=True)
        ((found,), (expected,)) = facts(alone.finish()), facts([generation.samples[number]])
        # Without the compiled steps, logits differ by about 1e-6 between batches.
        assert found.pop("logprobs") == pytest.approx(expected.pop("logprobs"), abs=1e-5)
        assert found == expected
    assert generation.n_tokens == sum(len(sample.tokens) for sample in generation.samples)
    assert 0 < generation.time_to_first_token < generation.seconds


def test_two_generations_may_take_turns(run: Run):
    prompts = ["the ", "a dog"]
    settings = {"max_new_tokens": 30, "temperature": 1.5}
    expected = facts(run.start(prompts, **settings).finish())
    one, other = (run.start(prompts, **settings) for _ in range(2))
    for _ in itertools.zip_longest(one, other):
        pass
    assert facts(one.samples) == facts(other.samples) == expected


def test_threads_that_share_a_run_get_the_texts_they_would_get_alone(run: Run):
    """Each thread draws its texts in small steps, so that all of them are under way together."""
    prompts = ["the ", "a dog", "", "jumps over"] * 4
    settings = {"max_new_tokens": 40, "temperature": 1.5}
    alone = [run.generate(prompt, seed=seed, **settings) for seed, prompt in enumerate(prompts)]
    together = threading.Barrier(8)

    def draw(number: int) -> str:
        stream = run.stream(prompts[number], seed=number, **settings)
        first = next(stream)
        together.wait(60)
        return first + "".join(stream)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(draw, range(16))) == alone


def test_one_engine_serves_calls_that_follow_each_other(run: Run, monkeypatch):
    opened = []
    open_engine = run._open_engine
    monkeypatch.setattr(run, "_open_engine", lambda n: opened.append(n) or open_engine(n))
    for prompt in ("a", "the", ""):
        run.generate(prompt)
    assert len(opened) == 1
    next(run.stream("a"))  # an abandoned stream gives its engine back
    run.generate("b")
    assert len(opened) == 1
    first, second = run.stream("a"), run.stream("a")
    assert len(opened) == 1  # none until the first token is asked for
    assert next(first) == next(second)
    assert len(opened) == 2
    first.close()
    second.close()
    run.start(["a", "b", "c"]).finish()
    run.generate("a")
    assert len(opened) <= 3


def train_a_fused_step(model: GPT) -> None:
    """PyTorch does not count the changes of this one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.tensor([[1, 2, 3]])).logsumexp(-1).mean().backward()
    optimizer.step()


def replace_a_norm(model: GPT) -> None:
    model.final_norm = torch.nn.Identity()


def set_a_window(model: GPT) -> None:
    for block in model.blocks:
        block.attn.window = 1


def remove_a_layer(model: GPT) -> None:
    del model.blocks[0]


@pytest.mark.parametrize(
    ("change", "weights"),
    [
        (train_a_fused_step, "float32"),
        (train_a_fused_step, "bfloat16"),
        (train_a_fused_step, "int8"),
        (replace_a_norm, "float32"),
        (set_a_window, "float32"),
        (remove_a_layer, "float32"),
    ],
)
def test_a_run_generates_with_the_model_as_it_is_now(trained: Path, change, weights: str):
    run = load_run(trained, weights=weights)
    settings = {"logprobs": True, "max_new_tokens": 8, "temperature": 0}
    prompt = "the "
    (before,) = run.start([prompt], **settings).finish()
    for _ in range(2):  # the second change may bring back addresses of the first
        change(run.model)
        (text,) = run.start([prompt], **settings).finish()
        (again,) = run.start([prompt], **settings).finish()
        assert (text.tokens, text.logprobs) == (again.tokens, again.logprobs)
        assert text.logprobs != before.logprobs
        with torch.no_grad():
            logits = run.model(torch.tensor([run.encode(prompt) + text.tokens]))[0]
        start = len(run.encode(prompt)) - 1
        expected = [compute_logprob(logits[start + n], t) for n, t in enumerate(text.tokens)]
        assert text.logprobs == pytest.approx(expected, abs=1e-4 if weights == "float32" else 0.3)
        if change is remove_a_layer:
            break


def test_a_run_that_has_generated_can_be_copied(run: Run):
    text = run.generate("the ")
    assert copy.deepcopy(run).generate("the ") == text


def test_a_run_says_what_it_is_and_feeds_its_model(run: Run):
    assert repr(run).startswith(f"<Run {run.path}: step 3, ")
    assert run.encode("The") == [84, 104, 101]
    with torch.no_grad():
        assert run.model(torch.tensor([run.encode("The")])).shape == (1, 3, 257)


@pytest.mark.parametrize("precision_name", ["bfloat16", "int8"])
def test_a_model_that_was_rounded_has_these_weights_in_float32(trained: Path, precision_name: str):
    exact = load_run(trained, weights="float32").model
    run = load_run(trained, weights=precision_name, rounds_model=True)
    generated = run.generate("the ")
    with torch.inference_mode():  # as `score` looks at it
        weights = dict(run.model.named_parameters())
    for name, expected in exact.named_parameters():
        rounded = expected
        if expected.ndim == 2 and precision_name == "bfloat16":
            rounded = expected.bfloat16().float()
        elif expected.ndim == 2:
            step = expected.abs().amax(dim=1, keepdim=True) / 127
            rounded = (expected / step).round() * step
        assert torch.equal(weights[name], rounded)
    run.model(torch.tensor([[1, 2]])).sum().backward()
    assert run.model.embed.weight.grad is not None
    assert run.generate("the ") == generated
    assert run.start(["the "], use_cache=False).finish()[0].text


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_a_run_has_the_weights_of_its_checkpoint_and_generates_with_rounded_ones(
    trained: Path, tmp_path: Path, weights: str
):
    expected = RunDirectory(trained).load_best().model
    run = load_run(trained, weights=weights)
    rounded = load_run(trained, weights=weights, rounds_model=True)
    settings = {"temperature": 0, "max_new_tokens": 8, "logprobs": True}
    for _ in range(2):  # looking at the model changes no text
        (text,) = run.start(["the "], **settings).finish()
        (other,) = rounded.start(["the "], **settings).finish()
        is_compiled = find_spec("gptmini.extras") and find_compiler(*CPP_COMPILERS)
        if weights == "bfloat16" and is_compiled:
            assert text.logprobs == other.logprobs
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
    run.save(tmp_path / "copy")
    for name, tensor in load_run(tmp_path / "copy").tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_the_tensors_of_a_rounded_run_are_the_weights_of_its_model(trained: Path, weights: str):
    run = load_run(trained, weights=weights, rounds_model=True)
    found = {name: tensor.float() for name, tensor in run.tensors.items()}
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_loading_draws_no_weights(trained: Path):
    state = torch.get_rng_state()
    load_run(trained)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
def test_a_model_without_drawn_weights_has_all_the_rest(position: str):
    config = tiny(model={"position": position, "tie_embeddings": False}).model
    config = config.model_copy(update={"vocab_size": 20})
    expected = GPT(config)
    found = create_undrawn(config)
    for (name, ours), (other, theirs) in zip(
        found.named_buffers(), expected.named_buffers(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs)
    found.load_state_dict(expected.state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(found(tokens), expected(tokens))


@pytest.mark.parametrize("prompt", [("a", "b"), None, b"a", 7])
def test_a_prompt_that_is_not_a_text_is_refused(run: Run, prompt):
    kind = type(prompt).__name__
    with pytest.raises(ConfigError, match=f"prompt: must be a text, not {kind}"):
        run.generate(prompt)
    with pytest.raises(ConfigError, match="prompts: must be a list of texts, not str"):
        run.start("abc")


def test_stop_bans_and_bias_name_texts_and_a_single_one_needs_no_list(run: Run):
    settings = {"max_new_tokens": 40, "temperature": 0}
    plain = run.generate("the ", **settings)
    assert run.generate("the ", stop=plain[3], **settings) == plain[: plain.index(plain[3])]
    likeliest = plain[0]
    for ban in (likeliest, [likeliest]):
        assert likeliest not in run.generate("the ", ban=ban, **settings)
    assert run.generate("a", max_new_tokens=5, bias={"z": 100.0}) == "zzzzz"
    with pytest.raises(ConfigError, match=r"sample.ban: 'no' is not one token but 'n', 'o'"):
        run.generate("a", ban=["no"])


def test_special_text_is_text_unless_asked_for(run: Run):
    text = "<|endoftext|>"
    (sample,) = run.start([f"a{text}the"], special=True, max_new_tokens=1).samples
    assert sample.prompt_tokens == [97, run.tokenizer.eos_token_id, *b"the"]
    (sample,) = run.start([f"a{text}"], max_new_tokens=1).samples
    assert sample.prompt_tokens == [97, *text.encode()]


def test_a_long_prompt_keeps_its_tail_and_says_so(run: Run, capsys):
    tail = "x" * 16
    assert run.generate("abc" + tail) == run.generate(tail)
    assert "warning: prompt: 19 tokens; the model sees the last 16" in capsys.readouterr().err


def test_a_prompt_that_is_not_valid_unicode_is_refused(run: Run):
    with pytest.raises(DataError, match="prompt: character 1 is not valid Unicode"):
        run.generate("a\udc80")


def test_a_tokenizer_of_another_run_is_refused(trained: Path):
    file = trained / "tokenizer.json"
    before = file.read_text()
    file.write_text(CharTokenizer("é").to_json())
    with pytest.raises(DataError, match="not the tokenizer of this run"):
        load_run(trained)
    file.write_text(before)


def test_a_draft_needs_the_same_tokenizer(run: Run):
    other = Run(Path("other"), run.config, CharTokenizer("é"), run.model)
    with pytest.raises(ConfigError, match="draft other: its tokenizer differs"):
        run.start(["a"], draft=other)


def test_a_space_at_the_end_belongs_to_the_next_word(run: Run, tiny_encoding):
    """The model has seen " the", and a space alone only where no word follows."""
    tokenizer = BpeTokenizer(tiny_encoding)
    model = GPT(tiny().with_tokenizer("bpe", tokenizer.vocab_size).model).eval()
    other = Run(run.path, run.config, tokenizer, model)
    generations = [other.start(["the "], max_new_tokens=1, seed=seed) for seed in range(40)]
    for generation in generations:
        list(generation)
    assert {one.samples[0].text for one in generations} == {"", "the"}  # a space, or " the"
    assert generations[0].samples[0].prompt_tokens == [257]  # "the" alone
    # A text beside it with the same number is not affected.
    settings = {"max_new_tokens": 9, "temperature": 0, "bias": {" the": 100.0}}
    spaced, plain = other.start(["the ", "the"], [0, 0], **settings).finish()
    assert (spaced.text, plain.text) == ("the" + " the" * 8, " the" * 9)
    generation = other.start([" "], max_new_tokens=1, seed=0)
    assert generation.samples[0].prompt_tokens == tokenizer.encode(" ").tolist()


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_an_empty_prompt_gets_a_text_whatever_the_seed(weights, tmp_path):
    """A tied head expects the start of a text once more: without a rule most texts were empty."""
    config = Config(model={"vocab_size": 257, "d_model": 32, "n_layer": 1, "n_head": 2})
    tokenizer = ByteTokenizer()
    model = GPT(config.model).eval()
    with torch.no_grad():
        model.embed.weight[tokenizer.eos_token_id] *= 500
    round_weights(model, weights)
    run = Run(tmp_path, config, tokenizer, model, weights=weights)
    for seed in range(40):
        text = run.start([""], seed=seed, max_new_tokens=3).finish()[0]
        assert text.tokens[0] not in tokenizer.end_tokens


def test_without_the_folder_that_drafts_a_line_says_so(run: Run, monkeypatch):
    text = run.generate("the ")  # opens the engine
    monkeypatch.setitem(sys.modules, "gptmini.extras.engine", None)
    monkeypatch.delitem(sys.modules, "gptmini.extras.engine.speculative", raising=False)
    with pytest.raises(
        MachineError, match=r"drafting: gptmini/extras/engine.* is not in this copy"
    ):
        run.generate("the ", draft="lookup")
    assert run.generate("the ") == text


def test_without_the_folder_that_finds_copies_a_line_says_so(run: Run, monkeypatch):
    monkeypatch.setitem(sys.modules, "gptmini.extras.sources", None)
    with pytest.raises(MachineError, match="gptmini/extras/sources is not in this copy; restore"):
        run.find_copies("the ")
    other = ModuleNotFoundError(name="numpy")  # which the folder needs
    with pytest.raises(ModuleNotFoundError) as raised, explain_missing_part("finding copies"):
        raise other
    assert raised.value is other
