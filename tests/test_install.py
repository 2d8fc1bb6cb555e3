"""What `pip install agentenv` brings, without extras, in an environment of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "deepspeed", "transformers", "vllm", "sglang", "matplotlib", "scipy", "pandas")
EPISODE = """
import asyncio, sys
import agentenv, envs, my_env
from agentenv import Message, Task, ToolCall
from agentenv.testing import check_tool_env

task = Task("t", my_env.PROMPT, "How many bolts are there?", ("1240",))
actions = [Message("assistant", "", (ToolCall("stock", {"item": "bolts"}),))]
actions += [Message("assistant", "1240")]
asyncio.run(check_tool_env(lambda task: agentenv.make("me/Warehouse-v0", task), task, actions))
print(*sorted(agentenv.env_ids()))
print("loaded", *sorted(set(sys.argv[1:]) & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the package and what it needs."""
    folder = tmp_path_factory.mktemp("light")
    source = folder / "source"
    source.mkdir()
    for name in ("agentenv", "envs", "learners", "launchers", "reference"):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(source)]
    subprocess.run([str(python), *install], check=True, cwd=folder)
    return python


def run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_it_brings_none_of_the_training(light: Path, tmp_path: Path) -> None:
    listed = run(light, tmp_path, "-m", "pip", "list", "--format=freeze").stdout
    found = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert "agentenv" in found
    assert not found & set(HEAVY)


def test_an_author_writes_and_checks_an_environment(light: Path, tmp_path: Path) -> None:
    """The environment of the README, held against the contract."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "@tool" in block
    )
    (tmp_path / "my_env.py").write_text(f'PROMPT = ""\n{code}', encoding="utf-8")
    done = run(light, tmp_path, "-c", EPISODE, *HEAVY)
    assert done.returncode == 0, done.stderr
    ids, loaded = done.stdout.splitlines()
    assert {"agentenv/QAGrader-v0", "me/Warehouse-v0"} <= set(ids.split())
    assert loaded == "loaded"


@pytest.mark.parametrize("command", ["train", "evaluate", "sft"])
def test_a_command_says_which_extra_it_needs(light: Path, tmp_path: Path, command: str) -> None:
    done = run(light, tmp_path, "-m", f"launchers.{command}", "--help")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "error: the commands need torch, transformers, deepspeed and more, which are missing here: "
        "pip install 'agentenv[train]'"
    )
