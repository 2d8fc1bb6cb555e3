"""Shipped environments through `gymnasium.make`: the checker, without a warning."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agentenv.adapters.gym
from agentenv.base.types import Task

OWN = ["CodeInterpreter", "DeepSearch", "QAGrader", "Quickstart", "WebSearch"]
# Of a command, a server, a package.
NAMES = sorted([*OWN, "Gymnasium", "OpenEnv", "Program", "Verifiers"])
TASK = Task("t", "", "How much is 24 and 10?", ("34",))


def own_kwargs(name: str, folder: Path) -> dict[str, Any]:
    """What this environment needs beside tasks."""
    own: dict[str, Any] = {}
    if name in ("CodeInterpreter", "DeepSearch"):
        own["python"] = {"preload": [], "timeout_s": 20.0}
    if name == "Quickstart":
        own["corpus"] = str(folder / "kb.jsonl")
        Path(own["corpus"]).write_text('{"id": "1", "title": "Lima", "text": "A city."}\n')
    if name == "QAGrader":
        own["grader"] = {"kind": "exact"}
    return {"tasks": [TASK, TASK], **own}


@pytest.mark.parametrize("name", OWN)
def test_the_checker_of_gymnasium_accepts_the_environments(name: str, tmp_path: Path) -> None:
    env = gymnasium.make(f"agentenv/{name}-v0", **own_kwargs(name, tmp_path))
    check_env(env.unwrapped)
    env.close()


TURNS = {"search": "<search>Lima</search>", "python": "<python>24 + 10</python>"}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", OWN)
def test_every_registered_environment_runs_in_each_vector_mode(
    name: str, mode: str, tmp_path: Path
) -> None:
    """Two episodes that call a tool, if there is one, and answer."""
    own = own_kwargs(name, tmp_path)
    env_id = f"agentenv/{name}-v0"
    if mode == "async":
        own["vector_kwargs"] = {"shared_memory": False}
    vector = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode=mode, **own)
    assert vector.spec is not None
    assert (vector.spec.id, vector.num_envs) == (env_id, 2)
    prompts, infos = vector.reset(seed=1)
    assert all(TASK.question in prompt for prompt in prompts)
    assert vector.observation_space.contains(prompts)
    for turn in [TURNS[tool["name"]] for tool in infos["tools"][0] if tool["name"] in TURNS]:
        shown, _, terminated, truncated, _ = vector.step([f"<think>.</think>{turn}"] * 2)
        assert all("<result>" in text for text in shown), shown
        assert not (terminated | truncated).any()
    answer = r"<think>.</think><answer>\boxed{34}</answer>"
    _, rewards, terminated, _, infos = vector.step([answer, "no"])
    assert terminated.all()
    assert rewards[0] > rewards[1]
    vector.close()


SHIPPED = """
import sys, agentenv
ids = agentenv.env_ids()
heavy = "agentenv.envs", "aiohttp", "gymnasium", "torch"
loaded = [name for name in heavy if name in sys.modules]
import gymnasium
task = agentenv.Task("t", "", "How much is 24 and 10?", ("34",))
env = gymnasium.make("agentenv.adapters.gym:agentenv/CodeInterpreter-v0", tasks=[task])
env.reset(seed=1)
shown, *_ = env.step("<python>24 + 10</python>")
env.close()
import agentenv.envs
print([name for name in ids if name.startswith("agentenv/")], loaded, repr(shown))
print(agentenv.env_ids() == ids)
"""


def test_gymnasium_finds_the_environments_of_an_installed_agentenv_without_an_import(
    tmp_path: Path,
) -> None:
    """A stale editable install lacks the entry points: pip install -e . --no-deps refreshes it."""
    result = subprocess.run(
        [sys.executable, "-c", SHIPPED], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    names = [f"agentenv/{name}-v0" for name in NAMES]
    assert result.stdout.splitlines() == [f"{names} [] ' <result>\\n34\\n</result>'", "True"]


def test_entry_points_and_registrations_are_the_same() -> None:
    import envs

    project = tomllib.loads((Path(envs.__file__).parents[1] / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]["agentenv.envs"]
    assert sorted(declared) == [f"agentenv/{name}-v0" for name in NAMES]
    for env_id, entry_point in declared.items():
        assert agentenv.contract.env_registry.spec(env_id).entry_point == entry_point
