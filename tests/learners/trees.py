"""Trees to train on, and the flat computation that they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from math import isnan
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limit, Task, VersionSpan
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.credit import CreditedTree, TreeCredit, group_advantages
from agentenv.learners.algorithms.losses import LossBatch, entropy_statistics
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, Layout
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, tensors

VOCABULARY = 61
MODELS: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 8}, "qwen2": {}, "llama": {}}
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS = {
    "qwen3_moe": {**OF_EXPERTS, "num_experts": 4, "head_dim": 8},
    "glm4_moe": {  # the first layer is dense; an expert that all tokens share; a bias in routing
        **OF_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 8,
    },
}
HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_d_state": 8, "mamba_chunk_size": 16, "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
}  # fmt: skip
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
HYBRID_WITH_EXPERTS = {
    "lfm2_moe": {**OF_EXPERTS, **HYBRIDS["lfm2"], "num_dense_layers": 0, "num_experts": 4}
}


def tiny_model(
    name: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Two layers, random weights large enough that log-probs differ from token to token."""
    keys = (MODELS | EXPERTS | HYBRIDS | HYBRID_WITH_EXPERTS)[name] | changes
    torch.manual_seed(0)
    keys |= {"tie_word_embeddings": name == "qwen3", "attn_implementation": "sdpa"}
    config = AutoConfig.for_model(name, **SIZES, **keys)
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.normal_(std=0.2)
    return model.to(dtype).eval()


def credits_of(algorithm: Algorithm, trees: Sequence[TrajectoryTree]) -> list[TreeCredit | None]:
    """Credit of all trees of an update."""
    return algorithm.over_update(trees, [algorithm.credit(tree) for tree in trees])


def credited(trees: list[TrajectoryTree], algorithm: Algorithm) -> list[CreditedTree]:
    """The input of an update from these trees: those with a signal, with their credit."""
    pairs = zip(trees, credits_of(algorithm, trees), strict=True)
    return [(tree, credit) for tree, credit in pairs if credit is not None and credit.has_signal]


def random_tree(
    random: Random, *, index: int = 0, version: int = 0, num_leaves: int = 6
) -> TrajectoryTree:
    """A tree of mixed depth with forks at the root and below, rewards at leaves and within."""
    tree = TrajectoryTree(task=Task(f"t{index}", "env", "?", ("a",)), index=index)
    tree.policy_version = version
    root = tree.add(None, observation_ids=_ids(random, random.randint(1, 6)))
    parents: set[int | None] = {None}
    while len(tree.nodes) - len(parents) < num_leaves - 1:
        _turn(tree, random.choice([root, *tree.nodes[1:]]), random, version)
        parents = {node.parent for node in tree.nodes}
    for node in tree.nodes[1:]:
        if node.index not in parents:
            node.end = "terminated"
            node.reward += random.choice([0.0, 0.3, 1.0])
    return tree


ANY_TREE = st.builds(
    lambda seed, leaves: random_tree(Random(seed), num_leaves=leaves),
    st.integers(0, 10**6),
    st.integers(2, 12),
)


def level(tree: TrajectoryTree, value: float) -> TrajectoryTree:
    """The tree with equal returns, which are sums of unequal rewards and so rounded differently."""
    for leaf in tree.leaves():
        leaf.reward = value - sum(node.reward for node in tree.path(leaf)[:-1])
    return tree


def _turn(tree: TrajectoryTree, parent: Node, random: Random, version: int) -> Node:
    size = random.randint(1, 7)
    return tree.add(
        parent,
        action_ids=_ids(random, size),
        logprobs=[random.uniform(-6.0, -2.0) for _ in range(size)],
        entropies=[random.uniform(0.1, 4.0) for _ in range(size)],
        version_spans=[VersionSpan(version, 0, size)],
        observation_ids=_ids(random, random.randint(0, 5)),
        reward=random.choice([0.0, 0.0, 0.1]),
    )


def _ids(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def truncate(leaf: Node, limit: Limit) -> None:
    leaf.end, leaf.limit = "truncated", limit


def tree_loss(
    model: PreTrainedModel,
    encoded: list[EncodedTree],
    algorithm: Algorithm,
    *,
    max_tokens: int = 64,
    layout: Layout = "tree",
) -> Tensor:
    """The mini-batch's loss on packed trees, behavior log-probs serving as proximal ones."""
    policy, tokens = Policy(model), ActionTokens(encoded)
    total = torch.zeros((), dtype=torch.float64)
    mean, std = entropy_statistics(
        torch.from_numpy(tokens.entropies), torch.from_numpy(tokens.weight)
    )
    parts = (tokens.behavior, tokens.entropies, tokens.adv_pos, tokens.adv_neg, tokens.weight)
    for batch in pack(encoded, max_tokens, layout):
        logprobs, entropies, _ = policy(*tensors(batch, torch.device("cpu")))
        chosen = [torch.from_numpy(part[batch.index]).to(logprobs) for part in parts]
        behavior, old, pos, neg, weight = chosen
        scalars = float(tokens.weight.sum()), mean.to(logprobs), std.to(logprobs)
        rest = torch.ones_like(old), scalars[0]
        loss_batch = LossBatch(behavior, behavior, old, pos, neg, weight, *scalars, *rest)
        total = total + algorithm.loss(loss_batch, logprobs, entropies)[0]
    return total


def truncation(path: Sequence[Node], logits: Tensor) -> Tensor:
    """-inf for ids that the sampling of the next token did not keep, else 0."""
    found, place = torch.zeros_like(logits), -1
    for node in path:
        kept = iter(node.kept_ids)
        for row, size in enumerate(node.num_kept, place):
            found[row] = -torch.inf
            found[row, [next(kept) for _ in range(size)]] = 0.0
        place += len(node.action_ids) + len(node.observation_ids)
    return found


def flat_loss(model: PreTrainedModel, trees: list[TrajectoryTree], algorithm: Algorithm) -> Tensor:
    """The same loss, one trajectory at a time, each with its own advantage."""
    parts = []
    for tree in trees:
        paths = list(tree.trajectories())
        advantages = group_advantages([path.reward for path in paths])
        for path, advantage in zip(paths, advantages, strict=True):
            ids, mask = torch.tensor([path.token_ids]), torch.tensor(path.loss_mask)[1:]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            sizes = [(one, len(one.action_ids + one.observation_ids)) for one in path.path]
            temperature = [one.temperature for one, size in sizes for _ in range(size)]
            logits = logits / torch.tensor(temperature[1:], dtype=logits.dtype)[:, None]
            logits = logits + truncation(path.path, logits)
            logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0][mask]
            old = [value for node in path.path for value in node.logprobs]
            entropies = [value for node in path.path for value in node.entropies]
            kept = [not isnan(one) for one in old]
            own = [list(compress(one, kept)) for one in (old, entropies)]
            parts.append((logprobs[torch.tensor(kept)], *own, [float(advantage)] * sum(kept)))
    logprobs = torch.cat([part[0] for part in parts])
    old, entropies, advantages = (
        torch.tensor([x for part in parts for x in part[i]], dtype=torch.float64) for i in (1, 2, 3)
    )
    ones = torch.ones_like(old)
    mean, std = entropy_statistics(entropies, ones)
    old, entropies, advantages, ones, mean, std = (
        value.to(logprobs) for value in (old, entropies, advantages, ones, mean, std)
    )
    scalars = float(len(old)), mean, std
    rest = ones, scalars[0]
    batch = LossBatch(old, old, entropies, advantages, ones * 0, ones, *scalars, *rest)
    return algorithm.loss(batch, logprobs, entropies)[0]
