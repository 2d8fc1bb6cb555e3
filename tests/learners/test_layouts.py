"""The choice of a layout, which changes no weight but by rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentenv.learners.ranks.trainer import SHORT_PATH, Layouts
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.policy import Policy
from tests.learners import ranks
from tests.learners.trees import tiny_model

CPU = torch.device("cpu")


def test_layouts_do_not_change_the_trained_weights(model_dir: Path) -> None:
    found = {}
    for layout in ("auto", "tree"):
        config = ranks.two_ranks(num_ranks=1, zero_stage=0, layout=layout)
        trainer = ranks.plain_torch(model_dir, config, torch.float32)
        metrics = [ranks.train(trainer, ranks.uneven_trees(4, version=i), 3) for i in range(4)]
        assert (metrics[-1].get("num_segments_tokens", 0) > 0) == (layout == "auto")
        found[layout] = ranks.weights_of(trainer), metrics[-1]["loss"]
    for weights, loss in found.values():
        assert ranks.largest_difference(weights, found["tree"][0]) < 1e-5
        assert loss == pytest.approx(found["tree"][1], rel=1e-4)


def test_the_length_of_paths_selects_the_layout_on_a_cpu() -> None:
    """And no clock, so that equal runs stay equal to the bit."""
    found = Layouts(ranks.two_ranks(), Policy(tiny_model()), CPU)
    for length, layout in ((SHORT_PATH - 1, "segments"), (SHORT_PATH, "tree")):
        sequences = [encode_sequence([1] * length, [False] + [True] * (length - 1))] * 3
        with found.update(sequences):
            assert {one.layout for one in found.pack(sequences)} == {layout}
        assert found.now == "tree", "scores are not updates"
    with found.update([]):
        assert found.now == "tree"


def test_trees_stay_trees_where_segments_are_not_wanted_or_not_supported() -> None:
    policy, hybrid = Policy(tiny_model()), Policy(tiny_model("lfm2"))
    trees = ranks.encoded(ranks.uneven_trees(3))
    for found in (
        Layouts(ranks.two_ranks(layout="tree"), policy, CPU),
        Layouts(ranks.two_ranks(), hybrid, CPU),
    ):
        with found.update(trees):
            assert {one.layout for one in found.pack(trees)} == {"tree"}
