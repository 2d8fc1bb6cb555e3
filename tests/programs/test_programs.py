"""Agents of other libraries, unchanged in their sandbox: their tokens, forks, refusals, processes.

A folder here is an agent with its `program.toml`:

    contexts     the kinds of contexts that it opens, with their causes; none: one context
    environment  the folder whose packages it uses (`.ci/program`), itself by default
    [[turns]]    the policy's turns, in order, the last one from then on
    [program]    env.kwargs.program; {environment} is its folder of packages

A turn is a `text`, which follows a thought, with a `call`, if the prompt has a tool of that name;
else the last turn takes its place. {n} is a random number; {step} counts the turns: the next turn
is the one after the last {step} in the prompt.
"""

from __future__ import annotations

import json
import re
import tomllib
from array import array
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import ToolCall
from agentenv.contract.env_registry import make
from agentenv.endpoint.capture import CaptureSession
from agentenv.engines.scripted import ScriptedEngine
from agentenv.text.native import NativeRenderer
from tests.envs.sandbox.test_program import MARK
from tests.envs.sandbox.test_program_env import grown
from tests.support.chat_models import QWEN3, make_tokenizer
from tests.support.sources import ROOT
from tests.test_capture import ForkOnce

pytestmark = pytest.mark.heavy

HERE = Path(__file__).parent
NAMES = sorted(path.parent.name for path in HERE.glob("*/program.toml"))
MANY = 1 << 19  # tokens, of bytes
LIMITS = {
    "max_prompt_tokens": MANY, "max_response_tokens": MANY, "max_turn_tokens": MANY,
    "max_tool_result_tokens": MANY, "max_turns": 64, "max_tool_calls": 64, "env_timeout_s": 300,
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    text = (HERE / name / "program.toml").read_text(encoding="utf-8")
    chosen = tomllib.loads(text).get("environment", name)
    folder = ROOT / ".programs" / chosen
    lists = (HERE / chosen / one for one in ("requirements.txt", "package.json"))
    if any(one.exists() for one in lists) and not (folder / ".complete").is_file():
        pytest.skip(f"no packages: sh .ci/program {chosen}")
    return tomllib.loads(text.replace("{environment}", str(folder)))


def policy(renderer: NativeRenderer, turns: list[Any]) -> Any:
    """The script of the turns."""

    def turn(prompt: str, rng: Random) -> str:
        step = max((int(one) for one in re.findall(r"step-(\d+)", prompt)), default=-1) + 1
        chosen = turns[min(step, len(turns) - 1)]
        call = chosen.get("call")
        if call and not re.search(rf'"name": ?"{call["name"]}"', prompt):
            chosen = turns[-1]
        filled = json.dumps(chosen).replace("{step}", f"step-{step}")
        found = json.loads(re.sub(r"\{n\}", lambda _: str(rng.randrange(10**6)), filled))
        text = f"<think>\nI think {rng.random()}\n</think>\n\n{found.get('text', '')}"
        calls = [ToolCall(**found["call"])] if "call" in found else []
        return renderer.calling(text, calls)

    return turn


class Recorded(ScriptedEngine):
    """An engine with its answers: prompt, tokens, log-probs."""

    answers: list[Any]

    async def generate(self, prompt_ids: Any, *given: Any, **more: Any) -> Any:
        found = await super().generate(prompt_ids, *given, **more)
        Recorded.answers.append([list(prompt_ids), found.token_ids, [*array("f", found.logprobs)]])
        return found


def sampled(tree: TrajectoryTree) -> list[Any]:
    """The turns of a tree in the form of an engine's answers."""
    found = []
    for node in tree.nodes:
        before = [i for one in tree.path(node)[:-1] for i in one.action_ids + one.observation_ids]
        if node.action_ids:
            found.append([before, [*node.action_ids], [*node.logprobs]])
    return found


def left() -> list[str]:
    """Processes of programs that still run."""
    found = (one.info for one in psutil.process_iter(["environ", "cmdline"]))
    return [" ".join(one["cmdline"] or ()) for one in found if MARK in (one["environ"] or ())]


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_has_its_tokens_once_and_trained_and_forks_exactly(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = read(name)
    program = {"folder": str(HERE / name), "reward": "exit", **given["program"]}
    program["variables"] = {**program.get("variables", {}), MARK: "1"}
    delivered: Counter[CaptureSession] = Counter()
    written = CaptureSession.written

    def counted(self: CaptureSession, request: Any) -> None:
        delivered[self] += request.id not in self._written
        written(self, request)

    monkeypatch.setattr(CaptureSession, "written", counted)
    Recorded.answers = []
    renderer = NativeRenderer(make_tokenizer(QWEN3))
    make_env = partial(make, "agentenv/Program-v0", program=program)
    turns = policy(renderer, given["turns"])
    tree = grown(make_env, turns, ForkOnce(4), renderer=renderer, kind=Recorded, **LIMITS)
    assert left() == []
    for leaf in tree.leaves():
        assert (leaf.end, leaf.reward) == ("terminated", 1.0), leaf.error or leaf.info
        assert not [one for one in leaf.info["endpoint"] if one.startswith("refused/")]
    assert sum("+" in leaf.branch for leaf in tree.leaves()) == 2, "exact replays"
    assert sorted(sampled(tree)) == sorted(Recorded.answers)
    trained = {node.index for one in tree.trajectories() for node in one.path if node.action_ids}
    replayed = sum(one.counts["replayed"] for one in delivered)
    assert delivered.total() - replayed == len(trained)
    opened = [node.info for node in tree.nodes if "context" in node.info]
    kinds = {"/".join([one["context"], *filter(None, [one.get("cause")])]) for one in opened}
    expected = set(given.get("contexts", ()))
    assert kinds == expected or (kinds < expected and "parallel" in expected), "times differ"
