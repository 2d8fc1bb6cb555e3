"""Training trajectories as rows of JSON, and rows as text, for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from agentenv.data_files import Row
from agentenv.disk import write_whole
from agentenv.encoder import fast_decoder
from agentenv.tree import Trajectory, TrajectoryTree, of_frame

Decode = Callable[[Sequence[int]], str]


class TrajectoryWriter:
    """Writes the trajectories of a step in a process of its own: the text of all tokens takes a
    good part of a second there, in which no rollout would go on. A handler of
    `agentenv.worker_pool.WorkerPool`; `tokenizer` is the path of its file."""

    def __init__(self, tokenizer: str) -> None:
        from tokenizers import Tokenizer

        self._decode = fast_decoder(Tokenizer.from_file(tokenizer))

    def __call__(self, job: dict[str, Any]) -> dict[str, Any]:
        """See `write_rows`, whose arguments a job holds; the trees as frames, the rows as JSON."""
        trees = map(of_frame, job["trees"])
        path = Path(job["path"]) if job["path"] else None
        num_chars, shown = write_rows(trees, self._decode, path, job["wanted"])
        return {"num_chars": num_chars, "shown": [json.dumps(row) for row in shown]}


def write_rows(
    trees: Iterable[TrajectoryTree], decode: Decode, path: Path | None, wanted: int
) -> tuple[int, list[Row]]:
    """Write each trajectory as a line of JSON, if there is a path; the characters that were
    written, and as many rows as wanted, the first."""
    every = chain.from_iterable(trajectory_rows(tree, decode) for tree in trees)
    if path is None:
        return 0, list(islice(every, wanted))
    num_chars, shown = 0, list[Row]()

    def lines() -> Iterator[bytes]:
        nonlocal num_chars
        for row in every:
            line = json.dumps(row, ensure_ascii=False) + "\n"
            num_chars += len(line)
            if len(shown) < wanted:
                shown.append(row)
            yield line.encode()

    write_whole(path, lines())
    return num_chars, shown


def trajectory_rows(tree: TrajectoryTree, decode: Decode) -> Iterator[Row]:
    """The trajectories of a tree, each as readable JSON: text by segment with who wrote it, calls,
    reward parts. What they share is decoded once."""
    texts: dict[int, list[Row]] = {}  # by node
    for trajectory in tree.trajectories():
        for node in trajectory.path:
            if node.index not in texts:
                parts = {"policy": node.action_ids, "env": node.observation_ids}
                texts[node.index] = [{who: decode(ids)} for who, ids in parts.items() if ids]
        yield _row(tree, trajectory, [one for node in trajectory.path for one in texts[node.index]])


def _row(tree: TrajectoryTree, trajectory: Trajectory, segments: list[Row]) -> Row:
    """A trajectory as a line of the file that people read."""
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
        "num_tokens": trajectory.num_tokens,
        "loss_mask": _runs(trajectory),
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
    """A row, of training or of an evaluation, as text: the question, the verdict, and each text
    with its author; without the prompt."""
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


def _runs(trajectory: Trajectory) -> list[int]:
    """Run lengths of the loss mask, beginning with the tokens that are not trained."""
    runs, current = [0], False
    for node in trajectory.path:
        for ids, sampled in ((node.action_ids, True), (node.observation_ids, False)):
            if ids and sampled != current:
                runs.append(0)
                current = sampled
            runs[-1] += len(ids)
    return runs
