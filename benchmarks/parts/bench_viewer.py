"""What a large run costs whoever looks at it: seconds to the first picture, and frames of a scroll.

    python benchmarks/parts/bench_viewer.py [--gb 1] [--rows 100000] [--folder DIR] [--times 3]

Made in DIR, by what writes them in a run: RUN/trees of so many GB, in steps of 100 trees; a run
with a tree for each of `--rows`; and an evaluation of as many rows that nobody has reported. A
headless Chromium that runs already opens a page as soon as `agentenv view` prints its address.
Seconds are from the start of that command until two frames after what is named was there: the
curves of the run, the first rows of a table, the figures of an evaluation.

A scroll goes through a whole table within `--seconds`, a step in each frame (`whole`), and as fast
as a wheel, 3,000 pixels a second (`wheel`). What is told is the share of its frames that came more
than 50 ms after the one before; `floor` is that of a page as long that holds one word: on a machine
without a GPU, which draws by itself, no page does better. Frames are slower while others compute,
so the CPU seconds of the page's thread stand beside.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agentenv.archive import ARCHIVE, Archive, KeptTree, StepHeader
from agentenv.frames import ArchiveConfig, framed
from tests.support.viewed_run import ViewedRun, evaluated, make_run, metrics, row_of

ROOT = Path(__file__).resolve().parents[2]
TREES = 100  # of a step
TREE_BYTES = 100_000
SLOW_MS = 50
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLOOR = """data:text/html,<body><div id=box style="height:600px;overflow:auto">
<div style="height:3000000px">text</div></div>"""

# Scrolls an element in each frame; resolves with the milliseconds between frames.
SCROLL = """([place, seconds, pixels]) => new Promise((done) => {
    const box = document.querySelector(place);
    const end = box.scrollHeight - box.clientHeight;
    const began = performance.now();
    const deltas = [];
    let before = began;
    const frame = (now) => {
        deltas.push(now - before);
        before = now;
        const share = (now - began) / (1000 * seconds);
        if (share >= 1) return done(deltas.slice(1));
        const way = pixels ? (pixels * (now - began)) / 1000 : share * end;
        const back = way % (2 * end);
        box.scrollTop = back < end ? back : 2 * end - back;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
})"""
DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def make_trees(run: ViewedRun, tree_bytes: int, num_trees: int = 0, num_bytes: float = 0) -> None:
    """RUN/trees of so many trees, or so many bytes; a tree has about `tree_bytes`."""
    model = [run.tree(place, 1) for place in range(3)]
    for kept in model:
        grow(kept, tree_bytes)
    mean_bytes = sum(len(framed(kept)) for kept in model) / len(model)
    num_steps = (num_trees or round(num_bytes / mean_bytes)) // TREES
    archive = Archive(run.folder / ARCHIVE, ArchiveConfig(max_gb=1000))
    for step in range(1, num_steps + 1):
        header = StepHeader(step, step, 1, "settings", 256, TREES, metrics(step))
        archive.write(header, numbered(model, step))
        run.row({"step": step, "policy_version": step, **metrics(step)})
    run.row({"step": num_steps, "phase": "after_rl", **evaluated(0.75)})


def grow(kept: KeptTree, num_bytes: float) -> None:
    """Repeat the tokens of each turn until the tree takes so many bytes."""
    times = max(1, round(num_bytes / len(framed(kept))))
    for node in kept.tree.nodes:
        for name in ("action_ids", "logprobs", "entropies", "observation_ids"):
            setattr(node, name, getattr(node, name) * times)
    for one in kept.tree.scored:
        one.logprobs, one.proximal = one.logprobs * times, one.proximal * times


def numbered(model: list[KeptTree], step: int) -> Iterator[KeptTree]:
    for place in range(TREES):
        kept = model[place % len(model)]
        kept.tree.index = (step - 1) * TREES + place
        kept.tree.policy_version = step - 1
        yield kept


def make_evaluation(folder: Path, num_rows: int) -> None:
    """Rows that nobody has reported."""
    folder.mkdir(parents=True)
    config = {"subject": {"name": "run", "step": 1}, "run": "", "config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "rows.jsonl").open("wb") as file:
        for number in range(num_rows):
            row = row_of(number, 0, number % 3 == 0)
            file.write(msgspec.json.encode(row) + b"\n")


@contextmanager
def shown(folder: Path) -> Iterator[tuple[str, float]]:
    """The address of a folder that is served, and when its command began."""
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "launchers" / "view.py"), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    try:
        yield found[0], began
    finally:
        process.terminate()
        process.communicate(timeout=60)


def thread_seconds(session: Any) -> float:
    """CPU of the thread that runs a page's script and lays it out, since some moment."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "ThreadTime"))


class Bench:
    """One browser, and what it saw."""

    def __init__(self, browser: Any, seconds: float, times: int) -> None:
        self.browser = browser
        self.seconds = seconds
        self.times = times

    def page(self) -> Any:
        context = self.browser.new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(300_000)
        return context.new_page()

    def until(self, folder: Path, address: str, *places: str) -> None:
        """Print when each of these elements was there, of several starts."""
        name = f"{folder.name}, {address}"
        found: list[list[float]] = []
        for _ in range(self.times):
            page = self.page()
            with shown(folder) as (root, began):
                page.goto(f"{root}#/{address}")
                took = []
                for place in places:
                    page.wait_for_selector(place)
                    page.evaluate(DRAWN)
                    took.append(time.perf_counter() - began)
                found.append(took)
                page.context.close()
        for place, took in zip(places, zip(*found, strict=True), strict=True):
            print(f"{name}: {place} after {' '.join(f'{one:.2f}' for one in took)} s", flush=True)

    def scroll(self, folder: Path, address: str) -> None:
        """Print the share of slow frames, beside that of a page of nothing."""
        floor, page = self.page(), self.page()
        floor.goto(FLOOR.replace("\n", ""))
        with shown(folder) as (root, _):
            page.goto(f"{root}#/{address}")
            page.wait_for_selector(".grid-row")
            page.wait_for_timeout(3000)  # figures and what else still comes
            for name, pixels in (("whole", 0), ("wheel", 3000)):
                for told, one, place in (("floor", floor, "#box"), ("page", page, ".grid-body")):
                    one.bring_to_front()
                    session = one.context.new_cdp_session(one)
                    session.send("Performance.enable", {"timeDomain": "threadTicks"})
                    before = thread_seconds(session)
                    deltas = one.evaluate(SCROLL, [place, self.seconds, pixels])
                    cpu_ms = 1000 * (thread_seconds(session) - before) / len(deltas)
                    slow = sum(delta > SLOW_MS for delta in deltas)
                    print(
                        f"{folder.name}, {address}, {name}, {told}: {100 * slow / len(deltas):.2f} "
                        f"% of {len(deltas)} frames above {SLOW_MS} ms, longest {max(deltas):.0f}; "
                        f"{cpu_ms:.1f} ms of CPU a frame",
                        flush=True,
                    )
        floor.context.close()
        page.context.close()


def main(options: argparse.Namespace, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    large, many, rows = folder / "large", folder / "many", folder / "evaluation"
    if not large.exists():
        make_trees(make_run(large, 0), TREE_BYTES, num_bytes=1e9 * options.gb)
        make_trees(make_run(many, 0), 1, num_trees=options.rows)
        make_evaluation(rows, options.rows)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        bench = Bench(browser, options.seconds, options.times)
        bench.until(large, "run", ".chart canvas")
        bench.until(large, "trees", ".grid-row")
        bench.until(large, "trees/1", ".grid-cell:has-text('number')")
        bench.until(many, "trees", ".grid-row")
        bench.until(rows, "evaluations/evaluation", ".grid-row", ".tiles")
        bench.scroll(many, "trees")
        bench.scroll(rows, "evaluations/evaluation")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0, help="of RUN/trees")
    parser.add_argument("--rows", type=int, default=100_000, help="of a table")
    parser.add_argument("--folder", type=Path, help="where they are made, and found again")
    parser.add_argument("--times", type=int, default=3, help="starts of the command")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a scroll")
    options = parser.parse_args()
    if options.folder is not None:
        main(options, options.folder)
    else:
        with tempfile.TemporaryDirectory() as made:
            main(options, Path(made))
