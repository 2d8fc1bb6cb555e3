"""What is kept of an optimizer step that was skipped since it was not finite."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentenv.tree import TrajectoryTree
from learners.encoding import EncodedTree

MAX_SAVED = 20

logger = logging.getLogger(__name__)


class Evidence:
    """Writes DIR/skipped-00001.json (the step's figures and its trees) and skipped-00001.msgpack
    (the trees as the ranks got them: a list of `learners.encoding.EncodedTree`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(
        self,
        step: dict[str, float],
        policy_version: int,
        trees: Sequence[TrajectoryTree],
        encoded: Sequence[EncodedTree],
    ) -> None:
        """Keep one step; beyond MAX_SAVED of a run only a warning is left."""
        number = len(list(self.directory.glob("skipped-*.json"))) + 1
        if number > MAX_SAVED:
            logger.warning("an optimizer step was skipped: loss or gradient was not finite")
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"skipped-{number:05d}.json"
        row = {
            "policy_version": policy_version,
            "metrics": {name: repr(value) for name, value in step.items()},
            "trees": [
                {
                    "tree": tree.index,
                    "task": tree.task.id,
                    "num_tokens": one.num_tokens,
                    "trained_tokens": one.num_action_tokens,
                    "not_finite": _not_finite(one),
                }
                for tree, one in zip(trees, encoded, strict=True)
            ],
        }
        path.with_suffix(".msgpack").write_bytes(msgspec.msgpack.encode(list(encoded)))
        path.write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
        logger.warning(
            "an optimizer step was skipped: loss or gradient was not finite; the batch is in %s",
            path,
        )


def _not_finite(tree: EncodedTree) -> list[str]:
    """Which figures of a tree are to blame, if it is the batch and not the weights."""
    import numpy as np

    names = ("behaviour", "entropies", "adv_pos", "adv_neg", "weight")
    return [name for name in names if not np.isfinite(tree.floats(name)).all()]
