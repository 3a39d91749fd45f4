"""Draw the pictures of a run's page, front.png and page.png: python scripts/draw_page.py [RUN]

The page itself, the model in it, is written beside them as page.html.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from gptmini.extras.page.export import export_page
from gptmini.generate.run import load_run

ROOT = Path(__file__).parents[1]
PROMPT = "Mia had a red kite, and Ben had a blue drum. Mia liked the"
WIDTH = 1180  # pixels


def draw_page(page: Path, folder: Path) -> None:
    """Draw the first screen of a page, and the path with the station of an induction head open."""
    with sync_playwright() as driver:
        chromium = shutil.which("chromium") or shutil.which("chromium-headless-shell")
        browser = driver.chromium.launch(executable_path=chromium)
        tab = browser.new_page(viewport={"width": WIDTH, "height": 700}, locale="en")
        tab.goto(page.absolute().as_uri())
        tab.screenshot(path=folder / "front.png")
        tab.set_viewport_size({"width": WIDTH, "height": 1120})
        tab.locator("[data-station='attn:1']").click()
        tab.locator("#station").evaluate("card => card.scrollIntoView()")
        tab.screenshot(path=folder / "page.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/stories"))
    parser.add_argument("--out", type=Path, default=ROOT / "data", help="folder of the pictures")
    args = parser.parse_args()
    page = args.out / "page.html"
    export_page(load_run(args.run, "cpu", "float32"), page, prompt=PROMPT)
    draw_page(page, args.out)
    print(f"{args.out}: front.png, page.png and page.html")


if __name__ == "__main__":
    main()
