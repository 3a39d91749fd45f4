"""model.js against PyTorch and generate/, in Chromium: logits, texts, what is switched off."""

import pytest
import torch

from gptmini.extras.page.export import build_page
from tests.extras.page.samples import SHAPES, random_run, random_texts, rounded


def check_logits(visit, shape: str, precision: str, count: int) -> None:
    run = random_run(shape)
    tab = visit(build_page(run, precision))
    texts = random_texts(count)
    shown = tab.evaluate(
        "texts => texts.map(tokens => Array.from(opened.gpt.forward(tokens)))", texts
    )
    model = rounded(run, precision).model
    for tokens, logits in zip(texts, shown, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([tokens]))[0]
        assert expected.std() > 0.5
        actual = torch.tensor(logits).view_as(expected)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_pytorch(visit, shape):
    check_logits(visit, shape, "bfloat16", 10)


@pytest.mark.parametrize("shape", ["default", "gpt2"])
def test_logits_in_int8_are_those_of_pytorch(visit, shape):
    check_logits(visit, shape, "int8", 3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_many_texts_are_those_of_pytorch(visit, shape):
    check_logits(visit, shape, "bfloat16", 200)
