"""`gptmini import`: make a run of a pretrained model."""

from pathlib import Path

from gptmini.cli.options import RUNS_FOLDER, argument, option
from gptmini.console import quote, say


def import_model(
    model: str = argument(
        ...,
        "MODEL",
        "A folder with config.json and safetensors, a .gguf, or a name on the Hugging Face Hub: "
        "OWNER/NAME, OWNER/NAME@REVISION or OWNER/NAME/FILE.gguf.",
    ),
    out: Path | None = option(None, "DIR", "The new run directory.", show_default="runs/NAME"),
    context_length: int | None = option(
        None, "N", "Longest context.", min=1, show_default="the model's, at most 2048"
    ),
) -> None:
    """Make a run of a pretrained model: GPT-2, Llama, SmolLM2, Qwen, Mistral, Phi-3, StarCoder2."""
    from gptmini.extras.interop.hub_model import ModelName
    from gptmini.extras.interop.import_model import (
        choose_run_name,
        parse_source,
        write_imported_run,
    )
    from gptmini.plan.cost import count_parameters

    source = parse_source(model)
    if isinstance(source, ModelName) and Path(model).parent.is_dir():  # as of runs/NAME
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
        say(f"  gptmini generate {name} --chat --prompt TEXT")
