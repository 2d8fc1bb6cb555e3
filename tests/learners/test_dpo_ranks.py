"""DPO on two real ranks equals one process of plain torch, for any assignment to ranks."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from agentenv.learners.batch import EncodedTree
from agentenv.learners.deepspeed_learner import DeepSpeedLearner
from agentenv.learners.dpo import encode_pair, prefer, with_reference
from tests.learners.ranks import (
    ALGORITHM,
    largest_difference,
    plain_torch,
    two_ranks,
    weights_in,
    weights_of,
)
from tests.learners.trees import VOCABULARY


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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
async def test_two_ranks_equal_one(stage: int, model_dir: Path, tmp_path: Path) -> None:
    config = two_ranks(zero_stage=stage)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    oracle = plain_torch(model_dir, config, torch.float32)
    try:
        unscored = pairs([60, 3, 5, 40, 8])
        scores = await learner.score(unscored)
        scored = [
            with_reference(pair, [value - 0.1 * (i % 3) for i, value in enumerate(score.logprobs)])
            for pair, score in zip(unscored, scores, strict=True)
        ]
        # then a rank has no pair, then none is cut
        for batch in (scored, scored[1:2], scored[1:3]):
            metrics = await learner.prefer(batch, 0.5)
            expected = prefer(oracle, batch, 0.5, 1.0)
            for name in expected.keys() - {"cpu_s", "wall_s"}:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        found = weights_in(await learner.publish(tmp_path / "published"))
        assert largest_difference(found, weights_of(oracle)) < 1e-5
    finally:
        await learner.close()
