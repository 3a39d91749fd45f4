"""`gptmini inspect`: show what the heads of a model attend to, or what a mask hides."""

from pathlib import Path

from gptmini.cli.options import RunName, option, resolve_run
from gptmini.console import say, show_elapsed
from gptmini.doors import load_pages, load_plots
from gptmini.errors import ConfigError


def inspect(
    run: RunName = None,
    prompt: str | None = option(None, "TEXT", "Text for the model to read; needed without --mask."),
    layer: int | None = option(None, "N", "Only this layer, counted from 0."),
    head: int | None = option(None, "N", "Only this head, counted from 0."),
    mask: str | None = option(
        None, "MASK", "Show a mask instead: causal, or window:N for N positions."
    ),
    size: int | None = option(
        None, "N", "Positions of the mask.", min=1, max=256, show_default="12"
    ),
    out: Path | None = option(
        None, "FILE", "Also write an interactive page (.html) or picture (.png, .pdf, .svg)."
    ),
) -> None:
    """Show what attention heads look at, or what a mask hides."""
    only_without_mask = {"RUN": run, "--prompt": prompt, "--layer": layer, "--head": head}
    if mask is None and size is not None:
        raise ConfigError("--size: works only with --mask; remove one of them")
    for label, value in only_without_mask.items():
        if mask is not None and value is not None:
            raise ConfigError(f"{label}: does not work with --mask; remove one of them")
    if mask is None and prompt is None:
        raise ConfigError("--prompt: missing; give a text to read")

    is_page = out is not None and out.suffix.lower() == ".html" and mask is None
    if out is not None and not is_page:
        plots = load_plots()
        pages = [] if mask else [".html"]
        plots.check_suffix(out, (*plots.PICTURE_SUFFIXES, *pages))
        plots.check_can_draw()
    if mask is not None:
        from gptmini.cli import attention_maps

        cells = attention_maps.build_mask(mask, size or 12)
        print(attention_maps.format_mask(cells))
        print("\nx visible, . masked; a row is a token that looks (query), the columns are keys")
        if out is not None:
            plots.save_figure(plots.draw_mask(cells.numpy(), mask), out)
            say(f"{out}: written")
    else:
        path = resolve_run(run)
        _inspect_run(path, str(prompt), layer, head, out)


def _inspect_run(
    path: Path, prompt: str, layer: int | None, head: int | None, out: Path | None
) -> None:
    """Print what the heads attend to; write a page or a picture of it."""
    from gptmini.cli import attention_maps
    from gptmini.generate.run import load_run

    trained = load_run(path, "cpu", "float32")
    tokens = trained.encode(prompt, "--prompt")
    layers = None if layer is None else [layer]
    with show_elapsed("reading the text"):
        view = attention_maps.view_attention(trained, tokens, layers, head)
    say(f"{path}: step {trained.step}")
    is_page = out is not None and out.suffix.lower() == ".html"
    if out is not None and is_page:  # before printing, as `| head` may close stdout
        pages = load_pages()
        with show_elapsed("writing the page"):
            pages.export_page(trained, out, prompt=prompt)
        say(f"{out}: written; open it in a browser")
    print(view.format_text())
    if out is None:
        say("as a page to explore: --out FILE.html")
    elif not is_page:
        plots = load_plots()
        weights = view.weights.numpy()  # (L, H, T, T)
        figure = plots.draw_attention(weights, view.labels, view.n_kv_head, view.layers, head)
        plots.save_figure(figure, out)
        say(f"{out}: written")
