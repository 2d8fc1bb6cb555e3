"""What a finished tree costs to send: bytes, and microseconds to write and to read.

    python benchmarks/bench.py transport [--json FILE]

The same trees of a recorded shape (benchmarks/parts/shapes.json), random tokens and log-probs, in
each form; per sampled token, medians of `repeats`:

    frame    as the journal and rollout workers have them: MessagePack, arrays as bytes
    learner  what a rank of the learner is sent of it, credit included
    pickle   the tree object, protocol 5
    json     one line of JSON a tree
    flat     MessagePack like `frame`, but each trajectory by itself with its whole prefix
    lists    each trajectory by itself as pickled lists of ints and floats
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct, msgpack

from agentenv.link import PREFIX_BYTES
from agentenv.tree import TrajectoryTree, of_frame, to_frame, to_json
from agentenv.types import Task, VersionSpan

SHAPES = Path(__file__).with_name("shapes.json")
SHAPE, VOCABULARY = "arpo_defaults", 150_000

Pack = Callable[[TrajectoryTree], bytes]
Read = Callable[[bytes], Any]


class Figures(Struct, frozen=True, kw_only=True):
    """Of one form, per token that the policy sampled, each shared one once."""

    bytes_a_token: float
    write_us: float
    read_us: float
    bytes_over_frame: float


class Flat(Struct, array_like=True):
    """A trajectory by itself; arrays as bytes. Log-probs and entropies are of sampled tokens."""

    token_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    entropies: bytes
    spans: list[VersionSpan]
    reward: float


def run(repeats: int) -> dict[str, Figures]:
    """The figures by form."""
    trees = recorded_trees()
    num_tokens = sum(tree.num_action_tokens for tree in trees)
    found: dict[str, Figures] = {}
    for name, (pack, read) in forms().items():
        frames = list(map(pack, trees))
        size = sum(map(len, frames)) / num_tokens
        found[name] = Figures(
            bytes_a_token=round(size, 1),
            write_us=_microseconds(pack, trees, num_tokens, repeats),
            read_us=_microseconds(read, frames, num_tokens, repeats),
            bytes_over_frame=round(size / found["frame"].bytes_a_token, 2) if found else 1.0,
        )
    return found


def forms() -> dict[str, tuple[Pack, Read]]:
    """How each form is written and read."""
    from agentenv.learners import ranks as wire  # numpy, which --help does not need
    from agentenv.learners.batch import encode
    from agentenv.learners.credit import tree_credit

    def learner(tree: TrajectoryTree) -> bytes:
        credit = tree_credit(tree, group_size=1)
        assert credit is not None
        return wire.pack_frame(wire.Tree(encode(tree, credit, 0)))

    return {
        "frame": (to_frame, of_frame),
        "learner": (learner, lambda frame: wire.unpack_command(frame[PREFIX_BYTES:])),
        "pickle": (lambda tree: pickle.dumps(tree, 5), pickle.loads),
        "json": (lambda tree: to_json(tree).encode(), json.loads),
        "flat": (_flat, msgpack.Decoder(list[Flat]).decode),
        "lists": (_lists, pickle.loads),
    }


def _flat(tree: TrajectoryTree) -> bytes:
    return msgpack.encode(
        [
            Flat(
                b"".join(node.action_ids + node.observation_ids for node in path.path),
                bytes(path.loss_mask),
                b"".join(node.logprobs for node in path.turns),
                b"".join(node.entropies for node in path.turns),
                [span for node in path.turns for span in node.version_spans],
                path.reward,
            )
            for path in tree.trajectories()
        ]
    )


def _lists(tree: TrajectoryTree) -> bytes:
    return pickle.dumps(
        [
            {
                "token_ids": path.token_ids,
                "loss_mask": path.loss_mask,
                "logprobs": [one for node in path.turns for one in node.logprobs],
                "entropies": [one for node in path.turns for one in node.entropies],
                "reward": path.reward,
            }
            for path in tree.trajectories()
        ],
        5,
    )


def recorded_trees() -> list[TrajectoryTree]:
    """Trees of the recorded shape."""
    shapes = msgspec.json.decode(SHAPES.read_bytes())[SHAPE]["trees"]
    return [_grow(nodes, Random(index), index) for index, nodes in enumerate(shapes)]


def _grow(nodes: Sequence[tuple[int, int, int]], rng: Random, index: int) -> TrajectoryTree:
    tree = TrajectoryTree(Task(f"t{index}", "bench", "?", ("",)), index)
    inner = {parent for parent, *_ in nodes}
    for number, (parent, num_actions, num_observed) in enumerate(nodes):
        node = tree.add(
            tree.nodes[parent] if parent >= 0 else None,
            action_ids=[rng.randrange(VOCABULARY) for _ in range(num_actions)],
            logprobs=[-rng.random() for _ in range(num_actions)],
            entropies=[rng.random() for _ in range(num_actions)],
            version_spans=[VersionSpan(0, 0, num_actions)] if num_actions else [],
            observation_ids=[rng.randrange(VOCABULARY) for _ in range(num_observed)],
        )
        if number not in inner:
            node.end, node.reward = "terminated", float(number % 2)
    return tree


def _microseconds(
    work: Callable[[Any], Any], inputs: Sequence[Any], num_tokens: int, repeats: int
) -> float:
    """CPU time a sampled token."""
    found = []
    for _ in range(repeats):
        before = time.process_time()
        for one in inputs:
            work(one)
        found.append((time.process_time() - before) / num_tokens * 1e6)
    return round(median(found), 3)
