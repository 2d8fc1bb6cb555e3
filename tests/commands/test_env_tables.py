"""[python], [search], [grader] and [env.variants.NAME] reach every environment that reads them and
are refused otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentenv
from agentenv.assembly.checks.start_checks import check_graders
from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.assembly.keys.rl import TABLES, TrainConfig
from agentenv.assembly.parts.environments import EnvMaker, tables_of
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.tool_env import ToolEnv
from agentenv.envs.code_interpreter import PythonTool
from agentenv.envs.grading.reward import ExactMatch
from agentenv.envs.search.service import SearchPagesTool
from agentenv.evaluation.subject import find_subject, of_run, resolve

INTERPRETER = {"timeout_s": 3.0, "preload": []}
SEARCH = {"mode": "pages", "max_results": 2}
READS = {
    "agentenv/CodeInterpreter-v0": ("python", "grader"),
    "agentenv/DeepSearch-v0": ("python", "search", "grader"),
    "agentenv/QAGrader-v0": ("grader",),
    "agentenv/Quickstart-v0": ("grader",),
    "agentenv/WebSearch-v0": ("search", "grader"),
}


pytestmark = pytest.mark.usefixtures("services")


def task(env_id: str, number: int = 0) -> Task:
    return Task(f"t{number}", env_id, "How many moons?", ("two",))


def maker(env: dict[str, Any], run: Path = Path("runs/x"), **tables: Any) -> EnvMaker:
    config = build_config(EvaluateConfig, {"env": env, "data": "x", **tables}, "test")

    def resolve(text: str) -> Path:
        return Path(text.replace("{run}", str(run)))

    return EnvMaker(config, resolve)


def test_every_registered_environment_has_a_test() -> None:
    """Except programs and external environments, which have their own test files."""
    ids = {env_id for env_id in agentenv.env_ids() if env_id.startswith("agentenv/")}
    apart = {f"agentenv/{name}-v0" for name in ("Gymnasium", "OpenEnv", "Program", "Verifiers")}
    assert ids - apart == {*READS}


@pytest.mark.parametrize("env_id", READS)
async def test_a_table_reaches_the_environment_or_is_refused(env_id: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(task, written, calls):\n    return 0.75\n")
    grader = {"path": "{run}/mine.py", "name": "score"}
    given = {"python": INTERPRETER, "search": SEARCH, "grader": grader}
    corpus = {"corpus": "envs/data/wikipedia_passages.jsonl"}
    kwargs = corpus if env_id.endswith("Quickstart-v0") else {}
    for name in {*TABLES} - {*READS[env_id]}:
        make = maker({"id": env_id, "kwargs": kwargs}, **{name: given[name]})
        with pytest.raises(ConfigError, match=rf"\[{name}\]: .*{env_id}"):
            make.check_read([task(env_id)])
    read = {name: given[name] for name in READS[env_id]}
    make = maker({"id": env_id, "kwargs": kwargs}, tmp_path, **read)
    make.check_read([task(env_id)])
    env = make(task(env_id))
    await env.reset(seed=1)
    tools = getattr(env, "tools")  # noqa: B009
    if "python" in read:
        assert isinstance(tools["python"], PythonTool)
        assert tools["python"].timeout_s == 3.0
    if "search" in read:
        assert isinstance(tools["search"], SearchPagesTool)
        assert tools["search"].service.config.sizes.mode == "pages"
        assert tools["search"].service.config.max_results == 2
        observation, *_ = await env.step(
            Message("assistant", "", (ToolCall("search", {"query": "Super Bowl"}),))
        )
        assert observation[0].content.count("Page ") == 2
    _, reward, *_ = await env.step(Message("assistant", "two"))
    assert reward == 0.75
    await env.close()


async def test_rows_choose_tools_and_grader_by_a_variant() -> None:
    variant = {
        "id": "agentenv/DeepSearch-v0",
        "tools": [{"name": "python", "max_calls": 1}],
        "grader": {"kind": "layered", "math": False, "reward": "answer"},
    }
    env = {"id": "agentenv/DeepSearch-v0", "variants": {"maths": variant}}
    make = maker(env, python=INTERPRETER, grader={"kind": "f1"})
    rewards = {}
    for name in ("maths", "agentenv/DeepSearch-v0"):
        one = make(task(name))
        _, info = await one.reset(seed=1)
        _, rewards[name], *_ = await one.step(Message("assistant", r"\boxed{2}"))
        rewards[name, "tools"] = [tool["name"] for tool in info["tools"]]
        await one.close()
    assert rewards["maths"] == 1.0
    assert rewards["maths", "tools"] == ["python"]
    assert rewards["agentenv/DeepSearch-v0"] == -1.0  # no think and answer tags
    assert rewards["agentenv/DeepSearch-v0", "tools"] == ["search", "python"]


ITSELF = __name__
NUMBER = 3


class WithoutTask(ToolEnv):
    def __init__(self) -> None:
        super().__init__(task("x"), tools=[], grader=ExactMatch())


def with_keys(**_: Any) -> None:
    """Takes no task."""


@pytest.mark.parametrize("name", ["NUMBER", "WithoutTask", "with_keys"])
def test_what_takes_no_task_is_refused_as_an_environment(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.id: .*{name}.* class or function of \(task"):
        maker({"id": f"{ITSELF}:{name}"})


def test_keys_of_an_environment_without_rows_are_refused() -> None:
    make = maker({"id": "agentenv/QAGrader-v0", "kwargs": {"prompt": "Be brief."}})
    with pytest.raises(ConfigError, match=r"env\.kwargs.*env\.tools"):
        make.check_read([task("agentenv/DeepSearch-v0")], all_rows=True)


async def test_three_rows_of_each_environment_are_graded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"def score(task, written, calls):\n    with open({str(tmp_path / 'seen')!r}, 'a') as file:"
        "\n        file.write(task.id + '\\n')\n    return 1.0\n"
    )
    grader = {"path": str(path), "name": "score"}
    make = maker({"id": "agentenv/QAGrader-v0"}, grader=grader)
    ids = ["agentenv/QAGrader-v0"] * 5 + ["agentenv/WebSearch-v0"] * 2
    await check_graders(make, [task(env_id, n) for n, env_id in enumerate(ids)])
    assert (tmp_path / "seen").read_text().split() == ["t0", "t1", "t2", "t5", "t6"]


def test_an_evaluation_inherits_the_tables_of_its_run(tmp_path: Path) -> None:
    raw = {
        "model": {"path": "m"}, "env": {"id": "agentenv/DeepSearch-v0"}, "data": {"train": "x"},
        "algorithm": {"name": "grpo"}, "train": {"num_steps": 1}, "search": SEARCH,
        "python": INTERPRETER, "eval": {"sets": {"a": {"path": "x"}}},
    }  # fmt: skip
    config = build_config(TrainConfig, raw, "test")
    (tmp_path / "config.json").write_text(json.dumps(agentenv.base.config.to_plain(config)))
    again = resolve_sets(of_run(tmp_path, ["a"]), "test").sets["a"]
    assert tables_of(again) == tables_of(config)
    assert again.search is not None
    assert again.grader is None


def test_the_engine_keys_that_an_endpoint_does_not_use_are_named() -> None:
    subject, lines = find_subject("http://h:1", model="m"), list[str]()
    engine = {"name": "vllm", "max_model_len": 9, "servers": {}}
    given = {"engine": engine, "env": {"id": "a/b-v0"}}
    build = lambda raw, _: raw["engine"]  # noqa: E731
    found = resolve(subject, "f.toml", given, [], "", EvaluateConfig, build, lines.append)
    assert (found["name"], found["url"]) == ("openai", "http://h:1")
    assert [line.partition(" ")[0] for line in lines] == ["f.toml:"]
    assert ["max_model_len, servers" in line for line in lines] == [True]
