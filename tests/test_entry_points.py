"""A package that is merely installed adds its environments, and listing them imports nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentenv import env as registry
from agentenv.env import EnvSpec
from agentenv.errors import ConfigError

EXAMPLE = Path(__file__).parent / "example_package"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed by pip into a folder of its own, without a network."""
    folder = tmp_path_factory.mktemp("example")
    source = folder / "source"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    options += ["--disable-pip-version-check", "--root-user-action", "ignore"]
    target = folder / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)],
        check=True,
    )
    return target


def python(site: Path, code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(site)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.strip()


def test_an_installed_package_is_listed_without_being_imported(installed: Path) -> None:
    code = "import agentenv\nprint('acme/Dice-v0' in agentenv.envs(), 'acme_envs' in sys.modules)"
    assert python(installed, code) == "True False"


def test_an_episode_of_an_installed_environment(installed: Path) -> None:
    code = """
import asyncio, agentenv
from agentenv import Message, Task, ToolCall

async def main():
    env = agentenv.make("acme/Dice-v0", Task("t", "", "What does it show?", ("6",)))
    prompt, _ = await env.reset(seed=1)
    observation, *_ = await env.step(Message("assistant", "", (ToolCall("roll", {"sides": 6}),)))
    _, reward, *_ = await env.step(Message("assistant", "It shows 6"))
    await env.close()
    print(prompt[0].content, observation[0].content, reward)

asyncio.run(main())
"""
    assert python(installed, code) == "Roll, then say what you saw. 6 1.0"


def test_a_broken_entry_point_names_its_package(installed: Path) -> None:
    code = """
import agentenv
try:
    agentenv.make("acme/Broken-v0", agentenv.Task("t", "", "?", ("6",)))
except agentenv.ConfigError as error:
    print(error)
"""
    said = python(installed, code)
    assert "'acme_envs.missing:NoEnv', registered by the package acme-envs" in said


def test_two_packages_that_claim_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    claims = [EnvSpec(f"{name}:Env", {}, f"the package {name}") for name in ("one", "two")]
    monkeypatch.setattr(registry, "_installed", {"x/Same-v0": claims})
    with pytest.raises(ConfigError, match="claimed by the package one and the package two"):
        registry.spec("x/Same-v0")
    registry.register("x/Same-v0", "mine:Env")
    assert registry.spec("x/Same-v0").entry_point == "mine:Env"
    del registry._registry["x/Same-v0"]
