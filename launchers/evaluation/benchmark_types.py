"""What is known of a benchmark: where it is published, what its rows hold, how it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

Kind = Literal["math", "qa", "deep_search"]
Metric = Literal["math", "f1", "judge"]

MAX_CALLS = {"python": 5, "search": 10}  # of one question, in the evaluation of ARPO
SPARE_TURNS = 5  # for the answer, and calls that are answered with "no more calls"
PRESETS = {"math": "python", "qa": "search", "deep_search": "search+python"}
TOOLS: dict[str, tuple[str, ...]] = {
    "math": ("python",),
    "qa": ("search",),
    "deep_search": ("search", "python"),
}
ENVS: dict[str, dict[str, Any]] = {
    "math": {"id": "agentenv/CodeInterpreter-v0"},
    "qa": {"id": "agentenv/WebSearch-v0", "kwargs": {"open_page": False}},
    "deep_search": {"id": "agentenv/DeepSearch-v0"},
}


class Source(Struct, frozen=True):
    """Where a benchmark is published: its id on huggingface.co, the part that is evaluated, its
    licence, and what has to be known or done before."""

    hub: str
    part: str
    licence: str
    note: str = ""


class Benchmark(Struct, frozen=True, kw_only=True):
    """One benchmark. `kind` says which tools are there (maths: python, QA: search, deep search:
    both) and so chooses the environment, `metric` what the papers report: mathematical equivalence
    (backed by a judge), token F1, or an LLM judge.

    `num_questions` are asked unless more are wanted; 0 is all. `group_by` maps the fields that
    scores are split by to their columns; a dot goes into an object. A row with something in
    `attachment` cannot be asked as text and is left out. `aliases` is a column of further golds,
    `solution` one whose last box is the gold where no answer stands beside it, `literal` one that
    holds an object as text. With `encrypted`, question and answer may be base64 of the text XORed
    with the row's canary. `private` is what stands for an answer that is not published.
    """

    name: str
    title: str
    kind: Kind
    metric: Metric
    source: Source
    published: tuple[str, ...]
    num_questions: int = 0
    group_by: dict[str, str] = {}
    ids: tuple[str, ...] = ("id", "_id", "task_id", "unique_id")
    attachment: str = ""
    aliases: str = ""
    solution: str = ""
    literal: str = ""
    encrypted: bool = False
    private: str = ""
    prompt: str = ""
    also: tuple[str, ...] = ()

    @property
    def preset(self) -> str:
        """The system prompt, a preset of `agentenv.prompt`."""
        return self.prompt or PRESETS[self.kind]

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that the papers give the model."""
        return TOOLS[self.kind]

    @property
    def env_id(self) -> str:
        """The environment that has these tools."""
        return str(ENVS[self.kind]["id"])

    def usual_keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """How the benchmark is asked where the configuration does not say: env and its tools with
        the calls that the papers allow, the answer alone as reward, and the prompt.

        `given` are the keys that stand above. Of an environment or grader of another kind none of
        its keys are given here, since they would not be read.
        """
        names = self.tools
        env: Mapping[str, Any] = given.get("env") or {}
        grader: Mapping[str, Any] = given.get("grader") or {}
        keys: dict[str, Any] = {"prompt": {"template": self.preset}, "grader": {}}
        if env.get("id", self.env_id) == self.env_id:
            tools = [{"name": name, "max_calls": MAX_CALLS[name]} for name in names]
            num_calls = sum(MAX_CALLS[name] for name in names)
            keys["env"] = {**ENVS[self.kind], "tools": tools}
            keys["limits"] = {
                "max_tool_calls": num_calls,
                "max_turns": num_calls + SPARE_TURNS,
                "on_limit": "result",
            }
        if not grader.get("path") and grader.get("kind") != "custom":
            keys["grader"] = {"reward": "answer"}
            if not grader.get("judge"):
                keys["grader"]["kind"] = "layered"
        return keys

    @property
    def how_to_get(self) -> str:
        """One sentence on where the file comes from."""
        source = self.source
        note = f"; {source.note}" if source.note else ""
        return (
            f"{self.title} is published at huggingface.co/datasets/{source.hub} ({source.part}; "
            f"{source.licence}), columns {', '.join(self.published)}: "
            f"`hf download {source.hub} --repo-type dataset --local-dir DIR`{note}"
        )
