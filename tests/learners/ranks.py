"""Several ranks against plain torch in this process, on the same trees."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.dpo import encode_pair
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.encoded_tree import EncodedTree, encode
from agentenv.learners.trees.policy import Policy
from tests.learners.trees import VOCABULARY, credited, random_tree, tiny_model

# Metrics that depend on their number.
OF_THE_RANKS = {"cpu_s", "wall_s", "num_computed_tokens", "num_segments_tokens"}
ALGORITHM = ARPO(group_size=4, importance_cap=1e9)


def two_ranks(**keys: Any) -> LearnerConfig:
    """Two ranks with AdamW; micro-batches are small, so that ranks have different numbers."""
    known = {
        "optimizer": "adamw", "num_ranks": 2, "groups_per_minibatch": 3,
        "max_tokens_per_microbatch": 48, "learning_rate": 1e-3, "weight_decay": 0.1,
        "grad_clip": 0.5, "command_timeout_s": 600,
    }  # fmt: skip
    return LearnerConfig(**{**known, **keys})


def save_tiny_model(directory: Path, name: str = "qwen3") -> Path:
    tiny_model(name).save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def uneven_trees(count: int, version: int = 0) -> list[TrajectoryTree]:
    """One tree is much larger than the others together."""
    sizes = [30, 3, 3, 4, 3, 5, 3, 4]
    return [
        random_tree(Random(i), index=i, version=version, num_leaves=sizes[i % len(sizes)])
        for i in range(count)
    ]


def undivided_tree() -> TrajectoryTree:
    """One trajectory, and two empty ones, whose assignment to another rank would save nothing."""
    tree = random_tree(Random(2), num_leaves=3)
    first = tree.nodes[1]
    del tree.nodes[2:]
    first.end, first.reward = "terminated", 1.0
    for _ in range(2):
        tree.add(tree.root).end = "terminated"
    return tree


def pairs(sizes: list[int]) -> list[EncodedTree]:
    """Answers of those lengths and half of them; above 48 tokens a pair is cut."""
    random = Random(0)
    found = []
    for size in sizes:
        prompt = [random.randrange(VOCABULARY) for _ in range(4)]
        answers = []
        for length, first in ((size, 1), (max(1, size // 2), 2)):
            ids = [*prompt, first, *(random.randrange(VOCABULARY) for _ in range(length))]
            answers.append((ids, [False] * 4 + [i % 4 != 2 for i in range(length + 1)]))
        found.append(encode_pair(*answers))
    return found


def encoded(trees: list[TrajectoryTree], version: int = 0) -> list[EncodedTree]:
    return [encode(tree, credit, version) for tree, credit in credited(trees, ALGORITHM)]


def plain_torch(
    model_dir: Path, config: LearnerConfig, dtype: torch.dtype, algorithm: Algorithm = ALGORITHM
) -> Trainer:
    """The oracle: one rank, no DeepSpeed, weights rounded to `dtype` at first."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).float().eval()
    return Trainer(RankBackend(Policy(model), config), algorithm, config)


def train(trainer: Trainer, trees: list[TrajectoryTree], size: int) -> dict[str, float]:
    kept = encoded(trees)
    count = -(-len(kept) // size)
    cuts = [len(kept) * i // count for i in range(count + 1)]
    parts = [kept[cuts[i] : cuts[i + 1]] for i in range(count)]
    return trainer.update(parts, 1.0)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in trainer.backend.policy.model.named_parameters()}


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    """NaN if there is one anywhere."""
    parts = [(a[name].float() - b[name].float()).abs().max() for name in a]
    return float(torch.stack(parts).max())
