"""`gptmini settings` lists every setting."""

import re

from gptmini.config.load import iter_settings
from gptmini.config.settings import Config

OTHER_NAMES = "see gptmini settings, or docs/coming-from.md for names of other projects"


def test_settings_lists_every_key_with_its_choices_default_and_meaning(gptmini, monkeypatch):
    code, out, _ = gptmini("settings")
    assert code == 0
    for key, _ in iter_settings(Config().model_dump()):
        assert re.search(rf"^{key.replace('.', '[.]')}: .+ \(default: .+\)\n    \w", out, re.M), key
    assert "model.norm: layernorm, rmsnorm (default: layernorm)" in out
    one = gptmini("settings", "train.lr")
    assert one[1].startswith("train.lr: number (default: chosen)\n    Peak learning rate")
    assert gptmini("settings", "lr") == one
    for name, remedy in [
        ("model.dropot", "did you mean model.dropout?"),
        ("train.Lr", "did you mean train.lr?"),
        ("train.dropot", "did you mean model.dropout?"),
        ("dropot", "did you mean model.dropout?"),
        ("sample.Seed", "did you mean sample.seed?"),
        ("model.atention", "did you mean model.attention?"),
        ("block_size", OTHER_NAMES),
        ("train.max_iters", OTHER_NAMES),
        ("model.n_embd", OTHER_NAMES),
        ("learning_rate", OTHER_NAMES),
    ]:
        code, _, err = gptmini("settings", name)
        assert (code, f"gptmini: {name}: no such setting; {remedy}" in err) == (2, True)
    assert "train.grad_clip: number (default: 1)" in out
    for key in ("train.muon_lr", "train.weight_decay", "model.tie_embeddings"):
        assert re.search(rf"^{key}: .* \(default: chosen\)$", out, re.M), key
    monkeypatch.setenv("COLUMNS", "4")
    assert gptmini("settings", "train.lr")[0] == 0
    keys = [line for line in gptmini("settings", "data")[1].splitlines() if line[0] != " "]
    assert all(line.startswith("data.") for line in keys)
    assert len(keys) > 5
