"""Gain of the tree layouts over flat layouts of the same trajectories.

    tree, segments   the layouts of `agentenv.learners.ranks.trainer`
    varlen           every trajectory as a separate sequence, packed without padding
    dense            trees with one dense attention mask (--dense)

All layouts compute the same loss and the same gradients. The output has the CPU seconds and the
peak memory of a step, and the ratios expected from counting. `counted` is the ratio of floating
point operations, varlen to tree: the speedup on a machine on which all operations cost the same.
`computed` is the ratio of the tokens in all micro-batches to the tokens of the trees: when a
tree is split, its parts repeat the paths to them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task, VersionSpan
from agentenv.learners.algorithms.credit import tree_credit
from agentenv.learners.trees.attention import TreeLayout
from agentenv.learners.trees.encoded_tree import (
    LAYOUTS,
    ActionTokens,
    EncodedTree,
    Layout,
    encode,
    encode_sequence,
)
from agentenv.learners.trees.partition import MicroBatch, pack
from agentenv.learners.trees.policy import Policy, tensors

ALL = (*LAYOUTS, "varlen")
SPEED = ("varlen / tree", "FLOPs", "share")  # columns behind
MEMORY = ("tokens", "pairs", "computed")
MAX_TOKENS = 8192  # tokens per micro-batch, in every layout
VOCABULARY = 4096
Nodes = list[list[int]]  # node of a tree: [parent, policy tokens, prompt or tool tokens]


def make_model() -> Policy:
    """Return a small Qwen3 with three million parameters, without embedding and head."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return Policy(Qwen3ForCausalLM(config).eval())


def make_step(layout: str, trees: list[Nodes], policy: Policy) -> Callable[[], float]:
    """Return a function that runs both passes over all trees and returns the loss."""
    encoded = encode_all(layout, trees)
    batches = pack_in(layout, encoded)
    return lambda: passes(batches, encoded, policy, is_dense=layout == "dense")


def pack_in(layout: str, encoded: Sequence[EncodedTree]) -> list[MicroBatch]:
    """Pack trees into micro-batches of a layout. Flat sequences and a dense mask use it, too."""
    known: dict[str, Layout] = {one: one for one in LAYOUTS}
    return pack(encoded, MAX_TOKENS, known.get(layout, "tree"))


def passes(
    batches: Iterable[MicroBatch],
    encoded: Sequence[EncodedTree],
    policy: Policy,
    *,
    is_dense: bool = False,
) -> float:
    """Run forward and backward passes over all micro-batches of these trees. Return the loss."""
    device, weight = next(policy.parameters()).device, ActionTokens(encoded).weight
    policy.zero_grad()
    total = 0.0
    for batch in batches:
        token_ids, positions, plan, source, targets, *_ = tensors(batch, device)
        if is_dense:
            plan = TreeLayout(batch.end, device, "dense")
        logprobs = policy(token_ids, positions, plan, source, targets)[0]
        loss = -(torch.from_numpy(weight[batch.index]).to(logprobs) * logprobs).sum()
        loss.backward()
        total += float(loss.detach())
    return total


def encode_all(layout: str, trees: list[Nodes]) -> list[EncodedTree]:
    """Return the trees, or every trajectory as a sequence."""
    grown = [grow(nodes, index) for index, nodes in enumerate(trees)]
    if layout == "varlen":
        return [one for tree in grown for one in _sequences(tree)]
    return [
        encode(tree, credit, 0) for tree in grown if (credit := tree_credit(tree, group_size=1))
    ]


def _sequences(tree: TrajectoryTree) -> list[EncodedTree]:
    return [encode_sequence(path.token_ids, path.loss_mask) for path in tree.trajectories()]


def grow(nodes: Nodes, index: int) -> TrajectoryTree:
    """Return a tree of the given shape with random tokens."""
    rng = Random(index)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    tree = TrajectoryTree(task=Task(f"t{index}", "bench", "?", ("",)), index=index)
    inner = {node[0] for node in nodes}
    for number, (parent, num_actions, num_observed) in enumerate(nodes):
        node = tree.add(
            tree.nodes[parent] if parent >= 0 else None,
            action_ids=ids(num_actions),
            logprobs=[-1.0] * num_actions,
            entropies=[1.0] * num_actions,
            version_spans=[VersionSpan(0, 0, num_actions)],
            observation_ids=ids(num_observed),
        )
        if number not in inner:
            node.end, node.reward = "terminated", float(number % 2)
    return tree


def count(layout: str, trees: list[Nodes], policy: Policy) -> tuple[float, float, float]:
    """Count tokens, attention pairs, and floating point operations of the two passes.

    A weight costs 6 operations per token (the head only for predicted tokens). Attention costs 14
    operations per pair, head channel and layer: 2 products in the forward pass and 5 in the
    backward pass, which computes the scores again.
    """
    config, batches = policy.model.config, pack_in(layout, encode_all(layout, trees))
    num_tokens = sum(len(batch.token_ids) for batch in batches)
    pairs = sum(int((one.end - np.arange(len(one.end))).sum()) for one in batches)
    predicted = sum(len(batch.targets) for batch in batches)
    head = policy.model.lm_head.weight.numel()
    ends = head if config.tie_word_embeddings else 2 * head  # an embedding lookup costs nothing
    weights = sum(parameter.numel() for parameter in policy.parameters()) - ends
    channels = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    flops = 6.0 * (weights * num_tokens + head * predicted) + 14.0 * channels * pairs
    return float(num_tokens), float(pairs), flops


def peak_mb(layout: str, trees: list[Nodes]) -> float:
    """Return the peak memory of one step beyond the process's memory with the model loaded."""
    torch.set_num_threads(1)
    policy = make_model()
    step = make_step(layout, trees, policy)
    with suppress(OSError):  # if it cannot be reset, it includes the peak so far
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    step()
    return (_peak_bytes() - before) / 1e6


def _peak_bytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


SHAPES = Path(__file__).with_name("shapes.json")
WARM_UP = [[[-1, 0, 64], [0, 64, 0], [0, 64, 0]]]


@dataclass(frozen=True)
class Figures:
    """Figures of one shape: medians of CPU seconds and peak memory by layout, counted ratios, and
    the ratio of tokens in the tree layout's micro-batches to tokens of the trees."""

    cpu_s: dict[str, float]
    peak_mb: dict[str, float]
    tokens: float
    pairs: float
    flops: float
    computed: float

    @property
    def varlen_over_tree(self) -> float:
        return self.cpu_s["varlen"] / self.cpu_s["tree"]


def run(
    names: Sequence[str] | None, repeats: int, dense: bool, report: Callable[[str], None]
) -> tuple[dict[str, float], list[Table]]:
    """Return the figures of the shapes as {SHAPE.figure: value}, and as tables."""
    shapes = load_shapes()
    unknown = sorted(set(names or ()) - set(shapes))
    if unknown or repeats < 1:
        raise ConfigError(f"--shapes: unknown {unknown}; known: {sorted(shapes)}; --repeats >= 1")
    found: dict[str, Figures] = {}
    for name in names or shapes:
        report(f"{name}: {shapes[name]['source']}")
        layouts = [*ALL, *["dense"] * dense]
        found[name] = measure(shapes[name]["trees"], layouts, repeats)
    return flattened(found), list(tables(found))


def load_shapes() -> dict[str, Any]:
    """Return the recorded shapes, and a prefix with 16 leaves."""
    leaves = [[0, 128 + 8 * (i * 7 % 17), 0] for i in range(16)]
    prefix = [[[-1, 0, 2048], *leaves]]
    shapes: dict[str, Any] = msgspec.json.decode(SHAPES.read_bytes())
    source = "one prefix of 2,048 tokens and 16 leaves of 128 to 256"
    return {"prefix2048x16": {"source": source, "trees": prefix}} | shapes


def measure(trees: list[Nodes], layouts: Sequence[str], repeats: int) -> Figures:
    """Measure the layouts interleaved, so that other load on the machine affects all alike."""
    torch.set_num_threads(1)
    model = make_model()
    make_step("tree", WARM_UP, model)()
    steps = {name: make_step(name, trees, model) for name in layouts}
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    losses = {}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.process_time()
            losses[name] = step()
            seconds[name].append(time.process_time() - start)
    for name, loss in losses.items():
        if abs(loss - losses["varlen"]) > 1e-4 * abs(losses["varlen"]):
            raise ArithmeticError(f"layouts differ: {name} {losses}")
    counts = {name: count(name, trees, model) for name in ("tree", "varlen")}
    tokens, pairs, flops = np.divide(counts["varlen"], counts["tree"]).tolist()
    computed = counts["tree"][0] / sum(sum(node[1:]) for tree in trees for node in tree)
    return Figures(
        {name: median(values) for name, values in seconds.items()},
        {name: in_own_process(name, trees) for name in layouts},
        tokens,
        pairs,
        flops,
        computed,
    )


def in_own_process(layout: str, trees: list[Nodes]) -> float:
    """Measure the peak memory of a layout in its own process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak_mb, layout, trees).result()


def tables(found: dict[str, Figures]) -> tuple[Table, Table]:
    """Return two tables with one row per shape: speed with counted ratios, and memory."""
    layouts = list(next(iter(found.values())).cpu_s)
    speed, memory = (
        Table(title=title, title_justify="left", box=None)
        for title in (
            "CPU seconds; ratios are flat over tree, share is measured over counted FLOPs",
            "peak memory of a step beyond the model, MB; ratios as above",
        )
    )
    for table, columns in ((speed, SPEED), (memory, MEMORY)):
        table.add_column("shape")
        for name in (*layouts, *columns):
            table.add_column(name, justify="right")
    for name, one in found.items():
        ratio = one.varlen_over_tree
        seconds = (*one.cpu_s.values(), ratio, one.flops, ratio / one.flops)
        cells = [f"{figure:.2f}" for figure in seconds]
        speed.add_row(name, *cells)
        megabytes = (f"{figure:.0f}" for figure in one.peak_mb.values())
        counted = (f"{figure:.2f}" for figure in (one.tokens, one.pairs, one.computed))
        memory.add_row(name, *megabytes, *counted)
    return speed, memory


def flattened(found: dict[str, Figures]) -> dict[str, float]:
    """Return {SHAPE.figure: value} of all shapes."""
    figures: dict[str, float] = {}
    for name, one in found.items():
        figures |= {
            f"{name}.varlen_over_tree": one.varlen_over_tree,
            f"{name}.counted": one.flops,
            f"{name}.counted_tokens": one.tokens,
            f"{name}.counted_pairs": one.pairs,
            f"{name}.computed_over_unique": one.computed,
        }
        for layout in one.cpu_s:
            figures[f"{name}.{layout}_cpu_s"] = one.cpu_s[layout]
            figures[f"{name}.{layout}_peak_mb"] = one.peak_mb[layout]
    return {name: round(value, 4) for name, value in figures.items()}
