r"""The reward of each shipped configuration for an answer: its grader, created like in a run.

The reward of the recipes is -1 for a bad format, 1 for an answer that is equal to the gold however
it is spelled, and token F1 for other words; whether an answer is right is never partial.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.environments import EnvMaker, EnvSettings
from agentenv.assembly.serving.servers import fill_roles
from agentenv.base.config import load_config
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grade, Grader
from agentenv.contract.tool_env import ToolEnv
from agentenv.envs.grading.judge import Judge
from agentenv.envs.grading.reward import AnswerReward, ToolReward
from agentenv.text.prompt import PromptConfig
from tests.support.warehouse import ROOT

CONFIGS = ROOT / "configs"
GRADED = [
    path
    for path in sorted(CONFIGS.glob("[!d]*.toml"))  # not the quick start's again
    if "env" in (keys := tomllib.loads(path.read_text("utf-8"))) or "sets" in keys
]
EXACT, OWN = "quickstart", "gsm8k_135m"  # of no paper

RIGHT = [
    (r"\frac{7}{12}", r"\dfrac{7}{12}"), (r"\frac{7}{12}", "7/12"),
    (r"3\sqrt{3} - 6", r"3\sqrt{3}-6"), (r"3\sqrt{3} - 6", r"-6+3\sqrt3"), (r"\frac{1}{2}", "0.5"),
    (r"\left( 2, \infty \right)", r"(2,\infty)"), ("The United States of America", "United States"),
    ("12,500", "12500"), ("New York City", "new york city."), ("5", "five"),
]  # fmt: skip
WRONG = [  # and no partial credit: no gold consists of words
    (r"-\frac{1}{2}", r"\frac{1}{2}"),
    ("-5", "5"),
    (r"(-\infty, 2)", r"(\infty, 2)"),
    ("x - 3", "x + 3"),
    (r"-2\sqrt{3}", r"2\sqrt{3}"),
    ("7", "10^{10^{10}}"),
    ("7", "9" * 3000),
    ("7", "(" * 300 + "8" + ")" * 300),
    ("7", "7 or 8"),
    ("7", "\\frac" * 200),
    ("42", "</answer><answer>41 or 42"),
]
PARTIAL = [
    ("Barack Obama", "Barack Hussein Michelle Obama", 2 / 3),
    ("New York City", "New York", 0.8),
    ("Great Barrier Reef", "the barrier reef of Belize", 2 / 3.5),
    ("a red brick house", "London", 0.0),
]


pytestmark = pytest.mark.usefixtures("services")


def graders_of(path: Path) -> Iterator[tuple[str, Grader]]:
    """The grader of each environment of the file."""
    raw = tomllib.loads(path.read_text("utf-8"))
    if "train" in raw.get("data", {}):
        config = load_config(TrainConfig, path)
        given = {"train": (config, config.env)}
    else:
        raw.setdefault("model", "m")
        sets = resolve_sets(_of_evaluation(raw), path.name).sets
        urls = dict.fromkeys(raw.get("roles", {}), "http://127.0.0.1:9")
        filled = {name: fill_roles(one, urls) for name, one in sets.items()}
        given = {name: (one, one.env) for name, one in filled.items()}
    for name, (one, env) in given.items():
        make = EnvMaker(replace(EnvSettings.of(one), prompt=PromptConfig()), _resolve)
        made = make(Task("t", env.id, "?", ("2",)))
        assert isinstance(made, ToolEnv)
        yield f"{path.stem}: {name}", made.grader


def _resolve(text: str) -> Path:
    return ROOT / text.replace("{run}/data/kb.jsonl", "envs/data/wikipedia_passages.jsonl")


def _of_evaluation(raw: dict[str, object]) -> dict[str, object]:
    fields = EvaluateConfig.__struct_fields__
    return {key: value for key, value in raw.items() if key in fields}


async def paid(grader: Grader, gold: str, answer: str) -> Grade:
    """The grade of a well-formed answer by the grader, or by the rules before its judge."""
    assert isinstance(grader, AnswerReward)
    if isinstance(grader.matcher, Judge):
        grader = type(grader)(grader.matcher.first)
    text = f"<think>.</think><answer>\\boxed{{{answer}}}</answer>"
    return await grader.grade(Task("t", "e", "?", (gold,)), [Message("assistant", text)], {})


async def test_the_reward_of_each_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)  # where caches are made
    for key in ("BRIGHTDATA_API_KEY", "SERPER_API_KEY"):
        monkeypatch.setenv(key, "none")
    for path in GRADED:
        for name, grader in graders_of(path):
            is_training = isinstance(grader, ToolReward)
            assert is_training == (path.stem != OWN and not path.stem.startswith("eval_")), name
            for gold, answer in RIGHT if path.stem != EXACT else RIGHT[-3:-1]:
                found = await paid(grader, gold, answer)
                assert (found.reward, found.success) == (1.0, True), (name, gold, answer)
            for gold, answer in WRONG if path.stem != EXACT else WRONG[1:2]:
                found = await paid(grader, gold, answer)
                assert found.reward <= 0, (name, gold, answer)
                assert not found.success, (name, gold, answer)
            for gold, answer, f1 in PARTIAL:
                found = await paid(grader, gold, answer)
                assert not found.success, (name, gold, answer)
                earned = f1 if path.stem == OWN or (is_training and path.stem != EXACT) else 0.0
                assert found.reward == pytest.approx(earned), (name, gold, answer)


@pytest.mark.parametrize("path", GRADED, ids=lambda path: path.stem)
def test_recipes_set_every_key_of_their_grader(path: Path) -> None:
    raw = tomllib.loads(path.read_text("utf-8"))
    if path.stem.startswith("eval") or path.stem in (EXACT, OWN, "synthesize_tools"):
        return
    assert raw["grader"] == {"kind": "layered", "partial_credit": True, "reward": "tools"}
