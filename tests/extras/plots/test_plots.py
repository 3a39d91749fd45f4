"""Pictures of attention weights and masks."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptmini.cli import attention_maps
from gptmini.errors import ConfigError
from gptmini.extras.plots import plots
from tests.core.generate.samples import TOKENS, model_of

MASK = attention_maps.build_mask("causal", 5).numpy()


def test_pictures_are_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    weights = attention_maps.compute_attention_weights(model_of(variant="gqa", n_kv_head=2), TOKENS)
    names = list("abcdefgh")
    for name, layers, head in (("all", [0, 1], None), ("layer", [1], None), ("head", [1], 3)):
        path = tmp_path / f"{name}.png"
        plots.save_figure(plots.draw_attention(weights.numpy(), names, 2, layers, head), path)
        assert path.read_bytes().startswith(b"\x89PNG")
    plots.save_figure(plots.draw_mask(MASK, "causal"), tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plots.save_figure(plots.draw_mask(MASK, "causal"), tmp_path / "mask.txt")


def test_a_picture_for_a_full_disk_is_named(tmp_path: Path):
    class FullDisk:
        def savefig(self, *_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space") as caught:
        plots.save_figure(FullDisk(), tmp_path / "p.png")
    assert caught.value.filename == str(tmp_path / "p.png")


@pytest.mark.parametrize(
    ("layers", "head", "n_kv_head", "labels"),
    [
        ([1], None, 4, ["␣remarkably_long"] * 8),
        ([1], 3, 4, ["a"] * 8),
        ([0, 1], 3, 4, ["␣remarkably_long"] * 8),
        ([0, 1], None, 2, ["a"] * 8),
    ],
)
def test_every_title_is_inside_and_no_panel_is_squeezed(layers, head, n_kv_head, labels):
    pytest.importorskip("matplotlib")
    weights = attention_maps.compute_attention_weights(model_of(variant="mha"), TOKENS).numpy()
    figure = plots.draw_attention(weights, labels, n_kv_head, layers, head)
    figure.canvas.draw()
    *panels, bar = figure.axes
    frame = figure.bbox
    for panel in panels:
        title = panel.title.get_window_extent()
        assert frame.x0 <= title.x0 < title.x1 <= frame.x1
        assert frame.y0 <= title.y0 < title.y1 <= frame.y1
        assert not title.overlaps(bar.get_window_extent())
        assert panel.get_window_extent().width > 1.8 * figure.dpi  # inches
        numbers = [text.get_text() for text in panel.texts]
        assert len(numbers) == 36  # a number in each visible cell
        assert numbers[0] == "1.00"
        assert all(len(number) == 4 for number in numbers)


def test_many_tokens_leave_no_room_for_numbers():
    pytest.importorskip("matplotlib")
    weights = torch.ones(1, 1, 13, 13).tril().numpy()
    assert not plots.draw_attention(weights, ["a"] * 13, 1, [0]).axes[0].texts


def test_the_backend_of_jupyter_need_not_be_installed():
    pytest.importorskip("matplotlib")
    script = "from gptmini.extras.plots import plots; plots.create_figure(1, 1)"
    environment = os.environ | {"MPLBACKEND": "module://nothing_here.backend"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_names_what_it_cannot_draw_before_the_work(gptmini, run, monkeypatch):
    for words, kinds in [
        (["--mask", "causal", "--out", "a.txt"], ".png, .pdf, .svg"),
        (["--prompt", "x" * 99, "--out", "a.txt"], ".png, .pdf, .svg, .html"),
        (["--mask", "causal", "--out", "a.html"], ".png, .pdf, .svg"),
    ]:
        code, _, err = gptmini("inspect", *words)
        assert (code, err.count("\n")) == (2, 1)
        assert err.endswith(f"ends in {kinds}\n")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = gptmini("inspect", "--prompt", "the fox", "--out", "a.png")
    assert (code, out) == (5, "")
    remedy = "run pip install 'gptmini[plot]'"
    assert err == f"gptmini: pictures: matplotlib is not installed; {remedy}\n"
