"""Fine-tuning on conversations: the loss is the mean over all tokens of answers, however spread."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gptmini.config.load import validate
from gptmini.config.settings import Config, DataConfig
from gptmini.data.chats import IGNORED
from gptmini.data.corpus import prepare_text
from gptmini.generate.run import Run, load_run
from gptmini.plan.settle import make_plan
from gptmini.runs.directory import RunDirectory
from gptmini.train import loop
from gptmini.train.batches import IGNORE_INDEX
from gptmini.train.evaluate_run import evaluate_text
from gptmini.train.sample import generate_sample
from gptmini.train.state import Training
from tests.samples import CHAT_TOKENIZER, run_of, uneven_chats
from tests.support import prepared, train

END = CHAT_TOKENIZER.special_tokens["<|im_end|>"]
TRAIN: dict[str, Any] = {
    "steps": 4,
    "batch_size": 4,
    "micro_batch_size": 4,
    "seq_len": 16,
    "eval_every": 2,
    "save_every": 1,
    "log_every": 1,
    "warmup_steps": 0,
    "compile": "off",
    "dtype": "float32",
    "patience": None,
}


@pytest.fixture
def base(tmp_path: Path) -> Run:
    return run_of(tmp_path / "base", CHAT_TOKENIZER)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(uneven_chats())
    return path


def make_config(base: Run, chats: Path, data: dict[str, Any] | None = None, **more: Any) -> Config:
    settings = {
        "base": {"run": str(base.path)},
        "data": {"path": str(chats), **(data or {})},
        "model": {"dropout": 0},
        "train": {**TRAIN, **more},
        "sample": {"max_new_tokens": 4},
    }
    return validate(settings, {})


def start(config: Config, tmp_path: Path) -> Training:
    """A training at step 0, with the weights of its base."""
    training = prepared(config, tmp_path / "run")
    weights = load_run(str(config.base.run), "cpu", "float32").model.state_dict()
    training.model.load_state_dict(weights)
    return training


def compute_gradients(training: Training) -> dict[str, torch.Tensor]:
    """The gradients of the first batch, which the optimizer is kept from using."""
    gradients = {}

    def keep(_: float) -> None:
        for name, parameter in training.model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()

    training.optimizer.step = keep  # type: ignore[method-assign]
    training.first_loss = loop.train_step(training)["train_loss"]  # type: ignore[attr-defined]
    return gradients


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_the_loss_is_the_mean_over_the_answers_of_the_whole_batch(base, chats, tmp_path, rows):
    training = start(
        make_config(base, chats, micro_batch_size=rows, grad_clip=1e9, seed=3), tmp_path
    )
    tokens, targets = training.batches.get_batch(0)
    counts = (targets != IGNORE_INDEX).sum(1).tolist()
    assert len(set(counts)) > 2  # or the test would prove nothing
    assert 0 in counts
    found = compute_gradients(training)
    training.model.zero_grad()
    logits = training.model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    loss.backward()
    assert training.first_loss == pytest.approx(loss.item(), rel=1e-5)  # type: ignore[attr-defined]
    for name, parameter in training.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_batch_without_any_answer_changes_nothing(base, chats, tmp_path):
    training = start(make_config(base, chats), tmp_path)
    tokens, targets = training.batches.get_batch(0)
    training.batches._ahead = {0: (tokens, torch.full_like(targets, IGNORE_INDEX))}
    gradients = compute_gradients(training)
    assert training.first_loss == 0  # type: ignore[attr-defined]
    assert not any(gradient.any() for gradient in gradients.values())


def read_weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return RunDirectory(out).load_checkpoint(step).model


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_stopped_run_ends_with_the_same_bits(base, chats, tmp_path, monkeypatch):
    config = make_config(base, chats)
    train(config, tmp_path / "whole")
    update = loop.train_step

    def stop_at_three(training: Training) -> dict[str, Any]:
        if training.step == 3:
            raise KeyboardInterrupt
        return update(training)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stop_at_three)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "stopped")
    monkeypatch.setenv("GPTMINI_CACHE", str(tmp_path / "other-cache"))
    train(config, tmp_path / "stopped")
    assert same(read_weights(tmp_path / "whole", 4), read_weights(tmp_path / "stopped", 4))
    tuned = load_run(tmp_path / "whole", "cpu", "float32")
    assert tuned.tokenizer.chat_template == base.tokenizer.chat_template
    assert not same(read_weights(tmp_path / "whole", 4), dict(base.model.state_dict()))


def test_an_evaluation_counts_the_tokens_and_bytes_of_answers(base, chats, tmp_path):
    found = evaluate_text(base, str(chats))
    text = prepare_text(DataConfig(path=[str(chats)]), base.tokenizer)
    marked = text.read_marked(0, len(text))
    learned = marked[marked < IGNORED]
    assert found.tokens.sum() == len(learned)
    records = map(json.loads, chats.read_text().splitlines())
    answers = [record["messages"][1]["content"] for record in records]
    assert found.bytes.sum() == sum(map(len, answers))  # their end is no text
    assert (learned == END).sum() == len(answers)

    tokens = torch.from_numpy((marked & ~IGNORED).astype(np.int64))
    nats = []
    for begin in range(0, len(tokens) - 1, base.config.seq_len):
        window = tokens[begin : begin + base.config.seq_len + 1]
        logprobs = base.model(window[None, :-1])[0].log_softmax(-1)
        losses = -logprobs.gather(1, window[1:, None])[:, 0]
        is_learned = torch.from_numpy(marked[begin + 1 : begin + len(window)] < IGNORED)
        nats.append(losses[is_learned].sum().item())
    assert found.loss == pytest.approx(sum(nats) / len(learned), rel=1e-5)


def test_a_test_part_is_kept(base, chats, tmp_path):
    config = make_config(base, chats, {"test": 0.2, "validation": 0.2})
    train(config, tmp_path / "run")
    tuned = load_run(tmp_path / "run", "cpu", "float32")
    parts = [evaluate_text(tuned, split=split) for split in ("test", "validation")]  # type: ignore[arg-type]
    assert all(part.tokens.sum() > 50 for part in parts)
    assert parts[0].loss != parts[1].loss


def test_a_text_counts_whole_beside_conversations(base, chats, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a plain text. " * 40)
    config = make_config(base, chats, {"path": [str(text), str(chats)], "weights": [1.0, 1.0]})
    corpus = prepared(config, tmp_path / "run").corpus
    assert [file.has_ignored for file in corpus.training] == [False, True]
    assert corpus.has_ignored
    assert "of conversations, the answers count" in corpus.format_summary()


def test_a_text_without_conversations_is_noted(base, chats, tmp_path, capsys):
    plain = tmp_path / "plain.txt"
    plain.write_text("A text in which nobody asks. " * 100)
    noted = []
    for path in (chats, plain, [str(chats), str(plain)]):
        config = make_config(base, chats, {"path": path if isinstance(path, list) else str(path)})
        make_plan(config, None, dry_run=True)
        noted.append("may forget to" in capsys.readouterr().err)
    assert noted == [False, True, False]


def test_a_sample_answers_a_question_that_was_held_out(base, chats, tmp_path):
    training = start(make_config(base, chats), tmp_path)
    question = training.corpus.read_question()
    special = training.corpus.tokenizer.special_tokens.values()
    asked = training.corpus.tokenizer.decode([token for token in question if token not in special])
    assert asked
    drawn = generate_sample(training)
    answer = load_run(str(base.path), "cpu", "float32").start(
        [question], max_new_tokens=4, overflow="stop", use_cache=False
    )
    assert drawn == asked + answer.finish()[0].text


def test_the_command_says_how_to_ask(base, chats, gptmini):
    small = [f"--set=train.{key}={value}" for key, value in TRAIN.items() if value is not None]
    code, _, said = gptmini("train", "--from", str(base.path), "--data", str(chats), *small)
    assert code == 0
    assert "try it:         gptmini chat runs/chats-from-base\n" in said
    bad = chats.with_name("bad.jsonl")
    bad.write_text(chats.read_text() + '\n{"messages": [{"role": "user", "content": "a"}]}\n')
    code, _, said = gptmini("train", "--from", str(base.path), "--data", str(bad), *small)
    assert code == 3
    assert "bad.jsonl:61: messages: no assistant message" in said
