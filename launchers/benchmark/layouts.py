"""The layouts that `launchers/bench.py learner` compares, and what counting says of them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentenv.tree import TrajectoryTree
from agentenv.types import Task, VersionSpan
from learners.attention import TreeLayout
from learners.attention_blocked import visible_pairs
from learners.batch import ActionTokens, Longs, MicroBatch, pack
from learners.credit import tree_credit
from learners.encoding import EncodedTree, encode, encode_sequence
from learners.policy import Policy, tensors

LAYOUTS = ("tree", "varlen", "padded")
FLAT = ("varlen", "padded")
MAX_TOKENS = 8192  # of a micro-batch, in every layout
VOCABULARY = 4096
Nodes = list[list[int]]  # of a tree: [parent, tokens of the policy, tokens of prompt or tool]


def make_model() -> Policy:
    """A small Qwen3 of three million parameters outside embedding and head."""
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
    """A function that runs forward and backward over all trees and returns the loss."""
    device = next(policy.parameters()).device
    encoded = encode_all(layout, trees)
    weight = ActionTokens.of(encoded).weight
    batches: Sequence[MicroBatch | PaddedBatch]
    batches = pad(encoded) if layout == "padded" else pack(encoded, MAX_TOKENS)

    def step() -> float:
        policy.zero_grad()
        total = 0.0
        for batch in batches:
            if isinstance(batch, MicroBatch):
                token_ids, positions, plan, source, targets = tensors(batch, device)
                if layout == "dense":
                    plan = TreeLayout(batch.end, device, "dense")
                logprobs = policy(token_ids, positions, plan, source, targets)[0]
            else:
                logprobs = padded_logprobs(policy, batch)
            loss = -(torch.from_numpy(weight[batch.index]).to(logprobs) * logprobs).sum()
            loss.backward()
            total += float(loss.detach())
        return total

    return step


def encode_all(layout: str, trees: list[Nodes]) -> list[EncodedTree]:
    """Trees as trees, or every trajectory as a sequence."""
    grown = [grow(nodes, index) for index, nodes in enumerate(trees)]
    if layout in FLAT:
        return [
            encode_sequence(path.token_ids, path.loss_mask)
            for tree in grown
            for path in tree.trajectories()
        ]
    return [
        encode(tree, credit, 0) for tree in grown if (credit := tree_credit(tree, group_size=1))
    ]


def grow(nodes: Nodes, index: int) -> TrajectoryTree:
    """A tree of that shape with random tokens."""
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


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of trajectories, token_ids int64 [rows, length]; the rest as in MicroBatch."""

    token_ids: Longs
    source: Longs
    targets: Longs
    index: Longs


def pad(sequences: Sequence[EncodedTree]) -> list[PaddedBatch]:
    """Rows of similar length, at most MAX_TOKENS padded tokens together."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].num_tokens)
    first = np.cumsum([0, *(sequence.num_action_tokens for sequence in sequences)])
    groups: list[list[int]] = [[]]
    for i in order:
        if groups[-1] and (len(groups[-1]) + 1) * sequences[i].num_tokens > MAX_TOKENS:
            groups.append([])
        groups[-1].append(i)
    batches = []
    for group in groups:
        length = sequences[group[-1]].num_tokens
        token_ids = np.zeros((len(group), length), np.int64)
        source, targets, index = [], [], []
        for row, i in enumerate(group):
            ids, places = sequences[i].ints("token_ids"), np.flatnonzero(sequences[i].actions())
            token_ids[row, : len(ids)] = ids
            source.append(row * length + places - 1)
            targets.append(ids[places].astype(np.int64))
            index.append(np.arange(first[i], first[i + 1]))
        batches.append(PaddedBatch(token_ids, *map(np.concatenate, (source, targets, index))))
    return batches


def padded_logprobs(policy: Policy, batch: PaddedBatch) -> Tensor:
    """As a plain training loop computes them, causal attention over all rows at once."""
    device = next(policy.parameters()).device
    token_ids, source, targets = (
        torch.from_numpy(array).to(device)
        for array in (batch.token_ids, batch.source, batch.targets)
    )
    hidden = policy.model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    chosen = hidden.flatten(0, 1).index_select(0, source)
    logprobs: Tensor = policy.model.lm_head(chosen, targets)[0]
    return logprobs


def count(layout: str, trees: list[Nodes], policy: Policy) -> tuple[float, float, float]:
    """Tokens, visible pairs, and floating point operations of forward and backward, for models
    with tied embeddings.

    6 a weight and token (the head only for predicted tokens), and 14 a pair, head channel and
    layer: 2 products forward and 5 backward, where the scores are computed again.
    """
    config, batches = policy.model.config, pack(encode_all(layout, trees), MAX_TOKENS)
    num_tokens = sum(len(batch.token_ids) for batch in batches)
    pairs = sum(visible_pairs(batch.end) for batch in batches)
    predicted = sum(len(batch.targets) for batch in batches)
    head = policy.model.lm_head.weight.numel()
    weights = sum(parameter.numel() for parameter in policy.parameters()) - head
    channels = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    flops = 6.0 * (weights * num_tokens + head * predicted) + 14.0 * channels * pairs
    return float(num_tokens), float(pairs), flops


def peak_mb(layout: str, trees: list[Nodes]) -> float:
    """Peak memory of one step, above what the process holds with the model loaded."""
    torch.set_num_threads(1)
    policy = make_model()
    step = make_step(layout, trees, policy)
    with suppress(OSError):  # where it cannot be reset, the peak so far stays in it
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    step()
    return (_peak_bytes() - before) / 1e6


def _peak_bytes() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
