"""A GIF of a tree that grows, from the page of `agentenv view`.

    python viewer/animate.py RUN --step 6 --tree 80 --out docs/img/tree.gif

The page is drawn by Chromium; its nodes appear in the order in which the run made them.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from agentenv.launchers import view

FRAME_MS, LAST_MS = 350, 3000
NUM_COLORS = 128
SIZE = {"width": 880, "height": 1000}
HIDE = """
.drawing [data-node], .drawing .fork-mark { opacity: 0 }
.drawing [data-node].grown, .drawing .fork-mark.grown { opacity: 1 }
"""
GROW = """
index => {
    const drawing = document.querySelector(".drawing");
    for (const one of drawing.querySelectorAll(`[data-node="${index}"]`)) {
        one.classList.add("grown");
        if (!one.classList.contains("edge-fork")) continue;
        const { above } = drawing.querySelector(`a[data-node="${index}"]`).dataset;
        drawing.querySelector(`a[data-node="${above}"] .fork-mark`)?.classList.add("grown");
    }
}
"""


def frames(page: Page) -> list[Image.Image]:
    """The question and the drawing, once for each node that appears."""
    page.add_style_tag(content=HIDE)
    nodes = page.eval_on_selector_all(
        ".drawing a[data-node]", "all => all.map(one => Number(one.dataset.node))"
    )
    cards = page.locator("main .card").all()[:2]
    boxes = [card.bounding_box() for card in cards]
    top = min(box["y"] for box in boxes if box) - 8
    bottom = max(box["y"] + box["height"] for box in boxes if box) + 8
    clip = {"x": 0, "y": top, "width": SIZE["width"], "height": bottom - top}
    shots = []
    for index in sorted(nodes):
        page.evaluate(GROW, index)
        shots.append(Image.open(io.BytesIO(page.screenshot(clip=clip, animations="disabled"))))
    return shots


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--step", type=int, required=True, help="the update that trained the tree")
    parser.add_argument("--tree", type=int, required=True, help="the number of the tree")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.gif")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        exported = Path(folder) / "run.html"
        if view.main([str(options.run), "--export", str(exported)]):
            raise SystemExit(1)
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light", bypass_csp=True)
        page.goto(f"{exported.as_uri()}#/trees/{options.step}/{options.tree}")
        page.wait_for_selector(".drawing a[data-node]")
        shots = frames(page)
        browser.close()
    palette = shots[-1].convert("RGB").quantize(NUM_COLORS)
    first, *others = [one.convert("RGB").quantize(palette=palette) for one in shots]
    times = [FRAME_MS] * len(others) + [LAST_MS]
    first.save(options.out, save_all=True, append_images=others, duration=times, loop=0)


if __name__ == "__main__":
    main()
