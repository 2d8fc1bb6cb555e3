"""The choice of a layout: by the times of the first updates, in a run and after a resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.learner import LayoutSample, LearnerConfig, SavedLearner
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.backend import TorchBackend
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.trees import layouts, segments
from agentenv.learners.trees.batch import LAYOUTS, EncodedTree, encode_sequence
from agentenv.learners.trees.layouts import SHORT_PATH, TIMED, WARM_UP, Costs, Layouts
from agentenv.learners.trees.model_check import check_model
from agentenv.learners.trees.partition import MicroBatch, pack
from agentenv.learners.trees.policy import Policy
from tests.learners.ranks import (
    ALGORITHM,
    encoded,
    largest_difference,
    plain_torch,
    train,
    two_ranks,
    uneven_trees,
    weights_of,
)
from tests.learners.trees import tiny_model

CPU = torch.device("cpu")
NUM_TRIALS = len(LAYOUTS) * (WARM_UP + TIMED)
SECONDS = {"tree": 3.0, "segments": 2.0, "padded": 1.0}  # of a token


@pytest.fixture
def trees() -> list[EncodedTree]:
    return encoded(uneven_trees(3))


@pytest.fixture
def _times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches take the times of SECONDS."""
    forward, passed = TorchBackend.forward, [0.0]

    def timed(self: TorchBackend, batch: MicroBatch) -> Any:
        passed[0] += SECONDS[batch.layout] * len(batch.end)
        return forward(self, batch)

    monkeypatch.setattr(TorchBackend, "forward", timed)
    monkeypatch.setattr(Layouts, "_clock", lambda self: passed[0])


def measured(**keys: Any) -> LearnerConfig:
    return two_ranks(num_ranks=1, backend="torch", layout="measured", **keys)


def steps_of(trees: list[TrajectoryTree]) -> list[list[EncodedTree]]:
    """The mini-batches of `train` with 3 trees each at most."""
    kept = encoded(trees)
    half = len(kept) // -(-len(kept) // 3)
    return [kept[:half], kept[half:]]


def layout_of(metrics: dict[str, float]) -> str:
    """Of an update, by its metrics."""
    found = [one for one in LAYOUTS[1:] if metrics.get(f"num_{one}_tokens")]
    return found[0] if found else "tree"


def test_costs_are_fitted_by_layout() -> None:
    samples = [
        LayoutSample("tree", tokens, pairs, 2.0 + 0.01 * tokens + 1e-4 * pairs)
        for tokens, pairs in ((100, 5000), (200, 9000), (400, 80000))
    ] + [LayoutSample("padded", tokens, tokens * 10, 0.5 + 0.01 * tokens) for tokens in (150, 300)]
    disturbed = LayoutSample("tree", 100, 5000, 300.0)  # by another process
    costs = Costs([*samples, disturbed])
    batches = {
        layout: pack([encode_sequence([1] * 9, [False] + [True] * 8)], 99, layout)
        for layout in LAYOUTS
    }
    assert costs.of(batches["tree"]) == pytest.approx(2.0 + 0.09 + 45e-4, rel=0.2)
    assert costs.of(batches["padded"]) == pytest.approx(0.5 + 0.09, rel=0.2)
    assert costs.of(batches["segments"]) == np.inf, "never timed"
    assert costs.of([]) == 0.0


@pytest.mark.usefixtures("_times")
def test_each_layout_is_tried_and_then_the_fastest_is_kept(model_dir: Path) -> None:
    trainer = plain_torch(model_dir, measured(), torch.float32)
    found = [layout_of(train(trainer, uneven_trees(4), 3)) for _ in range(NUM_TRIALS + 3)]
    assert found == [*LAYOUTS] * (WARM_UP + TIMED) + ["padded"] * 3
    (trial,) = trainer.layouts.trials.values()
    assert trial.num_updates == len(found)
    counts = Counter(one.layout for one in trial.samples)
    for layout in LAYOUTS:  # of two steps; the first updates in a layout do not count
        batches = sum(len(trainer.layouts.pack(one, layout)) for one in steps_of(uneven_trees(4)))
        assert counts[layout] == TIMED * batches
    outside = trainer.layouts.pack(encoded(uneven_trees(2)))
    assert {one.layout for one in outside} == {"tree"}, "scores are not updates"


@pytest.mark.usefixtures("_times")
def test_layouts_do_not_change_the_trained_weights(model_dir: Path) -> None:
    found = []
    for config in (measured(), two_ranks(num_ranks=1, backend="torch", layout="tree")):
        trainer = plain_torch(model_dir, config, torch.float32)
        metrics = [train(trainer, uneven_trees(4, version=i), 3) for i in range(4)]
        found.append((weights_of(trainer), metrics[-1]["loss"]))
    assert largest_difference(found[0][0], found[1][0]) < 1e-5
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


@pytest.mark.usefixtures("_times")
def test_a_resumed_run_keeps_its_layout(model_dir: Path, tmp_path: Path) -> None:
    init = wire.Init.of(measured(), ALGORITHM, str(model_dir), seed=0)
    rank, resumed = Rank(init), Rank(init)
    update = wire.Update([encoded(uneven_trees(3))], 1.0)
    for _ in range(NUM_TRIALS):
        rank.run(update)
    rank.run(wire.Save(str(tmp_path / "checkpoint")))
    resumed.run(wire.Load(str(tmp_path / "checkpoint")))
    assert resumed.trainer.layouts.trials == rank.trainer.layouts.trials
    assert layout_of(resumed.run(update).metrics) == "padded"


def test_a_checkpoint_of_an_older_format_has_no_trials() -> None:
    keys = dict.fromkeys(("num_ranks", "zero_stage", "policy_version", "optimizer_step"), 1)
    old = {**keys, "dtype": "float32", "optimizer": "adamw", "moved": False, "base_model": ""}
    assert msgspec.convert(old, SavedLearner).trials == {}


def test_a_layout_that_exceeds_its_limits_is_not_tried(
    trees: list[EncodedTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Layouts(measured(), Policy(tiny_model()), CPU)
    monkeypatch.setattr(layouts, "MOST_TOKENS", 1.0)
    monkeypatch.setattr(layouts, "MOST_KEYS", 1.0)
    for _ in range(NUM_TRIALS + 1):
        with found.update("test", trees):
            assert found.now == "tree"
            list(found.timed(found.pack(trees)))
    assert found.is_decided
    assert {one.layout for one in found.trials["test on cpu"].samples} == {"tree"}


def test_a_failing_or_wrong_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert segments.is_right_on.__wrapped__(CPU)
    assert segments.is_right_on.__wrapped__(torch.device("meta")) is False
    assert "segments are not supported on meta" in caplog.text
    right = segments.segment_attention

    def wrong(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(query, *rest) * (1.1 if query.dtype == torch.bfloat16 else 1.0)

    monkeypatch.setattr(segments, "segment_attention", wrong)
    assert segments.is_right_on.__wrapped__(CPU) is False


def test_the_length_of_paths_selects_the_layout_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no clock, so that equal runs stay equal to the bit."""
    monkeypatch.setattr(Layouts, "_clock", lambda self: pytest.fail("a time is measured"))
    found = Layouts(two_ranks(), Policy(tiny_model()), CPU)
    for length, layout in ((SHORT_PATH - 1, "segments"), (SHORT_PATH, "tree")):
        sequences = [encode_sequence([1] * length, [False] + [True] * (length - 1))] * 3
        with found.update("test", sequences):
            assert found.now == layout
            list(found.timed(found.pack(sequences)))
        assert found.now == "tree"
    with found.update("test", []):
        assert found.now == "tree"


def test_a_configured_layout_is_used_or_refused(trees: list[EncodedTree], tmp_path: Path) -> None:
    policy, hybrid = Policy(tiny_model()), Policy(tiny_model("lfm2"))
    for layout in LAYOUTS:
        found = Layouts(two_ranks(layout=layout), policy, CPU)
        with found.update("test", trees):
            assert {one.layout for one in found.pack(trees)} == {layout}
    for layout in ("auto", "measured"):
        assert Layouts(two_ranks(layout=layout), hybrid, CPU).is_measured is False
    with pytest.raises(ConfigError, match=r"learner.layout = padded: supported here: tree; "):
        Layouts(two_ranks(layout="padded"), hybrid, CPU)
    hybrid.model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"learner.layout: .* conv, which follow trees only"):
        check_model(tmp_path, is_flat=True)
    for keys in ({"layout": "segments", "context_parallel": 2}, {"router_loss": 0.1}):
        with pytest.raises(ConfigError, match=r"learner.layout = .* set learner.layout = \"auto\""):
            two_ranks(**{"layout": "padded", **keys})
    assert (
        Layouts(two_ranks(layout="measured", router_loss=0.1), policy, CPU).offered == LAYOUTS[:2]
    )
