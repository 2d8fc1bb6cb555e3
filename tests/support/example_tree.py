"""A kept tree with everything that an export contains: two roots, a fork of a fork, a failure, a
call whose tool raised, and a secret in a tool's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limit, Task, VersionSpan
from agentenv.rollout.archive import Archive, Credit, KeptTree, StepHeader
from agentenv.rollout.frames import ArchiveConfig

SECRET = "sk-proj-0123456789abcdefghij"
TASK = Task("train-7", "me/Warehouse-v0", "How many nuts?", ("310",), kind="nuts")

Encode = Callable[[str], Sequence[int]]


def example_tree(encode: Encode, *, with_secret: bool = False) -> KeptTree:
    """
    prompt -+- 0: <stock>nuts</stock> -+- 310                     reward 1
            |                          +- <stock>bolt</stock> -+- 5       reward 0
            |                          (fork 0.1+1)            +- cut off (fork 0.1+1.2+1)
            +- 1: failed
    """
    tree = TrajectoryTree(TASK, index=3, policy_version=2, num_roots=2)
    root = tree.add(None, observation_ids=encode("How many nuts?\n"))

    def turn(parent: Node, branch: str, text: str, answer: str = "", **fields: object) -> Node:
        ids = encode(text)
        return tree.add(
            parent,
            branch=branch,
            action_ids=ids,
            logprobs=[-0.5] * len(ids),
            entropies=[0.25] * len(ids),
            version_spans=[VersionSpan(2, 0, len(ids))],
            observation_ids=encode(answer),
            **fields,
        )

    def call(item: str, error: str | None = None) -> dict[str, object]:
        ok = error is None
        record = {"name": "stock", "arguments": {"item": item}, "ok": ok, "error": error}
        return {"tool_calls": [{**record, "duration_s": 0.25}]}

    read = f" {SECRET}\n" if with_secret else " 310\n"
    first = turn(root, "0", "<stock>nuts</stock>", read, num_forks=1, info=call("nuts"))
    fork = turn(
        first, "0.1+1", "<stock>bolt</stock>", " no\n", num_forks=1, info=call("bolt", "no bolt")
    )
    turn(
        first,
        "0",
        "<answer>310</answer>",
        reward=1.0,
        end="terminated",
        info={"success": True, "reason": "right answer: 310", "parts": {"accuracy": 1.0}},
    )
    turn(fork, "0.1+1", "<answer>5</answer>", end="terminated", info={"success": False})
    turn(fork, "0.1+1.2+1", "so", end="truncated", limit=Limit.TURN_TOKENS)
    turn(root, "1", "<stock>", end="failed", error="EnvError: the warehouse burns")
    credit = Credit(
        adv_pos=[0.0, 1.4, 0.0, 1.4, 0.0, 0.0, 0.0],
        adv_neg=[0.0, -1.4, -1.4, 0.0, -0.7, -0.7, 0.0],
        weight=[3.0, 3.0, 2.0, 1.0, 1.0, 1.0, 0.0],
        returns=[float("nan")] * 3 + [1.0, 0.0, 0.0, float("nan")],
        advantages=[float("nan")] * 3 + [1.4, -0.7, -0.7, float("nan")],
    )
    return KeptTree(tree, "trained", credit=credit)


def encode_with(tokenizer: Any) -> Encode:
    return lambda text: tokenizer.encode(text, add_special_tokens=False) if text else []


def write_run(folder: Path, tokenizer: Any, *secrets: bool) -> Path:
    """The files of a run that exports read: of each step the tree, with the secret or without."""
    tokenizer.save_pretrained(folder / "model")
    (folder / "config.json").write_text('{"model": {"path": "{run}/model"}}', encoding="utf-8")
    archive = Archive(folder / "trees", ArchiveConfig())
    for step, with_secret in enumerate(secrets, 1):
        header = StepHeader(step, 2, 1, "settings", len(tokenizer), 1)
        archive.write(header, [example_tree(encode_with(tokenizer), with_secret=with_secret)])
    return folder
