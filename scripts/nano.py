"""A GPT from top to bottom: text, tokens, model, training, and a sample. Begin reading here.

    python scripts/nano.py [TEXT]

takes about a minute on two cores, and no network. Every part is gptmini's own, put together by
hand. What `gptmini train` and `gptmini generate` add is choosing the sizes, checkpoints that
survive a crash, logs, and speed. Follow an import to see how a part works.

Letters: B rows of a batch, T positions in a row, V tokens in the vocabulary.
"""

import argparse
import math
import time
from pathlib import Path

import torch

from gptmini import (
    GPT,
    Batches,
    Config,
    Corpus,
    KVCache,
    Optimizer,
    Run,
    compute_learning_rate,
    iter_validation_batches,
    make_random_number,
    prepare_corpus,
    sample_token,
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on a text and sample from it.")
    parser.add_argument("text", nargs="?", default="builtin:python-docs", help="a file or folder")
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates")
    parser.add_argument("--prompt", default="The ", help="the beginning of the sample")
    parser.add_argument("--seed", type=int, default=1337, help="selects all random numbers")
    parser.add_argument("--out", type=Path, help="save a run here, for gptmini generate and others")
    options = parser.parse_args()
    if options.out is not None and options.out.exists():
        parser.error(f"--out {options.out}: already exists; choose another name")

    # 1. The settings. Whatever is not stated here has a default in config/settings.py.
    config = Config.model_validate(
        {
            "data": {"path": [options.text]},
            "tokenizer": {"kind": "bpe", "vocab_size": 1024},
            "model": {"n_layer": 3, "n_head": 4, "d_model": 128, "context_length": 128},
            "train": {"steps": options.steps, "batch_size": 16, "seed": options.seed},
            "sample": {"temperature": 0.8, "top_k": 50, "seed": options.seed},
        }
    )

    # 2. The text. One part is held out, the other gives a vocabulary, and both become tokens.
    corpus = prepare_corpus(config)
    config = config.with_tokenizer(corpus.tokenizer.kind, corpus.tokenizer.vocab_size)
    print(corpus.format_summary().strip())

    # 3. The model. Its weights are random, but for a head that finds repetitions.
    torch.manual_seed(options.seed)
    model = GPT(config.model)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")

    # 4. Training, and how well the model now predicts text that it has not seen.
    train(model, corpus, config)
    print(f"{evaluate(model, corpus, config):.3f} bits per byte of held-out text")

    # 5. A text of the model's own.
    print(options.prompt + generate(model, corpus, config, options.prompt))

    # 6. A run for gptmini generate, evaluate, inspect, export, serve and train --from.
    if options.out is not None:
        state = {"step": options.steps, "corpus": corpus.content}
        Run(options.out, config, corpus.tokenizer, model, state).save()

    # 7. Next, see what its heads look at, and change the text in the page.
    run = options.out or "runs/nano"
    if options.out is None:
        print(f"next: the same with --out {run}, which keeps the model; then")
    print(f'next: gptmini inspect {run} --prompt "{options.prompt}" --out page.html')


def train(model: GPT, corpus: Corpus, config: Config) -> None:
    """Teach the model to predict the next token, at every position of random windows."""
    settings = config.train
    batches = Batches(
        corpus.training,
        weights=None,  # of several texts; here is one
        seq_len=config.seq_len,
        batch_size=settings.batch_size,
        seed=settings.seed,
    )
    optimizer = Optimizer(model, settings)  # Muon for matrices, AdamW for the rest
    model.train()
    started = time.perf_counter()
    for step in range(settings.steps):
        tokens, targets = batches.get_batch(step)  # (B, T) each; a target is the token after
        loss = model(tokens, targets)  # cross-entropy, in nats per token
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step(compute_learning_rate(settings, step))  # also clears the gradients
        if (step + 1) % 20 == 0 or step + 1 == settings.steps:
            seconds = time.perf_counter() - started
            print(f"step {step + 1} of {settings.steps}: loss {loss.item():.3f}, {seconds:.0f} s")


@torch.inference_mode()
def evaluate(model: GPT, corpus: Corpus, config: Config) -> float:
    """Return how many bits the model needs for a byte of held-out text: lower is better."""
    byte_lengths = torch.from_numpy(corpus.tokenizer.compute_byte_lengths())  # (V,)
    nats = 0.0
    n_bytes = 0
    model.eval()
    batches = iter_validation_batches(corpus.validation, config.seq_len, batch_size=16)
    for tokens, targets in batches:  # (B, T) each
        # Every target counts, each token once: windows do not overlap, and nothing is masked here.
        nats += model(tokens, targets).item() * targets.numel()
        n_bytes += int(byte_lengths[targets].sum())
    # Per byte, not per token: so models with different vocabularies can be compared.
    return nats / math.log(2) / n_bytes


@torch.inference_mode()
def generate(model: GPT, corpus: Corpus, config: Config, prompt: str, n_tokens: int = 100) -> str:
    """Draw one token after another. The cache keeps keys and values, so each is read once."""
    cache = KVCache(config.model, batch_size=1, device=model.device, dtype=torch.float32)
    tokenizer = corpus.tokenizer
    unread = tokenizer.encode(prompt).tolist() or [tokenizer.eos_token_id]  # <|endoftext|>
    generated: list[int] = []
    model.eval()
    for position in range(min(n_tokens, config.model.context_length - len(unread))):
        logits = model(torch.tensor([unread]), cache=cache)[0, -1]  # (1, T, V) -> (V,), of the last
        random = make_random_number(config.sample.seed, text_number=0, position=position)  # [0, 1)
        token = sample_token(logits, config.sample, random)
        generated.append(token)
        unread = [token]
    return tokenizer.decode(generated)


if __name__ == "__main__":
    main()
