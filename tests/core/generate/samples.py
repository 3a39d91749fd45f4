"""Models and runs that several tests share."""

from pathlib import Path

import torch

from gptmini.generate.run import Run
from gptmini.model.gpt import GPT
from gptmini.tokenizer.tokenizers import ByteTokenizer
from tests.support import tiny

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def model_of(position: str = "rope", **attention) -> GPT:
    torch.manual_seed(0)
    config = tiny(model={"position": position, "attention": attention})
    model = GPT(config.with_tokenizer("byte", 50).model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model


def run_of(sample=None, tokenizer=None, model=None, **attention) -> Run:
    """A model, of bytes if no tokenizer is given, with random weights."""
    tokenizer = tokenizer or ByteTokenizer()
    config = tiny(model={**(model or {}), "attention": attention}, sample=sample or {})
    config = config.with_tokenizer(tokenizer.kind, tokenizer.vocab_size)
    torch.manual_seed(0)
    model = GPT(config.model).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
            if name.endswith("proj.bias"):  # begins as 0
                parameter.normal_()
    return Run(Path("runs/<b>"), config, tokenizer, model, {"step": 7, "corpus": ""})
