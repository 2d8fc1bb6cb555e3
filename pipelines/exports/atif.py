"""Trajectories as ATIF, the Agent Trajectory Interchange Format of Harbor: one JSON file each.

The format knows one line of steps. A fork is a trajectory of its own, whose steps that it shares
with another are marked `is_copied_context`, so that a reader who trains on all files trains on each
once; `extra.forked_from` names trajectory and step. All trajectories of a tree have one
`session_id`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from agentenv.errors import DISTRIBUTION
from agentenv.pipelines.run.records import Branch, Question, Turn

SCHEMA = "ATIF-v1.7"


def trajectory(
    question: Question, branch: Branch, session: str, model: str, source: dict[str, Any]
) -> dict[str, Any]:
    """One document. `session` names the question within the run, `source` says where it is from."""
    path = question.path(branch)
    steps: list[dict[str, Any]] = [{"step_id": 1, "source": "user", "message": question.prompt}]
    for owner, turn in path:
        steps.append(_step(len(steps) + 1, turn, copied=owner is not branch))
    names = ("task", "kind", "question", "answers")
    extra = {**source, **{name: getattr(question, name) for name in names}, **question.facts}
    extra["branch"] = branch.name
    if branch.parent is not None:
        shared = sum(owner is not branch for owner, _ in path)
        parent = f"{session}/{branch.parent}"
        extra["forked_from"] = {"trajectory_id": parent, "step_id": shared + 1}
    document = {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": f"{session}/{branch.name}",
        "agent": {"name": "agentenv", "version": _version(), "model_name": model},
        "steps": steps,
        "final_metrics": _final(question, branch, path, len(steps)),
        "extra": extra,
    }
    clean: dict[str, Any] = _without_none(document)
    return clean


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


def _final(
    question: Question, branch: Branch, path: list[tuple[Branch, Turn]], num_steps: int
) -> dict[str, Any]:
    contexts, sampled = ([getattr(turn, name) for _, turn in path] for name in _COUNTS)
    scores = question.scores if len(question.branches) == 1 else {}
    return {
        "total_prompt_tokens": sum(contexts) if None not in contexts else None,
        "total_completion_tokens": sum(sampled) if None not in sampled else None,
        "total_steps": num_steps,
        "extra": {**{name: getattr(branch, name) for name in _ENDED}, **scores, **branch.facts},
    }


_COUNTS = ("num_context", "num_tokens")
_ENDED = ("reward", "success", "end", "limit", "error", "reason")


def _step(step_id: int, turn: Turn, *, copied: bool) -> dict[str, Any]:
    names = [f"{turn.key}-call-{place}" for place in range(1, len(turn.calls) + 1)]
    step: dict[str, Any] = {
        "step_id": step_id,
        "source": "agent",
        "message": turn.text,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": turn.num_context,
            "completion_tokens": turn.num_tokens,
            "prompt_token_ids": turn.prompt_ids or None,
            "completion_token_ids": turn.token_ids or None,
            "logprobs": turn.logprobs or None,
        },
        "extra": turn.facts,
    }
    if copied:
        step["is_copied_context"] = True
    if turn.calls:
        step["tool_calls"] = [
            {
                "tool_call_id": name,
                "function_name": str(call["name"]),
                "arguments": call.get("arguments", {}),
                "extra": {key: call[key] for key in ("ok", "error", "duration_s") if key in call},
            }
            for name, call in zip(names, turn.calls, strict=True)
        ]
    if turn.answer:
        # what several calls of a turn answered is one text; it stands with the last of them
        result = {"source_call_id": names[-1] if names else None, "content": turn.answer}
        step["observation"] = {"results": [result]}
    return step


def _without_none(value: Any) -> Any:
    """The same without keys that have no value: the format has no null."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return value
