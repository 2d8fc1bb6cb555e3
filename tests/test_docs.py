"""The content of docs/ and the README matches the code: blocks of TOML load, blocks of Python run,
command lines are accepted by their launcher, keys in prose exist; and the site builds.

A block behind a line `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from agentenv.assembly.keys.cluster import ServeConfig
from agentenv.assembly.keys.evaluation import EvaluateConfig, SynthesisConfig
from agentenv.assembly.keys.help import describe
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import DPORunConfig, SFTRunConfig
from agentenv.assembly.run import exits
from agentenv.base.config import build_config, load_config
from agentenv.base.errors import ConfigError
from tests.support.snippets import ran
from tests.support.warehouse import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
BLOCK = re.compile(
    r"(?P<skip><!-- not run: (?P<why>.+?) -->\n+)?^```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


GROWING = {"docs/first-env.md"}


class Block(NamedTuple):
    """A fenced block of a page."""

    place: str
    kind: str
    text: str


def blocks(*kinds: str) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            if found["kind"] in kinds and not found["skip"]:
                line = text.count("\n", 0, found.start("text"))
                yield Block(f"{page.relative_to(ROOT)}:{line}", found["kind"], found["text"])


def named(found: list[Block]) -> Any:
    return pytest.mark.parametrize("block", found, ids=[one.place for one in found])


# TOML

CONFIGS: tuple[type[msgspec.Struct], ...] = (
    TrainConfig, EvaluateConfig, SFTRunConfig, DPORunConfig, SynthesisConfig, ServeConfig,
)  # fmt: skip
NEEDED: dict[str, Any] = {  # required keys of a configuration, for blocks that show a part of one
    "model": {"path": "models/MINE"},
    "data": {"train": "train.jsonl"},
    "env": {"id": "agentenv/QAGrader-v0"},
    "algorithm": {"name": "grpo"},
    "train": {"num_steps": 1},
}


@named(list(blocks("toml")))
def test_a_block_of_toml_is_part_of_a_configuration(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    refused = {}
    for config_type in CONFIGS:
        for needed in ({}, NEEDED):
            raw = tomllib.loads(block.text)
            for table, keys in needed.items():
                if table in config_type.__struct_fields__ and "mix" not in raw.get(table, {}):
                    raw[table] = {**keys, **raw.get(table, {})}
            try:
                build_config(config_type, raw, block.place)
            except ConfigError as error:
                refused[config_type.__name__] = str(error)
            else:
                return
    pytest.fail("\n".join(f"{name}: {why}" for name, why in refused.items()))


# Python


@named(list(blocks("python")))
def test_a_block_of_python_runs(
    block: Block, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "runs/quickstart" in block.text:
        run = request.getfixturevalue("small_run")
        shutil.copytree(run, tmp_path / "runs" / "quickstart")
    before = [one.text for one in blocks("python") if is_earlier(one, block)]
    (tmp_path / "questions.jsonl").write_text(
        '{"question": "What is 6 * 7?", "answer": "42"}\n', encoding="utf-8"
    )
    code = "\n".join([*before, block.text])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran(sys.executable, "-W", "error", "-c", code, cwd=tmp_path, env=env)


def is_earlier(one: Block, other: Block) -> bool:
    """Whether the other one continues it: a page in which one file grows."""
    page, _, line = one.place.partition(":")
    whole, _, at = other.place.partition(":")
    return page == whole in GROWING and int(line) < int(at)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trees of a run, of which one has forks and a failure."""
    from agentenv.rollout.archive import Archive, StepHeader
    from agentenv.rollout.frames import ArchiveConfig
    from tests.support.example_tree import example_tree

    folder = tmp_path_factory.mktemp("docs") / "run"
    header = StepHeader(1, 2, 1, "settings", 256, 1)
    kept = example_tree(lambda text: list(text.encode()))
    Archive(folder / "trees", ArchiveConfig()).write(header, [kept])
    return folder


# commands

SHELL = ("&", "&&", ";", "|", ">")  # end a command
RUN = {"train": TrainConfig, "sft": SFTRunConfig, "dpo": DPORunConfig}


class Line(NamedTuple):
    """A command line, in words."""

    place: str
    launcher: str
    words: list[str]


def lines() -> Iterator[Line]:
    """Command lines of launchers: each `agentenv NAME ...`."""
    for block in blocks("", "sh", "bash", "text"):
        for text in block.text.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:[\w./-]+/)?agentenv ([a-z]+(?:-[a-z]+)*)\b(.*)", text)
            if found:
                words = shlex.split(found[2], comments=True)
                ends = [place for place, word in enumerate(words) if word in SHELL]
                words = words[: ends[0]] if ends else words
                yield Line(f"{block.place} {found[1]}", found[1], words)


def test_the_docs_have_blocks_and_commands() -> None:
    assert len(list(blocks("toml"))) >= 16
    assert len(list(blocks("python"))) >= 6
    assert len(list(lines())) >= 60


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher ends where its work would begin."""
    monkeypatch.setattr(exits, "exit_code_of", lambda *_, **__: 0)
    for path in (ROOT / "launchers").rglob("*.py"):
        name = ".".join(["agentenv", *path.relative_to(ROOT).with_suffix("").parts])
        if "exit_code_of" in path.read_text(encoding="utf-8") and path.stem != "exits":
            module = importlib.import_module(name)
            if hasattr(module, "exit_code_of"):
                monkeypatch.setattr(module, "exit_code_of", lambda *_, **__: 0)


@pytest.mark.usefixtures("nothing_starts")
def test_command_lines_are_accepted_by_their_launcher() -> None:
    refused = []
    for place, launcher, words in lines():
        module = importlib.import_module(f"agentenv.launchers.{launcher.replace('-', '_')}")
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            try:
                code = 0
                given = [word for word in words if word != "..."]
                if launcher == "bench":
                    module._parse(given)
                elif launcher == "retriever":
                    module.read_config(given)
                else:
                    code = module.main(given)
            except SystemExit as end:
                code = end.code
        # Of the files created first.
        stored = words[:1] in (["audit"], ["signs"], ["report"], ["compare"], ["regrade"])
        if code not in (0, None) and not stored:
            refused.append(f"{place} {' '.join(words)}: {said.getvalue()[-300:]}")
    assert not refused, "\n".join(refused)


def test_keys_and_files_of_command_lines_exist() -> None:
    refused = []
    for place, launcher, words in lines():
        named_files = [word for word in words if word.startswith("configs/")]
        refused += [f"{place}: {name}" for name in named_files if not (ROOT / name).is_file()]
        if launcher in RUN and words and words[0].startswith("configs/"):
            overrides = [word for word in words[1:] if re.match(r"[a-z_.]+=", word)]
            own = [word for word in overrides if "my_code:" in word]
            try:
                if not own:
                    of_rl = "--self-critic" in words  # takes the policy and world of an RL run
                    load_config(TrainConfig if of_rl else RUN[launcher], ROOT / words[0], overrides)
            except ConfigError as error:
                refused.append(f"{place}: {error}")
    assert not refused, "\n".join(refused)


# keys in prose

TABLES = set(TrainConfig.__struct_fields__) | set(EvaluateConfig.__struct_fields__)


def test_keys_that_pages_name_exist() -> None:
    known = {entry.name for config in CONFIGS for entry in describe(config)}
    text = " ".join(sorted(known))
    strange = []
    for name in ("troubleshooting", "from-trl", "from-verifiers", "eight-gpus", "first-hour"):
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:\s*=[^`]*)?`", page):
            table, _, rest = key.partition(".")
            if table in TABLES and rest not in ("py", "jsonl", "png", "json", "log", "txt"):
                last = key.rpartition(".")[2]
                if key not in known and not re.search(rf"\b{table}\.(\S+\.)?{last}\b", text):
                    strange.append(f"{name}: {key}")
    assert not strange


# the site


def test_the_site_builds_without_a_warning_and_uses_no_other_host(tmp_path: Path) -> None:
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHON": sys.executable}
    ran("sh", ".ci/tree", env=env)
    build = ("mkdocs", "build", "--strict", "--site-dir", tmp_path)
    done = ran(sys.executable, "-m", *build, env=env)
    assert "WARNING" not in done.stderr
    asked = re.compile(
        r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//[^"'> ]+"""
    )
    strange = {
        page.name: found
        for page in tmp_path.rglob("*.html")
        if (
            found := [
                one
                for one in asked.findall(page.read_text(encoding="utf-8"))
                if 'rel="canonical"' not in one
            ]
        )
    }
    assert not strange
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").is_file()
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert "TrajectoryTree" in reference
