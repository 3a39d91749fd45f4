"""`gptmini export` writes a trained model for other programs; `gptmini import` reads theirs."""

from pathlib import Path
from typing import Literal

from gptmini.cli.options import RUNS_FOLDER, RunName, argument, option, resolve_run
from gptmini.console import quote, say, show_elapsed
from gptmini.doors import load_pages
from gptmini.errors import ConfigError


def export(
    run: RunName = None,
    to: Literal["hf", "gguf", "html"] = option(
        "hf", "FORMAT", "hf (transformers), gguf (llama.cpp) or html (a page that runs it)."
    ),
    weights: str | None = option(
        None,
        "TYPE",
        "gguf: f32, f16, bf16 or q8_0; html: bfloat16 or int8.",
        show_default="f16; by size",
    ),
    out: Path | None = option(
        None, "PATH", "Folder or file to write.", show_default="RUN-hf, RUN-f16.gguf or RUN.html"
    ),
) -> None:
    """Write a trained model for other programs, verified."""
    if weights is not None and to == "hf":
        raise ConfigError("--weights: applies to --to gguf and --to html; leave it out")
    path = resolve_run(run)
    path = path.resolve() if path.name == "" else path  # "." has no name
    if to == "html":
        _export_page(path, out or path.with_name(f"{path.name}.html"), weights)
        return
    kind = weights or "f16"
    if out is None:
        out = path.with_name(f"{path.name}-hf" if to == "hf" else f"{path.name}-{kind}.gguf")
    from gptmini.extras.interop.export import export_run

    with show_elapsed("writing and reading back"):
        exported = export_run(path, out, to, kind)
    say(f"{path}: written as a {exported.architecture}")
    say(
        f"proof: read back, its logits differ by at most {exported.difference:.1e} (the largest is "
        f"{exported.scale:.1f}) on {exported.tokens:,} tokens"
    )
    if exported.rounding:
        say(f"proof: rounding to {kind} changes logits by at most {exported.rounding:.1e}")
    print(out)
    if to == "hf":
        say(f"transformers: AutoModelForCausalLM.from_pretrained({str(out)!r})")
        return
    file = quote(out)
    name = quote(path.name)
    modelfile = quote(out.parent / "Modelfile")
    source = quote(f"FROM ./{out.name}")
    if exported.chats:
        say(f"llama.cpp:  llama-cli -m {file}")
    else:  # llama-cli does nothing but chat
        say(f"llama.cpp:  llama-completion -m {file} -p TEXT")
    say(
        f"Ollama:     echo {source} > {modelfile} && "
        f"ollama create {name} -f {modelfile} && ollama run {name}"
    )


def _export_page(path: Path, out: Path, weights: str | None) -> None:
    """Write a run as one HTML file."""
    from gptmini.generate.run import load_run

    pages = load_pages()
    if weights not in (None, *pages.PRECISIONS):
        known = " or ".join(pages.PRECISIONS)
        raise ConfigError(f"--weights {weights}: unknown in a page; use {known}")
    run = load_run(path, "cpu", "float32")
    with show_elapsed("writing the page"):
        page = pages.export_page(run, out, weights)
    say(f"{path}: {page.size:,} bytes, weights in {page.precision}")
    print(out)
    texts = run.config.data.validation_path or run.config.data.path
    opening = "no text, as the training text has changed or is gone"
    if page.held_out:
        opening = f"{len(page.held_out)} held-out characters of {', '.join(texts)}"
    say(f"it opens on {opening}")
    say("open it in a browser; it needs no network and no other file")


def import_model(
    model: str = argument(
        ...,
        "MODEL",
        "Folder, .gguf file, or OWNER/NAME[@REVISION][/FILE.gguf] on the Hugging Face Hub.",
    ),
    out: Path | None = option(None, "DIR", "New run directory.", show_default="runs/NAME"),
    context_length: int | None = option(
        None,
        "N",
        "Longest context; lower it to save memory.",
        min=1,
        show_default="the model's, at most 2048",
    ),
) -> None:
    """Import GPT-2, Llama, SmolLM2, Qwen, Mistral, Phi-3 or StarCoder2."""
    from gptmini.data.hub import HubName
    from gptmini.extras.interop.hub_model import parse_model_name
    from gptmini.extras.interop.import_model import choose_run_name, write_imported_run
    from gptmini.plan.cost import count_parameters

    source = parse_model_name(model) or Path(model)
    if isinstance(source, HubName) and Path(model).parent.is_dir():  # as of runs/NAME
        say(f"{model}: no such folder here; looking for it on the Hugging Face Hub")
    out = out or RUNS_FOLDER / choose_run_name(source)
    config, tokenizer = write_imported_run(source, out, context_length)
    name = quote(out)
    say(
        f"{out}: {count_parameters(config) / 1e6:,.1f} M parameters, "
        f"context {config.context_length:,}, vocabulary {tokenizer.vocab_size:,}; "
        f"try it with:"
    )
    say(f"  gptmini generate {name} --prompt TEXT")
    names = {number: name for name, number in tokenizer.special_tokens.items()}
    ends = " or ".join(names[number] for number in tokenizer.end_tokens)
    begins = f"begin with {names[tokenizer.eos_token_id]} and " if tokenizer.adds_bos else ""
    say(f"its texts {begins}end with {ends}")
    if tokenizer.chat_template is not None:
        say("it answers questions with:")
        say(f"  gptmini chat {name}")


COMMANDS = {"export": export, "import": import_model}
