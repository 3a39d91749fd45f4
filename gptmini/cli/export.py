"""`gptmini export`: write a trained model for other programs, or as a page."""

from pathlib import Path
from typing import Literal

from gptmini.cli.options import RunName, option, resolve_run
from gptmini.console import quote, say, show_elapsed
from gptmini.errors import ConfigError


def export(
    run: RunName = None,
    to: Literal["hf", "gguf", "html"] = option(
        "hf",
        "FORMAT",
        "hf, a folder for transformers; gguf, for llama.cpp; html, a page in which the model runs.",
    ),
    weights: str | None = option(
        None,
        "TYPE",
        "Matrices in gguf: f32, f16, bf16 or q8_0; in html: bfloat16 or int8.",
        show_default="f16; by size",
    ),
    out: Path | None = option(
        None,
        "PATH",
        "The folder or file to write.",
        show_default="RUN-hf, RUN-f16.gguf or RUN.html",
    ),
) -> None:
    """Write a trained model for other programs, and prove that it computes the same."""
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
    if exported.generated_by:
        say(f"proof: {exported.generated_by} loads it and generates with it")
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
    from gptmini.extras.page.export import PRECISIONS, export_page
    from gptmini.generate.run import load_run

    if weights not in (None, *PRECISIONS):
        raise ConfigError(f"--weights {weights}: unknown in a page; use {' or '.join(PRECISIONS)}")
    with show_elapsed("writing the page"):
        run = load_run(path, "cpu", "float32")
        page = export_page(run, out, weights)
    say(f"{path}: {page.size:,} bytes, weights in {page.precision}")
    print(out)
    say("open it in a browser; it needs no network and no other file")
