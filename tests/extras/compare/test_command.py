"""`gptmini compare` as it is typed."""

import json
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


def test_lines_of_the_log_that_lack_figures_are_left_out(gptmini, run):
    with Path(run, "metrics.jsonl").open("a") as file:
        for line in (
            {"step": 4},
            {"step": 4, "tokens": "many", "seconds": None, "val_loss": [1], "val_bpb": 1e999},
            {"step": 4, "tokens": 10**400, "lr": 1, "sample": 5, "peak_memory": "x"},
        ):
            file.write(json.dumps(line) + "\n")
    code, _, err = gptmini("compare", run, "--json")
    assert code == 0, err
