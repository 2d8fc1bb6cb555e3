"""From a tree with one leaf to the row that is stored of it."""

from __future__ import annotations

from typing import Any

from agentenv.assist.counts import count_calls
from agentenv.chat import ChatRenderer
from agentenv.evaluate import Answer
from agentenv.renderer import Renderer
from agentenv.tree import Node, Trajectory
from envs.grading.answer import final_answer
from launchers.evaluation.rows import EvalRow


def row_of(dataset: str, answer: Answer, seed: int) -> EvalRow:
    """The row; of a failed trajectory too, as far as it came."""
    question, tree = answer.question, answer.tree
    task, renderer = question.task, question.actor.renderer
    (leaf,) = tree.leaves()
    trajectory = Trajectory(tree.history(leaf))
    segments = _segments(trajectory.path, renderer)
    said = [segment["policy"] for segment in segments if "policy" in segment]
    failed = leaf.end == "failed"
    prompt_tokens, tool_tokens = _counts(trajectory, renderer)
    calls = [call for node in trajectory.path for call in node.info.get("tool_calls", ())]
    assist: dict[str, float] = leaf.info.get("assist") or {}
    if not assist:  # the browser agent belongs to the env, whoever the actor is
        count_calls(assist, calls)
    versions = [span.version for node in trajectory.path for span in node.version_spans]
    return EvalRow(
        dataset=dataset,
        task=task.id,
        sample=question.sample,
        kind=task.kind,
        env_id=task.env_id,
        question=task.question,
        answers=list(task.answers),
        metadata=task.metadata,
        seed=seed,
        segments=segments,
        prediction=final_answer(said[-1]) if said and not failed else "",
        tool_calls=calls,
        num_turns=sum(bool(node.action_ids) for node in trajectory.path),
        num_retries=answer.num_retries,
        prompt_tokens=prompt_tokens,
        action_tokens=trajectory.num_action_tokens,
        tool_tokens=tool_tokens,
        seconds=round(answer.seconds, 4),
        end=str(leaf.end),
        limit=str(leaf.limit) if leaf.limit is not None else None,
        error=leaf.error,
        reward=0.0 if failed else trajectory.reward,
        success=trajectory.success and not failed,
        reason=str(leaf.info.get("reason", "")),
        parts=dict(leaf.info.get("parts", {})),
        assist=assist,
        abandoned=[
            renderer.decode(node.action_ids) + renderer.decode(node.observation_ids)
            for node in tree.nodes
            if "abandoned" in node.info
        ],
        policy_versions=[min(versions), max(versions)] if versions else [],
    )


def _segments(path: list[Node], renderer: Renderer) -> list[dict[str, str]]:
    """The text in order with who wrote it; an end-of-sequence token apart."""
    segments: list[dict[str, str]] = []
    eos_ids: Any = getattr(getattr(renderer, "codec", None), "eos_ids", ())
    for node in path:
        ids = node.action_ids
        if ids:
            ended = ids[-1] in eos_ids
            segment = {"policy": renderer.decode(ids[:-1] if ended else ids)}
            segments.append({**segment, "eos": renderer.decode(ids[-1:])} if ended else segment)
        if node.observation_ids:
            segments.append({"env": renderer.decode(node.observation_ids)})
    return segments


def _counts(trajectory: Trajectory, renderer: Renderer) -> tuple[int, int]:
    """Tokens of the prompt and of what the env wrote after it; where pieces of text stand for
    tokens, as the endpoint counted them, if it did."""
    turns = trajectory.turns
    prompt = len(trajectory.path[0].observation_ids)
    tools = sum(len(node.observation_ids) for node in turns if node.parent is not None)
    asked = [node for node in turns if node.action_ids]
    one_context = all(node.parent is not None for node in turns)
    if isinstance(renderer, ChatRenderer) and asked and one_context:
        before = [renderer.num_prompt_tokens(node.action_ids) for node in asked]
        if all(before):
            sampled = sum(len(node.action_ids) for node in asked[:-1])
            return before[0], max(0, before[-1] - before[0] - sampled)
    return prompt, tools
