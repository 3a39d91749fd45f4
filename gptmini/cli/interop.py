"""`gptmini export`, `import` and `convert`."""

import shlex
from pathlib import Path

from gptmini.cli.options import (
    RUNS,
    AttentionName,
    Cache,
    RunName,
    argument,
    attention_settings,
    option,
    run_directory,
)
from gptmini.errors import ConfigError
from gptmini.files import CACHE


def export(
    run: RunName = None,
    to: str = option("hf", "FORMAT", "hf, a folder for transformers, or gguf, for llama.cpp."),
    weights: str | None = option(
        None, "TYPE", "Matrices in gguf: f32, f16, bf16 or q8_0.", show_default="f16"
    ),
    out: Path | None = option(
        None, "PATH", "The folder or file to write.", show_default="RUN-hf or RUN-f16.gguf"
    ),
    cache: Cache = CACHE,
) -> None:
    """Write a trained model for other programs, and prove that it computes the same."""
    if to not in ("hf", "gguf"):
        raise ConfigError(f"--to {to}: unknown format; use hf or gguf")
    if weights is not None and to == "hf":
        raise ConfigError("--weights: applies to --to gguf; leave it out")
    path = run_directory(run)
    path = path.resolve() if path.name == "" else path
    kind = weights or "f16"
    out = out or path.with_name(f"{path.name}-hf" if to == "hf" else f"{path.name}-{kind}.gguf")
    from gptmini.console import say
    from gptmini.interop.export import export_run

    made = export_run(path, out, to, kind, cache)
    say(f"{path}: written as a {made.architecture}")
    say(
        f"proof: read back, its logits differ by at most {made.difference:.1e} (the largest is "
        f"{made.scale:.1f}) on {made.tokens:,} tokens"
    )
    if made.rounding:
        say(f"proof: rounding to {kind} changes logits by at most {made.rounding:.1e}")
    print(out)
    if to == "hf":
        say(f"transformers: AutoModelForCausalLM.from_pretrained({str(out)!r})")
        return
    file, name = shlex.quote(str(out)), shlex.quote(path.name)
    say(
        f"llama.cpp:  llama-cli -m {file} -no-cnv -p TEXT\n"
        f"Ollama:     echo 'FROM ./{out.name}' > {shlex.quote(str(out.parent / 'Modelfile'))} && "
        f"ollama create {name} -f {shlex.quote(str(out.parent / 'Modelfile'))} && ollama run {name}"
    )


def import_(
    folder: Path = argument(..., "DIR", "A folder with config.json and safetensors."),
    out: Path | None = option(None, "DIR", "The new run directory.", show_default="runs/NAME"),
    context_length: int | None = option(
        None, "N", "Longest context.", min=1, show_default="the model's, at most 2048"
    ),
    cache: Cache = CACHE,
) -> None:
    """Make a run of a pretrained model: GPT-2, Llama, SmolLM2, Qwen2 or 3, Mistral, StarCoder2."""
    out = out or RUNS / folder.resolve().name
    from gptmini.console import say
    from gptmini.interop.huggingface import import_model

    run = import_model(folder, out, context_length, cache)
    count = sum(parameter.numel() for parameter in run.model.parameters())
    name = shlex.quote(str(out))
    say(
        f"{out}: {count / 1e6:,.1f} M parameters, context {run.config.model.context_length:,}, "
        f"vocabulary {run.tokenizer.vocab_size:,}; try it with:\n"
        f"  gptmini generate {name} --prompt TEXT"
    )
    tokenizer = run.tokenizer
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    say(f"its texts end with {' or '.join(names[number] for number in tokenizer.end_tokens)}")
    if tokenizer.chat_template is not None:
        say(
            "its chat template is kept for exports, but not applied: type its special tokens in a "
            "prompt, with --special"
        )


def convert(
    run: RunName = None,
    attention: AttentionName = None,
    steps: int | None = option(
        None, "N", "Steps to train it further.", min=1, show_default="a tenth of the original"
    ),
    out: Path | None = option(None, "DIR", "The new run directory.", show_default="RUN-ATTENTION"),
    cache: Cache = CACHE,
) -> None:
    """Start a new run from a trained model, with its KV heads averaged into fewer."""
    if attention is None:
        raise ConfigError("--attention: missing; write for example --attention gqa:2")
    path = run_directory(run)
    path = path.resolve() if path.name == "" else path
    out = out or path.with_name(f"{path.name}-{attention.replace(':', '')}")
    from gptmini.console import say
    from gptmini.generate.run import load
    from gptmini.interop import pooling

    trained = load(path, weights="float32", cache=cache)
    config = pooling.convert(trained, attention_settings(attention), steps, out, cache)
    old, new = trained.config.model, config.model
    change = f"KV heads {old.n_kv_head} -> {new.n_kv_head}"
    if new.n_kv_head == old.n_kv_head:
        change = f"window {old.attention.window or 'none'} -> {new.attention.window}"
    name = shlex.quote(str(out))
    further = f"gptmini train {shlex.quote(str(out / 'config.yaml'))} --out {name}"
    if not trained.corpus:  # imported
        further = f"gptmini train --from {name} --data TEXT --steps {config.train.steps}"
    say(
        f"{out}: {change}, from step {trained.step} of {path}; train it for {config.train.steps} "
        f"steps with:\n  {further}"
    )
