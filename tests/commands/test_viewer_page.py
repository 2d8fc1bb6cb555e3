"""The page of launchers/view.py in Chromium: all its views, hostile text, partial rows, a live run,
an exported file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image, ImageSequence

from agentenv.endpoint.listener import encode
from agentenv.lab.viewing.folder import Folder
from tests.support.viewed_run import (
    HOSTILE,
    RESULT,
    ViewedRun,
    evaluated,
    make_run,
    metrics,
    row_of,
)

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
pytestmark = [
    pytest.mark.viewer,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
WAIT_MS = 30_000
NUM_ROWS = 100_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address in a new window; at the end no errors may have occurred in it."""
    contexts, wrong = [], list[str]()

    def opened(address: str, **keys: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **keys)
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda one: wrong.append(one.text) if one.type == "error" else None)
        page.goto(address)
        page.wait_for_selector("main .about, main .card")
        return page

    yield opened
    hacked = [page.evaluate("window.hacked") for context in contexts for page in context.pages]
    for context in contexts:
        context.close()
    assert not any(hacked)
    assert not wrong


class Viewed:
    """A run and the command that shows it."""

    def __init__(self, folder: Path) -> None:
        self.run: ViewedRun = make_run(folder)
        command = [sys.executable, "-m", "agentenv.launchers", "view", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        shown = ""
        while (found := re.search(r"http://\S+\n", shown)) is None:
            line = self.process.stdout.readline()  # on a busy machine also that it is reading
            assert line, shown
            shown += line
        self.address = found[0].strip()

    def at(self, page: str) -> str:
        return f"{self.address}#/{page}"

    def close(self) -> int:
        self.process.terminate()
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewed]:
    """Which no test changes."""
    viewed = Viewed(tmp_path_factory.mktemp("shown") / "run")
    yield viewed
    viewed.close()


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Viewed]:
    viewed = Viewed(tmp_path / "run")
    yield viewed
    assert viewed.close() == 0


def text_of(page: Any, place: str) -> str:
    return str(page.inner_text(place))


def test_the_run(shown: Viewed, open_page: Open) -> None:
    page = open_page(shown.address)
    page.wait_for_selector(".chart canvas")
    assert "token" not in page.url
    tiles = text_of(page, ".tiles")
    assert re.search(r"updates\s+3\s+of 9", tiles)
    assert re.search(r"75.0 %\s+from 25.0 %, 20.0 % failed", tiles)
    assert re.search(r"training success, last step\s+30.0 %\s+10.0 % failed", tiles)
    assert re.search(r"tokens per second\s+180\s+over the run", tiles)
    assert re.search(r"failed trajectories\s+3\s+10.0 % of all", tiles)
    titles = page.locator(".card-head h2").all_inner_texts()
    assert {"Time line", "Failed trajectories per step, by kind"} <= set(titles)
    assert "Gradient norm" in text_of(page, ".absent >> nth=-1")  # which this run lacks
    page.wait_for_selector("pre.log:not(:empty)")
    log = page.locator("pre.log")
    assert log.evaluate("it => it.scrollTop + it.clientHeight >= it.scrollHeight - 1")
    page.hover(".timeline canvas", position={"x": 400, "y": 15})
    assert re.search(r"step \d: the learner (updates|waits)", text_of(page, ".hint"))
    page.fill("input[type=search]", "queue/")
    page.wait_for_selector("h2:has-text('queue/ready')")


def test_trees_of_a_step(shown: Viewed, open_page: Open) -> None:
    page = open_page(shown.at("trees/2"))
    page.wait_for_selector(".grid-row >> nth=2")
    rows = page.locator(".grid-row")
    assert rows.count() == 3
    page.select_option("label:has-text('fate') select", "filtered")
    page.wait_for_selector(".grid-foot:text-is('1 row')")
    assert "filtered" in rows.first.inner_text()
    assert "fate=filtered" in page.url  # the selection is part of the address
    page.select_option("label:has-text('fate') select", "")
    page.select_option("label:has-text('failure') select", "OutageError")
    page.wait_for_selector(".grid-foot:text-is('1 row')")
    page.select_option("label:has-text('failure') select", "")
    page.fill("label:has-text('reward from') input", "0.5")
    page.press("label:has-text('reward from') input", "Enter")
    page.wait_for_selector(".grid-foot:text-is('1 row')")
    page.fill("label:has-text('reward from') input", "")
    page.press("label:has-text('reward from') input", "Enter")
    page.fill("input[type=search]", "shop is CLOSED")
    page.wait_for_selector(".grid-foot:text-is('1 row')")
    assert "failed" in rows.first.inner_text()
    rows.first.click()
    page.wait_for_selector(".why-failed")
    assert "OutageError: the shop" in text_of(page, ".why")


def test_a_tree_token_by_token(shown: Viewed, open_page: Open) -> None:
    page = open_page(shown.at("trees/2/3"))
    page.wait_for_selector(".t")
    assert page.locator(".node").count() == 5
    assert page.locator(".fork-mark").count() == 1
    call = text_of(page, ".call")
    assert "from the cache" in call
    assert "250 ms" in call
    assert "50 ms waiting" in call
    assert "forked 1 sibling" in text_of(page, ".forks")
    token = page.locator(".t").nth(3)
    token.hover()
    detail = text_of(page, ".detail")
    for said in ("entropy 0.600 nats", "engine -0.300 nats", "learner -0.290 nats", "+0.0100"):
        assert said in detail
    assert "version 2" in detail
    page.locator(".t").first.hover()
    assert "version 1, 1" in text_of(page, ".detail")
    tones = {
        "advantage": "both", "entropy": "h0", "gap": "p4", "version": "v1", "mask": "m-trained",
        "probability": "h0",
    }  # fmt: skip
    for mode, tone in tones.items():
        page.select_option("label:has-text('color by') select", mode)
        page.wait_for_selector(f".t.{tone}")


def test_a_branch_has_a_url_and_is_shown_next_to_a_sibling(shown: Viewed, open_page: Open) -> None:
    page = open_page(shown.at("trees/2/3/0.1%2B1"))
    page.wait_for_selector(".turn-terminated")
    assert "it is 8" in text_of(page, "main")
    assert "it is seven" not in text_of(page, "main")
    assert f"refused/invalid/{HOSTILE} 2" in text_of(page, ".end")
    page.goto(shown.at("trees/2/3/0?beside=0.1%2B1"))
    page.wait_for_selector(".columns")
    differing = page.locator(".columns > div:first-child .t.differs").all_inner_texts()
    assert "".join(differing) == "seven"
    assert "shared: 2 nodes" in text_of(page, ".shared")
    page.click(".node-link >> nth=4")
    page.wait_for_url(re.compile("/trees/2/3/"))


def test_evaluations(shown: Viewed, open_page: Open) -> None:
    page = open_page(shown.at("evaluations"))
    page.wait_for_selector("td:has-text('0.625')")
    page.click("a:has-text('after_rl')")
    page.wait_for_selector(".grid-row")
    assert "pass@2" in text_of(page, ".tiles")
    told = text_of(page, "main")
    for said in ("Judge versus rules", "Cohen's kappa", "Scores by group", "ARPO productivity"):
        assert said in told
    assert "maj@k" not in told  # wrong answers have no comparison
    bars = page.locator(".histogram >> nth=0").locator("title").all_text_contents()
    assert bars == ["1: 5 correct, 3 wrong"]
    assert page.locator(".grid-row").count() == 8
    page.select_option("label:has-text('outcome') select", "wrong")
    page.wait_for_selector(".grid-foot:text-is('3 rows')")
    page.locator(".grid-row").first.click()
    page.wait_for_selector(".question")
    assert "what the judge" in text_of(page, "main")
    assert HOSTILE in text_of(page, ".tokens >> nth=0")
    page.keyboard.press("j")
    page.wait_for_url(re.compile(r"/evaluations/after_rl/\d"))
    page.goto(shown.at("evaluations/before_sft/against/after_rl"))
    page.wait_for_selector("td:has-text('success, all')")
    assert "+0.500" in text_of(page, "table >> nth=0")
    assert "2 questions changed" in text_of(page, "main")


def test_hostile_text_is_text(shown: Viewed, open_page: Open) -> None:
    """In questions, tokens, results, arguments, errors, reasons, answers; it creates no element
    (and `open_page` checks whether any script ran)."""
    for address in (
        "run", "trees/1", "trees/1/0", "trees/1/1", "trees/1/2/1", "trees/1/0/0?beside=1",
        "evaluations/after_rl", "evaluations/after_rl/0", "evaluations/before_sft/against/after_rl",
        "%3Cb%3Ex",
    ):  # fmt: skip
        page = open_page(shown.at("run"))
        page.goto(shown.at(address))
        page.wait_for_timeout(700)
        assert page.locator("#app :is(img, script, iframe, object, embed, b:has(x))").count() == 0
        page.context.close()
    page = open_page(shown.at("trees/1/0"))
    page.wait_for_selector(".t")
    shown_text = text_of(page, "main")
    for text in (HOSTILE, RESULT.replace("\u202e", "[U+202E]"), f"look {HOSTILE}"):
        assert text in shown_text


def test_a_live_run_is_followed(growing: Viewed, open_page: Open) -> None:
    """A row that is torn is waited for; new steps, trees and evaluations come by themselves."""
    run = growing.run
    page = open_page(growing.at("run"))
    updates = ".tile:has-text('updates') .tile-value"
    page.wait_for_selector(f"{updates}:text-is('3')")
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    run.row({"step": 4, "policy_version": 4, **metrics(4)}, torn=True)
    page.wait_for_timeout(3000)
    assert page.inner_text(updates) == "3"
    path.write_bytes(whole)
    run.step()
    page.wait_for_selector(f"{updates}:text-is('4')")
    page.goto(growing.at("trees"))
    page.wait_for_selector(".grid-foot:has-text('12 rows')")
    run.step()
    page.wait_for_selector(".grid-foot:has-text('15 rows')")
    page.goto(growing.at("evaluations"))
    page.wait_for_selector("a:has-text('after_rl')")
    run.evaluation("step-000005", [1.0, 1.0])
    run.row({"step": 5, "phase": "step-000005", **evaluated(0.9)})
    page.wait_for_selector("a:has-text('step-000005')")
    (run.folder / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": ""}))
    page.wait_for_selector(".status-elsewhere")


def press(page: Any, keys: Sequence[str], address: str) -> None:
    """Until the address has this end."""
    for key in keys:
        page.keyboard.press(key)
    page.wait_for_url(re.compile(f"{address}$"))


def test_keys(shown: Viewed, open_page: Open) -> None:
    page = open_page(shown.at("run"))
    for key, place in (("2", "trees"), ("3", "evaluations"), ("1", "run")):
        press(page, key, f"#/{place}")
    page.goto(shown.at("trees/1"))
    page.wait_for_selector("#row-1")
    page.focus(".grid-body")
    press(page, ("ArrowDown", "ArrowDown", "Enter"), "/trees/1/1")
    page.wait_for_selector(".t")
    press(page, "[", "/trees/1/0")
    page.wait_for_selector("b:text-is('tree 0')")
    press(page, "j", "/trees/1/0/0.1%2B1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".t.chosen:text-is('o')")  # of "look"
    press(page, "c", "color=gap.*")
    page.keyboard.press("b")
    page.wait_for_selector(".columns")
    page.keyboard.press("Escape")
    page.wait_for_selector(".columns", state="detached")
    press(page, ("Escape",), "/trees/1")
    page.keyboard.press("?")
    page.wait_for_selector(".help")
    page.keyboard.press("t")
    page.wait_for_selector("html[data-theme=light] button:text-is('light')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_small_screen(shown: Viewed, open_page: Open, scheme: str) -> None:
    """Nothing is wider than the screen except elements that scroll themselves."""
    page = open_page(shown.at("run"), color_scheme=scheme)
    assert page.get_attribute("html", "data-theme") == scheme
    page.set_viewport_size({"width": 375, "height": 700})
    for address in (
        "run", "trees/1", "trees/1/0/0?beside=1", "evaluations", "evaluations/after_rl",
        "evaluations/after_rl/0",
    ):  # fmt: skip
        page.goto(shown.at(address))
        page.wait_for_timeout(700)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, address


def test_a_hundred_thousand_rows(growing: Viewed, open_page: Open) -> None:
    """Only those in sight are in the page."""
    folder = growing.run.evaluation("large", [])
    line = msgspec.json.encode(row_of(10**5, 0, True)).replace(b"q-100000", b"q-%06d") + b"\n"
    parts = line.split(b"q-%06d")
    assert len(parts) == 2
    with (folder / "rows.jsonl").open("wb") as file:
        file.writelines(b"q-%06d".join(parts) % number for number in range(NUM_ROWS))
    figures = Folder(growing.run.folder).answer("evaluations/after_rl/figures")
    (folder / "summary.json").write_bytes(encode(figures))  # those of so many take a while
    page = open_page(growing.at("evaluations"))
    page.goto(growing.at("evaluations/large"))
    page.wait_for_selector(".grid-foot:has-text('100,000 rows')", timeout=120_000)
    most = 0
    for place in (0.3, 0.7, 1.0):
        page.evaluate(
            "at => { const grid = document.querySelector('.grid-body');"
            "grid.scrollTop = at * grid.scrollHeight; }",
            place,
        )
        page.wait_for_timeout(300)
        most = max(most, page.locator(".grid-row").count())
    assert most < 60
    page.wait_for_selector(f"#row-{NUM_ROWS - 1}")
    assert f"q-{NUM_ROWS - 1:06d}" in text_of(page, f"#row-{NUM_ROWS - 1}")


def test_an_exported_file_is_self_contained(shown: Viewed, tmp_path: Path, open_page: Open) -> None:
    out = tmp_path / "run.html"
    command = [sys.executable, "-m", "agentenv.launchers", "view", str(shown.run.folder)]
    subprocess.run([*command, "--export", str(out)], check=True, cwd=ROOT, capture_output=True)
    page = open_page(out.as_uri())
    asked = list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_selector(".chart canvas")
    assert "exported" in text_of(page, ".status")
    for address, place in (
        ("trees/3", ".grid-row >> nth=2"),
        ("trees/3/6/0.1%2B1", ".t"),
        ("evaluations/after_rl", ".grid-row"),
        ("evaluations/after_rl/3", ".tokens"),
        ("evaluations/before_sft/against/after_rl", "td:has-text('success, all')"),
    ):
        page.goto(f"{out.as_uri()}#/{address}")
        page.wait_for_selector(place)
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
    assert CHROMIUM is not None
    printing = [CHROMIUM, "--headless", *FLAGS, "--virtual-time-budget=8000", "--dump-dom"]
    printed = subprocess.run([*printing, out.as_uri()], check=True, capture_output=True).stdout
    assert b"<canvas" in printed, "charts wait for no frame, which a print does not draw"


def test_trees_whose_forks_changed_the_outcome_are_found(shown: Viewed, open_page: Open) -> None:
    """Over all steps, and in one."""
    page = open_page(shown.address)
    for place, num_steps in (("trees", 3), ("trees/2", 1)):
        page.goto(shown.at(place))
        page.wait_for_selector(".grid-row")
        num_trees = int(text_of(page, ".grid-foot").split()[0])
        page.select_option("label:has-text('forks') select", "changed")
        page.wait_for_selector(".changed")
        page.wait_for_function(
            f"!document.querySelector('.grid-foot').innerText.startsWith('{num_trees} ')"
        )
        fates = {*page.locator(".grid-row .tag").all_inner_texts()}
        assert fates == {"trained", "failed"}  # filtered ones have equal returns
        assert 0 < int(text_of(page, ".grid-foot").split()[0]) < num_trees
        assert num_trees % num_steps == 0


def test_a_tree_grows_in_a_picture(shown: Viewed, tmp_path: Path) -> None:
    """A frame for each node, each with more ink than the last."""
    tree = Folder(shown.run.folder).answer("steps/3/trees/6")
    out = tmp_path / "tree.gif"
    command = [sys.executable, str(ROOT / "viewer" / "animate.py"), str(shown.run.folder)]
    subprocess.run(
        [*command, "--step", "3", "--tree", "6", "--out", str(out)], check=True, cwd=ROOT
    )
    inks = list[int]()
    with Image.open(out) as picture:
        assert picture.n_frames == len(tree["nodes"])
        for frame in ImageSequence.Iterator(picture):
            inks.append(sum(frame.convert("L").histogram()[:250]))
    assert inks == sorted(set(inks))
