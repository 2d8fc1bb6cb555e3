"""Training trajectories as rows of JSON, and rows as text, for people."""

from __future__ import annotations

from typing import Any

from agentenv.data.files import Row
from agentenv.tree import Trajectory, TrajectoryTree


def trajectory_row(tree: TrajectoryTree, trajectory: Trajectory, tokenizer: Any) -> Row:
    """A trajectory as readable JSON: text by segment with who wrote it, calls, reward parts."""
    segments: list[Row] = []
    for node in trajectory.path:
        if node.action_ids:
            segments.append({"policy": tokenizer.decode(node.action_ids)})
        if node.observation_ids:
            segments.append({"env": tokenizer.decode(node.observation_ids)})
    leaf = trajectory.leaf
    return {
        "task": tree.task.id,
        "kind": tree.task.kind,
        "question": tree.task.question,
        "answers": list(tree.task.answers),
        "tree": tree.index,
        "branch": leaf.branch,
        "fork_parent": _fork_parent(trajectory),
        "segments": segments,
        "num_tokens": len(trajectory.token_ids),
        "loss_mask": _runs(trajectory.loss_mask),
        "tool_calls": [
            call for node in trajectory.path for call in node.info.get("tool_calls", ())
        ],
        "reward": trajectory.reward,
        "parts": leaf.info.get("parts", {}),
        "success": trajectory.success,
        "end": leaf.end,
        "limit": leaf.limit,
        "policy_versions": sorted(
            {span.version for node in trajectory.path for span in node.version_spans}
        ),
    }


def readable(row: Row) -> str:
    """A row, of training or of an evaluation, as text: the question, the verdict, and who wrote
    what; without the prompt."""
    ended = f"{row['end']} by {row['limit']}" if row["limit"] is not None else row["end"]
    lines = [
        f"--- {row['kind']}: {row['question']}",
        f"    expected {' or '.join(row['answers'])}; {'right' if row['success'] else 'wrong'}, "
        f"reward {row['reward']:g}, {ended}",
    ]
    for segment in row["segments"][1:]:
        if "policy" in segment:
            lines.append(f"policy | {segment['policy']}")
        else:
            lines.append(f"env    | {segment['env'].strip()}")
    return "\n".join(lines)


def _fork_parent(trajectory: Trajectory) -> Row | None:
    """The branch and node this trajectory was forked from; None for a from-scratch one."""
    leaf = trajectory.leaf
    if "+" not in leaf.branch:
        return None
    shared = [node for node in trajectory.path if node.branch != leaf.branch]
    return {"branch": shared[-1].branch, "node": shared[-1].index}


def _runs(mask: list[bool]) -> list[int]:
    """Run lengths of a mask, beginning with the tokens that are not trained."""
    runs, current = [0], False
    for value in mask:
        if value != current:
            runs.append(0)
            current = value
        runs[-1] += 1
    return runs
