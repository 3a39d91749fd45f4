"""Plant bugs in the core and beside it, one at a time, and list those that the tests do not see.

Each bug replaces a text that must occur exactly once in its file. It is planted in a temporary copy
of the checkout, and the tests that concern the file run until one fails. They run without a C++
compiler, so that nothing but PyTorch is needed to see a bug.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("gptmini", "tests", "configs", "data", "scripts", "pyproject.toml", "README.md")
LIMIT = 600  # seconds for the tests of one bug; a bug that never ends is seen


class Bug(NamedTuple):
    """One change of one file. `same` says why a bug that no test sees changes nothing."""

    file: str
    name: str
    old: str
    new: str
    same: str = ""


# The tests that concern a file, those that are likely to fail first.
TESTS = {
    "model/attention.py": "test_attention.py test_gpt.py test_sampler.py",
    "model/layers.py": "test_layers.py test_gpt.py",
    "model/gpt.py": "test_gpt.py test_trainer.py",
    "model/kernels.py": "test_kernels.py",
    "model/optim.py": "test_optim.py test_trainer.py",
    "generate/filters.py": "test_filters.py test_sampler.py",
    "generate/ranking.py": "test_filters.py",
    "generate/sampler.py": "test_sampler.py test_run.py test_bulk.py",
    "train/batches.py": "test_batches.py test_evaluate.py test_trainer.py",
    "train/evaluate.py": "test_evaluate.py test_evidence_evaluate.py test_ranks.py",
    "train/trainer.py": "test_trainer.py test_faults.py test_evidence_evaluate.py test_ranks.py",
    "distributed/gradients.py": "test_ranks.py",
    "distributed/ranks.py": "test_ranks.py",
}

_QK_NORM = """\
        if self.qk_norm:  # in float32, the type of its weights
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
"""
_ROTATION = """\
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, T, K)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
"""
_GROUPED = ".reshape(B, G, H // G * T, K)"
_IN_TURN = ".view(B, H // G, G, T, K).transpose(1, 2)"
_SHARE = "share.backward()"

# For each file: the name of a bug, the old text, the new one, and `same` where it applies.
_PLANTED: dict[str, list[tuple[str, ...]]] = {
    "model/attention": [
        ("rotary positions on q only", "q, rotation), rotate(k, rotation)", "q, rotation), k"),
        ("QK-norm after RoPE", _QK_NORM + _ROTATION, _ROTATION + _QK_NORM),
        (
            "dropout of weights in evaluation",
            "self.dropout if self.training else 0.0",
            "self.dropout",
        ),
        ("scores not scaled", "(q * K**-0.5)", "q"),
        ("KV heads taken in turn", f"K**-0.5){_GROUPED}", f"K**-0.5){_IN_TURN}{_GROUPED}"),
        ("KV heads not shared in the kernel", "k.shape[1] < q.shape[1]\n", "False\n"),
        ("q's norm for k", "self.k_norm(k.float())", "self.q_norm(k.float())"),
        ("window one too wide", "distance < window", "distance <= window"),
        ("own position hidden", "mask = distance >= 0", "mask = distance > 0"),
        ("first real token hidden", "keys >= padding", "keys > padding"),
        ("window forgotten in decoding", "self.window < S", "self.window < T"),
        ("one query taken as causal", "packed, k, v, mask, False,", "packed, k, v, mask, True,"),
        ("ring read the wrong way round", "(slot - slots) %", "(slots - slot) %"),
        (
            "ring loses a visible position",
            "max(0, start - self.size)",
            "max(0, start - self.size + 2)",
        ),
        (
            "chunk stored in the wrong slots",
            "positions[-self.size :] %",
            "positions[: self.size] %",
        ),
        ("length of the cache not kept", "self.length = end", "self.length = start + 1"),
        ("no spare positions", "config.cache_length(layer) + spare", "config.cache_length(layer)"),
        ("always the first row of a cache", "slice(index, index + 1)", "slice(0, 1)"),
        ("padding on the wrong rows", "[max(lengths) - length for", "[length - min(lengths) for"),
    ],
    "model/layers": [
        (
            "frequencies of K + 2",
            "torch.float64) / config.head_dim",
            "torch.float64) / (config.head_dim + 2)",
        ),
        ("GELU with the error function", 'approximate="tanh"', 'approximate="none"'),
        ("ReLU for ReLU²", "F.relu(hidden).square()", "F.relu(hidden)"),
        (
            "RMSNorm's eps ignored",
            "RMSNorm(config.d_model, eps=config.norm_eps)",
            "RMSNorm(config.d_model, eps=1e-5)",
        ),
        ("dropout not rescaled", " * (256 / (256 - self.dropped))", ""),
        ("dropout never drops", ">= self.dropped", ">= 0"),
        (
            "LayerNorm's eps ignored",
            "LayerNorm(config.d_model, eps=config.norm_eps, ",
            "LayerNorm(config.d_model, ",
        ),
        (
            "LayerNorm always with a bias",
            "eps=config.norm_eps, bias=config.bias)",
            "eps=config.norm_eps)",
        ),
        ("dropout one byte too often", ">= self.dropped", "> self.dropped"),
        ("dropout in evaluation", "not self.training or self.dropped == 0", "self.dropped == 0"),
        (
            "SiLU on the wrong branch",
            "F.silu(self.gate_proj(x)) * hidden",
            "self.gate_proj(x) * F.silu(hidden)",
        ),
        (
            "rotation the wrong way round",
            "cosines - second * sines, second * cosines + ",
            "cosines + second * sines, second * cosines - ",
        ),
        (
            "sine of padded rows is a cosine",
            "(cosines[:, None], sines[:, None])",
            "(cosines[:, None], cosines[:, None])",
        ),
        ("theta ignored", "config.rope_theta**-exponents", "10_000.0**-exponents"),
    ],
    "model/kernels": [
        ("mean left in the gradient", "return dx.addcmul_(scale, mean), ", "return dx, "),
        ("eps ignored in training", "/ x.shape[-1] + eps)", "/ x.shape[-1])"),
        ("target's logit not lifted", "gradient[:, :1], -1)", "gradient[:, :1], 0)"),
        ("gradient of a chunk's mean", "div_(len(logits))", "div_(len(chunk))"),
        ("weight of a micro-batch lost", "logits.mul_(gradient)", "logits"),
    ],
    "model/gpt": [
        (
            "no residual around the MLP",
            "return x + self.dropout(self.mlp(",
            "return self.dropout(self.mlp(",
        ),
        (
            "the MLP reads attention's norm",
            "self.mlp(self.mlp_norm(x))",
            "self.mlp(self.attn_norm(x))",
        ),
        ("no dropout after attention", "x + self.dropout(self.attn(", "x + (self.attn("),
        ("no dropout of embeddings", "        x = self.dropout(x)\n", ""),
        ("no final norm", "return self.final_norm(x)", "return x"),
        (
            "positions from 0 in every chunk",
            "torch.arange(start, end, ",
            "torch.arange(0, end - start, ",
        ),
        (
            "padding added to positions",
            "positions - padding[:, None]",
            "positions + padding[:, None]",
        ),
        ("one cache for all layers", "cache.layers[layer] if", "cache.layers[0] if"),
        (
            "one position too few",
            "if end > self.config.context_length",
            "if end >= self.config.context_length",
        ),
        ("the loss is a sum", "targets.flatten())", 'targets.flatten(), reduction="sum")'),
        ("residual weights too large", "(2 * model.config.n_layer)", "model.config.n_layer"),
        (
            "checkpointing in evaluation too",
            "self.gradient_checkpointing and self.training",
            "self.gradient_checkpointing",
            # Blocks are recomputed in a backward pass only, and evaluation has none.
            "recomputes nothing without a backward pass",
        ),
    ],
    "model/optim": [
        ("AdamW's betas ignored", "betas=(beta1, beta2), ", ""),
        ("warmup starts at 0", "(step + 1) / config.warmup_steps", "step / config.warmup_steps"),
        ("cool-down one step early", "config.steps - step\n", "config.steps - step - 1\n"),
        ("cosine upside down", "0.5 - 0.5 * math.cos", "0.5 + 0.5 * math.cos"),
        ("min_lr ignored", "config.min_lr + (", "0 * config.min_lr + ("),
        (
            "cool-down reaches into the warmup",
            ", config.steps - config.warmup_steps)",
            ", config.steps)",
        ),
        ("Muon without Nesterov", 'matrix.grad.lerp(mean, group["momentum"])', "mean"),
        (
            "Muon's momentum turned round",
            'matrix.grad, 1 - group["momentum"])',
            'matrix.grad, group["momentum"])',
        ),
        ("Muon's scale of wide matrices", "max(1, rows / columns)", "max(1, columns / rows)"),
        (
            "Muon's decay without the rate",
            '1 - group["lr"] * group["weight_decay"]',
            '1 - group["weight_decay"]',
        ),
        (
            "Muon's square matrices transposed",
            "wide.T if rows > columns",
            "wide.T if rows >= columns",
        ),
        ("Muon climbs", 'alpha=-group["lr"] * scale', 'alpha=group["lr"] * scale'),
        ("Muon's rate not relative", "config.muon_lr / config.lr", "config.muon_lr"),
        (
            "embeddings decay",
            '"params": undecayed, "weight_decay": 0.0',
            '"params": undecayed, "weight_decay": config.weight_decay',
        ),
        ("gradients not cleared", "            part.zero_grad()\n", ""),
        (
            "rate of the last step",
            "lr * ratio\n            part.step()",
            'group["lr"] or lr * ratio\n            part.step()',
        ),
    ],
    "generate/ranking": [
        ("top-k of columns", "np.partition(maxima, -k)[-k]", "np.partition(maxima, -k)[-1]"),
        ("top-p of the most likely token only", "weights < enough", "weights < 0"),
        ("a token of weight 0 is drawn", 'rest, side="right"', 'rest, side="left"'),
        ("a draw behind its block", "min(rest, np.nextafter(sums[-1], 0))", "rest"),
        ("negative numbers upside down", "bits >> 31 & 0x7FFFFFFF", "0"),
    ],
    "generate/filters": [
        ("top-p keeps a tie too many", "before >= enough", "before > enough"),
        ("top-p drops the token that reaches it", "weights.cumsum() - weights", "weights.cumsum()"),
        (
            "top-p of weights that are not normalized",
            "sample.top_p * weights.sum()",
            "sample.top_p",
        ),
        ("temperature upside down", "/ sample.temperature", "* sample.temperature"),
        ("min-p drops a tie", "weights >= sample.min_p", "weights > sample.min_p"),
        (
            "top-k of the whole vocabulary only",
            "sample.top_k < len(values)",
            "sample.top_k > len(values)",
        ),
        (
            "repetition penalty spares the prompt",
            "(seen := {*prompt, *drawn})",
            "(seen := {*drawn})",
        ),
        (
            "repetition penalty helps where negative",
            "old / penalty, old * penalty)",
            "old / penalty, old / penalty)",
        ),
        (
            "presence penalty per occurrence",
            "sample.presence_penalty + sample.frequency_penalty * times",
            "(sample.presence_penalty + sample.frequency_penalty) * times",
        ),
        ("penalties added", "tokens, -penalties", "tokens, penalties"),
        ("bias after nothing", "            logits = logits + self._bias\n", "            pass\n"),
        ("greedy draws a banned token", "if logits[token] > -torch.inf", "if True"),
        ("one random number for all places", '{seed} {number} {place}"', '{seed} {number}"'),
        ("log-probability without its norm", " - logits.logsumexp(dim=0)", ""),
    ],
    "generate/sampler": [
        (
            "the last token needs room",
            "sample.max_new_tokens - 1 > limit",
            "sample.max_new_tokens > limit",
        ),
        ("the first token's limits for all", " and not text.tokens:", ":"),
        (
            "one random number for all texts",
            "uniform(sample.seed, text.number, ",
            "uniform(sample.seed, 0, ",
        ),
        ("penalties forget the prompt", "text.prompt_tokens, text.tokens)", "[], text.tokens)"),
        (
            "logits after penalties and bias",
            "yield text, token, logits[place]",
            "yield text, token, scores",
        ),
        (
            "one token too many",
            "len(text.tokens) == sample.max_new_tokens",
            "len(text.tokens) > sample.max_new_tokens",
        ),
        (
            "wrong guesses are taken",
            "if text.finish_reason or guessed[place : place + 1] != [token]:",
            "if text.finish_reason:",
        ),
        (
            "wrong guesses stay in the cache",
            "min(text.cached, len(text.context) - 1)",
            "text.cached",
        ),
        (
            "guesses stay in the text",
            "            del text.context[len(text.context) - len(guessed) :]\n",
            "",
        ),
        (
            "guesses past the context",
            "min(sample.max_new_tokens - len(text.tokens) - 1, limit - len(text.context))",
            "sample.max_new_tokens - len(text.tokens) - 1",
        ),
        ("slides by one token", "max(1, limit // 2)", "limit"),
        ("the cache outlives a slide", "text.context[-kept:], 0", "text.context[-kept:], kept - 1"),
        ("start of the context not kept", "text.start += len", "text.start = len"),
        ("stop slides", 'if sample.overflow == "stop":', 'if sample.overflow == "error":'),
    ],
    "train/batches": [
        (
            "one order for all epochs",
            "count, draw(self.seed, which, epoch))",
            "count, draw(self.seed, which))",
        ),
        (
            "one offset for all epochs",
            "draw(self.seed, which, epoch, 1)",
            "draw(self.seed, which, 1)",
        ),
        (
            "one order for all texts",
            "count, draw(self.seed, which, epoch))",
            "count, draw(self.seed, epoch))",
        ),
        ("one pattern of turns for all seeds", "key = draw(seed)", "key = draw(0)"),
        ("steps overlap", "first = step * self.batch_size", "first = step"),
        (
            "windows past the end",
            "min(self.seq_len, len(text) - count * self.seq_len)",
            "self.seq_len",
        ),
        (
            "the last offset is never used",
            "draw(self.seed, which, epoch, 1) % offsets",
            "draw(self.seed, which, epoch, 1) % max(1, offsets - 1)",
        ),
        ("epochs one window late", "owners[:place] == owner", "owners[: place + 1] == owner"),
        ("targets not shifted", "both[:, :-1], both[:, 1:]", "both[:, :-1], both[:, :-1]"),
        (
            "one target too few counts",
            "torch.arange(targets.shape[1]) >=",
            "torch.arange(targets.shape[1]) >",
        ),
        (
            "overlapping targets count twice",
            "yield start, end, end - done",
            "yield start, end, end - start",
        ),
        ("the last token is no target", "while done < length - 1:", "while done < length - 2:"),
        ("a permutation of one number more", "if index < size:", "if index <= size:"),
    ],
    "train/evaluate": [
        ("dropout stays on", "    model.eval()\n", ""),
        ("the model is left training", "model.train(was_training)", "model.train()"),
        ("all targets count", "(kind * counted)", "kind"),
        ("every rank adds every batch", "number % ranks.size == ranks.rank", "True"),
        ("ranks from 2", "logits > own", "logits >= own"),
        ("bits are nats", "self.nats.sum() / math.log(2) / max", "self.nats.sum() / max"),
        (
            "error in bits is one in nats",
            "_standard_error(self.nats / math.log(2), ",
            "_standard_error(self.nats, ",
        ),
        ("perplexity to the base 2", "math.exp(min(self.loss, 700))", "2 ** min(self.loss, 700)"),
        ("spread without Bessel's correction", "count / (count - 1) * (", "1.0 * ("),
        (
            "spread of sums of unequal blocks",
            "total - sums.sum() / sizes.sum() * size",
            "total - total.mean()",
        ),
        ("more blocks than are independent", "min(len(sums), BLOCKS)", "len(sums)"),
    ],
    "train/trainer": [
        (
            "gradients of micro-batches summed",
            _SHARE,
            "(share * (len(tokens) / len(x))).backward()",
        ),
        (
            "the rate of the next step",
            "learning_rate(settings, step)",
            "learning_rate(settings, step + 1)",
        ),
        (
            "gradients never clipped",
            "gradients.clip(settings.grad_clip)",
            "gradients.clip(math.inf)",
        ),
        (
            "one noise for all micro-batches",
            "draw(settings.seed, step, micro)",
            "draw(settings.seed, step)",
        ),
        (
            "one noise for all steps",
            "draw(settings.seed, step, micro)",
            "draw(settings.seed, 0, micro)",
        ),
        (
            "the loss of the last micro-batch",
            "losses[micro] = share.item()",
            "losses = [share.item() * (len(tokens) / len(x))]",
        ),
        ("trains in evaluation mode", "    model.train()\n", ""),
        (
            "a halved rate is forgotten",
            "learning_rate(settings, step) * training.progress.lr_scale",
            "learning_rate(settings, step)",
        ),
        (
            "rows counted as tokens",
            "progress.tokens += settings.batch_size * training.config.seq_len",
            "progress.tokens += settings.batch_size",
        ),
        (
            "the worst step is the best",
            'result.loss < progress.best["val_loss"]',
            'result.loss > progress.best["val_loss"]',
        ),
        (
            "patience on the plateau",
            'max(best["step"], settings.steps - cooldown_steps(settings))',
            'best["step"]',
        ),
        ("patience of one more", "training.step >= since +", "training.step > since +"),
        ("the first step is not logged", " or training.step == 1 or last", " or last"),
        (
            "speed since the beginning",
            "        training.logged = (training.step, progress.seconds)\n",
            "",
        ),
        ("gradients outlive a rewind", "    training.model.zero_grad()\n", ""),
        ("metrics outlive a rewind", "    log.back_to(training.step)\n", ""),
        (
            "a signal does not save",
            "_save_is_due(training) or stop is not None or",
            "_save_is_due(training) or",
        ),
        ("saves for ever after SIGUSR1", "                received.save = False\n", ""),
        (
            "evaluates on what it trains on",
            "corpus.validation, training.config.seq_len",
            "corpus.training, training.config.seq_len",
        ),
        (
            "ranks share their dropout",
            "draw(settings.seed, step, micro)",
            "draw(settings.seed, step, micro - training.micro_batches[0])",
        ),
    ],
    "distributed/gradients": [
        ("a chain, not a tree", "while groups % 2 == 0:", "while self.sums:"),
        (
            "both keep the lower half",
            "(high, low) if ranks.rank & bit else (low, high)",
            "low, high",
        ),
        ("a level does not travel back", "in reversed(splits):", "in reversed(splits[1:]):"),
        (
            "the last bucket is not sent",
            "        self._send()\n        for work",
            "        for work",
        ),
        (
            "every micro-batch is sent",
            "self.made < self.n - 1",
            "self.made < 0",
            "the sum of the last one, which is of all, overwrites the others",
        ),
        (
            "matrices change places",
            ".flatten(0, 1)[:count]",
            ".transpose(0, 1).flatten(0, 1)[:count]",
        ),
    ],
    "distributed/ranks": [
        ("a signal stops its rank alone", "flags.amax(0)", "flags[self.rank]"),
        (
            "weights are not compared",
            "        if self.size > 1:\n            sums",
            "        if False:\n            sums",
        ),
        ("every rank leads", "work if self.rank == 0 else None", "work"),
        ("nobody speaks for the lost", "[line] * (self.rank == speaker)", "[line] * 0"),
        ("other settings are accepted", "if theirs.get(key) != first.get(key)", "if False"),
    ],
}

BUGS = [Bug(f"{file}.py", *bug) for file, bugs in _PLANTED.items() for bug in bugs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="plant only bugs whose file or name has a word")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at once")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without bugs")
    given = parser.parse_args()
    check()
    chosen = [
        bug
        for bug in BUGS
        if not given.words or any(word in f"{bug.file} {bug.name}" for word in given.words)
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies = Path(folder)
        files = [] if given.trust else list(dict.fromkeys(bug.file for bug in chosen))
        for file, failed in zip(files, pool.map(lambda f: run(copies, f), files), strict=True):
            if failed:
                sys.exit(f"{file}: its tests fail without any bug: {failed}")
            print(f"{file}: its tests pass without a bug", flush=True)
        print("\n| file | bug | result |\n|---|---|---|")
        unseen = 0
        results = pool.map(lambda bug: run(copies, bug.file, bug), chosen)
        for bug, failed in zip(chosen, results, strict=True):
            unseen += not (failed or bug.same)
            same = bug.same and f"equivalent: {bug.same}"
            print(f"| {bug.file} | {bug.name} | {failed or same or 'NOT SEEN'} |", flush=True)
    minutes = (time.monotonic() - started) / 60
    print(f"\n{len(chosen)} bugs, {unseen} not seen, {minutes:.0f} minutes")
    sys.exit(bool(unseen))


def check() -> None:
    """End with an error unless every text to replace is there exactly once."""
    if wrong := list(misplaced()):
        sys.exit("\n".join(wrong))


def misplaced() -> Iterator[str]:
    """A line for each bug whose old text is not found exactly once."""
    for bug in BUGS:
        count = (ROOT / "gptmini" / bug.file).read_text().count(bug.old)
        if count != 1 or bug.old == bug.new:
            yield f"gptmini/{bug.file}: {bug.name}: found {count} times, not once: {bug.old!r}"


def run(copies: Path, file: str, bug: Bug | None = None) -> str:
    """Run the tests of a file, with a bug in it or without; the first that failed, or nothing."""
    copy = Path(tempfile.mkdtemp(dir=copies))
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=skip)
        else:
            shutil.copy(source, copy / name)
    if bug is not None:
        path = copy / "gptmini" / file
        path.write_text(path.read_text().replace(bug.old, bug.new))
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["--hypothesis-profile=first failure"]  # one is enough, the smallest takes minutes
    command = [sys.executable, "-m", "pytest", *options]
    command += [f"tests/{name}" for name in TESTS[file].split()]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = str(Path(sys.executable).parent)  # where there is no compiler
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
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
