"""`gptmini compare` as it is typed."""

from pathlib import Path

from gptmini.config.settings import Config
from gptmini.errors import GptminiError
from gptmini.extras.compare import compare


def test_compare_takes_a_text_as_train_does(gptmini, monkeypatch):
    Path("d.jsonl").write_text('{"text": "a"}\n')
    compared: list[dict[str, Config]] = []

    def record(variants: dict[str, Config], *_: object) -> list[object]:
        compared.append(variants)
        raise GptminiError("recorded")

    monkeypatch.setattr(compare, "compare", record)
    gptmini("compare", "d.jsonl", "--attention", "mha,mqa", "--steps", "2")
    ((mha, mqa),) = [variants.values() for variants in compared]
    assert mha.data.path == mqa.data.path == ["d.jsonl"]
    assert (mha.model.attention.variant, mqa.model.attention.variant) == ("mha", "mqa")
