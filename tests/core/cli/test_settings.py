"""`gptmini settings` lists every setting."""

import re

from gptmini.config.load import iter_settings
from gptmini.config.settings import Config


def test_settings_lists_every_key_with_its_choices_default_and_meaning(gptmini, monkeypatch):
    code, out, _ = gptmini("settings")
    assert code == 0
    for key, _ in iter_settings(Config().model_dump()):
        assert re.search(rf"^{key.replace('.', '[.]')}: .+ \(default: .+\)\n    \w", out, re.M), key
    assert "model.norm: layernorm, rmsnorm (default: layernorm)" in out
    one = gptmini("settings", "train.lr")
    assert one[1].startswith("train.lr: number (default: 0.002)\n    Peak learning rate")
    assert gptmini("settings", "lr") == one
    for name, remedy in [
        ("model.dropot", "did you mean model.dropout?"),
        ("train.accumulate", "choose one of minutes, steps, batch_size, "),
        ("dropot", "choose one of model, tokenizer, data, train, base, sample"),
    ]:
        code, _, err = gptmini("settings", name)
        assert (code, f"gptmini: {name}: no such setting; {remedy}" in err) == (2, True)
    monkeypatch.setenv("COLUMNS", "4")
    assert gptmini("settings", "train.lr")[0] == 0
    keys = [line for line in gptmini("settings", "data")[1].splitlines() if line[0] != " "]
    assert all(line.startswith("data.") for line in keys)
    assert len(keys) > 5
