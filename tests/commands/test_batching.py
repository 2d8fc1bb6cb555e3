"""The trees of a step: each is credited once and counted once."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.reports.records import EvalRow
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError, EngineError, EnvError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limit, Message, Task
from agentenv.contract.env import tally
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import DAPO, ReinforcePP
from agentenv.learners.algorithms.credit import TreeCredit
from agentenv.learners.trees.encoded_tree import encode
from agentenv.text.renderer import TagRenderer
from agentenv.training.loop.alarms import Alarms
from agentenv.training.loop.batching import BatchBuilder, RefusedStepError, StepBatch
from agentenv.training.loop.evaluations import refuse_failed
from agentenv.training.loop.parity import is_exact
from agentenv.training.loop.state import RunState
from tests.learners.trees import credited, random_tree
from tests.support.toy import CharTokenizer

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
credit_calls: list[int] = []


class Counting(ARPO, frozen=True, kw_only=True, tag="counting"):
    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        credit_calls.append(tree.index)
        return super().credit(tree)


def builder(algorithm: Algorithm, **queue: Any) -> BatchBuilder:
    config = load_config(TrainConfig, CONFIG)
    config = replace(config, algorithm=algorithm, queue=replace(config.queue, **queue))
    return BatchBuilder(config, RunState())


def settled(ours: BatchBuilder, delivered: list[TrajectoryTree]) -> StepBatch:
    batch = ours.begin(delivered)
    ours.settle(batch)
    return batch


def trees() -> list[TrajectoryTree]:
    """Two trees to train, one with equal returns, one whose leaves failed."""
    grown = [random_tree(Random(i), index=i, num_leaves=5) for i in range(4)]
    for node in grown[2].nodes:
        node.reward = 0.0
    for leaf in grown[3].leaves():
        leaf.end, leaf.error = "failed", "EnvError: down"
    return grown


def test_a_tool_that_always_fails_and_a_policy_jump_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = Alarms(load_config(TrainConfig, CONFIG))
    (tree,) = trees()[:1]

    def step(num_calls: int, num_right: int, moved: float) -> None:
        failed = {"name": "search", "ok": False, "error": "the index is locked"}
        unknown = {"name": "<malformed>", "ok": False, "error": "?"}  # the policy's doing
        calls = [{"name": "search"}] * num_right + [failed] * (num_calls - num_right)
        tree.nodes[2].info["tool_calls"] = [*calls, *[unknown] * 40]
        ours.check_step([tree], {"learner/kl_to_proximal": moved}, {})

    for figures in ((40, 1, 0.01), (2, 0, 0.01), (40, 0, 7.0), (40, 0, 7.0), (40, 1, 0.01)):
        step(*figures)
    assert len(caplog.records) == 2
    assert "'search'" in caplog.messages[0]
    assert caplog.messages[0].endswith("is locked")
    assert "learner/kl_to_proximal" in caplog.messages[1]
    assert all(one.shown for one in caplog.records)  # type: ignore[attr-defined]


def test_a_tool_whose_results_are_cut_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    renderer = TagRenderer(CharTokenizer())
    for length, name in ((9, "list"), (30, "list"), (31, "list"), (8, "book")):
        renderer.observation([Message("tool", "x" * length, name=name)], (), 24)
    assert renderer.num_results == {"list": 3, "book": 1}
    assert tally("num_results_cut/list").number == 2
    (text,) = caplog.messages
    assert "of list" in text


def test_a_cache_without_hits_is_reported_after_three_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one, all turns may follow a wake-up."""
    ours = Alarms(load_config(TrainConfig, CONFIG, ["engine.name=vllm"]))
    for share in (0.0, 0.0, 0.78, 0.0, 0.0):
        ours.check_step([], {}, {"prefix/turn_hits": share})
    ours.check_step([], {}, {})
    assert not caplog.messages
    for _ in range(2):
        ours.check_step([], {}, {"prefix/turn_hits": 0.0})
    assert [text[:21] for text in caplog.messages] == ["prefix/turn_hits is 0"]


def group(index: int, *rewards: float) -> TrajectoryTree:
    """A tree of as many trajectories as rewards; one above 0 is a success."""
    tree = TrajectoryTree(task=Task("t", "env", "?", ("a",)), index=index)
    root = tree.add(None)
    for reward in rewards:
        info = {"success": reward > 0}
        tree.add(root, reward=reward, end="terminated", info=info)
    return tree


def calling(index: int, *errors: str | None, reward: float = 0.0) -> TrajectoryTree:
    """A tree whose calls of a tool had these errors."""
    tree = group(index, reward, 0.0)
    calls = [{"name": "order", "ok": one is None, "error": one} for one in errors]
    tree.nodes[1].info["tool_calls"] = calls
    return tree


REVOKED = [calling(i, *[f"request {i}{j}: HTTP 401" for j in range(5)]) for i in range(2)]
MIXED = [calling(0, *["no order 3"] * 9), calling(1, None)]
WORKING = [calling(0, *[None] * 6, reward=1.0), calling(1, *["no such order"] * 4)]


@pytest.mark.parametrize(
    ("earlier", "now", "share", "refused"),
    [
        (WORKING, REVOKED, 0.25, True),
        (WORKING, REVOKED, 1.0, False),
        (WORKING, MIXED, 0.25, False),
        (WORKING, REVOKED[:1], 0.25, False),  # too few to judge
        (MIXED, REVOKED, 0.25, False),  # it never worked
    ],
)
def test_a_tool_whose_every_call_fails_after_it_worked_trains_nothing(
    earlier: list[TrajectoryTree],
    now: list[TrajectoryTree],
    share: float,
    refused: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = load_config(TrainConfig, CONFIG, [f"limits.max_failed_share={share}"])
    ours = BatchBuilder(config, RunState())
    settled(ours, earlier)
    if not refused:
        settled(ours, now)
        return
    with pytest.raises(RefusedStepError, match=r"10.*'order'") as caught:
        settled(ours, now)
    assert caught.value.trees == [0, 1]
    assert ours.state.counters.num_delivered == len(earlier)


def test_a_step_without_any_trajectory_is_not_trained() -> None:
    ours, (tree,) = builder(ARPO(group_size=4)), trees()[3:]
    with pytest.raises(RefusedStepError, match="all 5 trajectories") as caught:
        settled(ours, [tree])
    assert caught.value.trees == [3]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(52, 12, 0)] * 3, "156 of 192 groups of the last 3 steps have no signal"),
        ([(52, 12, 0)] * 2, ""),
        ([(37, 27, 0)] * 3, ""),
        ([(2, 0, 1)] * 3, ""),  # too few to judge
        ([(0, 4, 60)] * 3, "use harder questions"),
        ([(0, 60, 4)] * 8 + [(0, 4, 60)] * 3, ""),  # it has learned them
    ],
)
def test_many_groups_without_a_signal_are_reported_with_a_remedy(
    steps: list[tuple[int, int, int]], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each step: groups all wrong, with a signal, all right."""
    ours = Alarms(load_config(TrainConfig, CONFIG))
    for wrong, mixed, right in steps:
        rewards = [(0.0,) * 4] * wrong + [(1.0, 0.0, 0.0, 0.0)] * mixed + [(1.0,) * 4] * right
        trees = [group(index, *one) for index, one in enumerate(rewards)]
        ours.check_fates(trees, Counter({"with equal returns": wrong + right}))
    assert len(caplog.messages) == bool(told)
    assert told in caplog.text
    if steps[0][0] == 52:
        assert not told or "algorithm.group_size" in caplog.text


@pytest.mark.parametrize("name", ["arpo", "tree_grpo"])
@pytest.mark.parametrize("num_forks", [None, 0])
def test_an_algorithm_that_finds_no_fork_point_is_reported(
    num_forks: int | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Alarms(load_config(TrainConfig, CONFIG, [f"algorithm.name={name}"]))
    caplog.clear()
    tree = group(0, *[1.0, 0.0] * 8)
    for node in tree.nodes[1:]:
        node.end, node.num_forks = None, num_forks
        tree.add(node, end="terminated", info={"success": True})
    for number in range(2):
        assert not caplog.messages, number
        ours.check_fates([tree], Counter())
    assert len(caplog.messages) == (num_forks is None)


def test_credit_of_a_tree_is_computed_once_an_update() -> None:
    """Although refilling needs it before, accounting afterward, and the learner encodes it."""
    credit_calls.clear()
    ours, delivered = builder(Counting(group_size=4)), trees()
    assert [ours.has_signal(tree) for tree in delivered] == [True, True, False, False]
    groups = settled(ours, delivered).trained
    assert [tree.index for tree, _ in groups] == [0, 1, 2]
    assert all(encode(tree, credit, 0).num_action_tokens for tree, credit in groups)
    assert credit_calls == [0, 1, 2, 3]
    settled(ours, trees())  # the same places in another run of the step
    assert credit_calls == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("keys", "taken", "counts"),
    [
        ({}, [0, 1, 2], (3, 1, 0)),
        ({"equal_groups": "count"}, [0, 1, 2], (3, 1, 0)),
        ({"equal_groups": "drop"}, [0, 1], (2, 0, 1)),
        ({"refill": True}, [0, 1], (2, 0, 1)),
        ({"refill": True, "equal_groups": "drop"}, [0, 1], (2, 0, 1)),
    ],
    ids=str,
)
def test_a_group_of_equal_returns_is_trained_and_counted_or_filtered(
    keys: dict[str, Any], taken: list[int], counts: tuple[int, int, int]
) -> None:
    ours = builder(ARPO(group_size=4), **keys)
    batch = settled(ours, trees())
    assert [tree.index for tree, _ in batch.trained] == taken
    counters = ours.state.counters
    assert (counters.trained, counters.equal, counters.filtered) == counts
    assert counters.failed == {"EnvError": 1}
    counters.offered = 4
    counters.check(in_flight=0)
    fates = ["trained", "trained", "trained" if 2 in taken else "filtered", "failed"]
    assert [one.fate for one in batch.settled] == fates
    assert [one.why for one in batch.settled] == ["", "", "with equal returns", "EnvError"]


@pytest.mark.parametrize(
    ("keys", "number"), [({}, 2), ({"refill": True}, 2), ({"equal_groups": "drop"}, None)], ids=str
)
def test_the_number_of_optimizer_steps_does_not_depend_on_returns(
    keys: dict[str, Any], number: int | None
) -> None:
    ours = builder(ARPO(group_size=4), **keys)  # 16 groups, 8 a mini-batch
    assert ours.num_minibatches(16) == number
    assert ("up to " in ours.config.size_of_update) == (number is None)
    assert ours.config.size_of_update.endswith("2 optimizer steps")


@pytest.mark.parametrize(
    ("algorithm", "keys", "told"),
    [
        (ARPO(), {"refill": True, "equal_groups": "count"}, "queue.refill replaces groups"),
        (DAPO(), {"equal_groups": "count"}, "algorithm.name = dapo replaces groups"),
    ],
)
def test_groups_that_are_replaced_cannot_be_counted(
    algorithm: Algorithm, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=rf'queue.equal_groups = "count": {told}'):
        builder(algorithm, **keys)
    assert not builder(DAPO()).config.counts_equal_groups
    assert not builder(DAPO(), equal_groups="drop").config.counts_equal_groups


def test_terms_omitted_by_drop_are_reported() -> None:
    rules = AEPO(kl_loss=0.1, entropy_bonus=0.01)
    told = builder(rules, equal_groups="drop").config.dropped_terms
    for name in ("kl_loss", "entropy_bonus", "entropy_advantage"):
        assert f"algorithm.{name}" in told
    assert not builder(rules).config.dropped_terms
    assert not builder(ARPO(), equal_groups="drop").config.dropped_terms


def failing(error: str) -> list[TrajectoryTree]:
    """Trees with a leaf that is well and too few of them."""
    grown = trees()[:2]
    for tree in grown:
        for leaf in tree.leaves()[1:]:
            leaf.end, leaf.error = "failed", error
    return grown


def masked() -> list[TrajectoryTree]:
    grown = trees()[:2]
    for leaf in (leaf for tree in grown for leaf in tree.leaves()):
        leaf.end, leaf.limit = "truncated", Limit.SECONDS
    return grown


def test_a_run_that_trains_nothing_ends_with_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    """A step that trains a tree resets the count; each problem is reported once, immediately."""
    ours = builder(ARPO(group_size=4))
    ours.config = replace(ours.config, train=replace(ours.config.train, max_untrained_steps=3))
    for step in (failing("EngineError: gone"), masked(), trees(), masked(), masked()):
        step[0].root.num_forks = 0  # it may fork
        settled(ours, step)
    told = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in told] == ["2", "10", "2", "10"]
    assert "2 of 2" in told[0]
    assert "limits.max_seconds" in told[1]
    assert ours.state.counters.failed == {"EngineError": 2, "EnvError": 1, "seconds (masked)": 6}
    with pytest.raises(EnvError, match=r"2 seconds \(masked\)"):
        settled(ours, masked())


def test_a_replaced_tree_counts_once_in_the_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Of 48 trees 32 were replaced: fewer than the share that is warned of."""
    ours = builder(ARPO(group_size=4), refill=True)
    wrong = [group(index, *[0.0] * 4) for index in range(32)]
    taken = [group(index, 1.0, *[0.0] * 3) for index in range(32, 48)]
    assert [ours.keep(one) for one in [*wrong, *taken]] == [False] * 32 + [True] * 16
    settled(ours, taken)
    assert len(ours.state.counters.failed) == 0
    assert ours.state.counters.filtered == 32
    assert [text for text in caplog.messages if "last 3 steps" in text] == []


def test_a_step_that_never_fills_ends_the_run_too() -> None:
    """Where trees without a signal are replaced, one step's number in a row is an empty step."""
    ours = builder(ARPO(group_size=4))
    config = replace(ours.config, train=replace(ours.config.train, max_untrained_steps=2))
    ours.config = replace(config, queue=replace(config.queue, groups_per_step=4))
    good = trees()[1]
    bad = alike(right=False)[0]
    assert [ours.keep(one) for one in (bad, bad, bad, good)] == [False, False, False, True]
    assert not any(ours.keep(bad) for _ in range(7))
    told = r"no tree had a signal in 2 steps.*of the last 4: 4 with equal returns"
    with pytest.raises(EnvError, match=told):
        ours.keep(bad)


def alike(*, right: bool) -> list[TrajectoryTree]:
    """Trees with equal returns."""
    grown = trees()[:2]
    for node in (node for tree in grown for node in tree.nodes):
        node.reward, node.info = 0.0, {"success": right}
    return grown


@pytest.mark.parametrize(("num_failed", "ends"), [(1, False), (2, True), (9, True)])
def test_before_training_a_fifth_of_failures_is_enough(num_failed: int, ends: bool) -> None:
    ended = [EvalRow(dataset="a", task=f"t{n}", sample=0, end="terminated") for n in range(10)]
    for row in ended[:num_failed]:
        row.end, row.error = "failed", "EnvError: the shop is closed"
    ended.append(EvalRow(dataset="a", task="g", sample=0, end="failed", error="cancelled: by hand"))
    refuse_failed("a", ended)
    if not ends:
        return refuse_failed("a", ended[:-1], is_before=True)
    says = rf"{num_failed} of 10 .* before training, 20% or more: {num_failed} x EnvError: the shop"
    with pytest.raises(EnvError, match=says):
        refuse_failed("a", ended[:-1], is_before=True)


def test_an_evaluation_whose_trajectories_all_failed_is_refused() -> None:
    rows = [EvalRow(dataset="a", task=task, sample=0, end="failed", error="x") for task in "tu"]
    with pytest.raises(EnvError, match=r"2.*eval\.sets\.a"):
        refuse_failed("a", rows)
    refuse_failed("a", [*rows, EvalRow(dataset="a", task="v", sample=0, end="terminated")])
    refuse_failed("a", [])
    for row in rows:
        row.error = "EngineError: all servers are out"
    with pytest.raises(EngineError, match="2 x EngineError"):
        refuse_failed("a", rows)


def test_advantages_are_normalized_over_the_trained_trees_of_an_update() -> None:
    algorithm = ReinforcePP(group_size=4)
    found = settled(builder(algorithm, equal_groups="drop"), trees()).trained
    expected = credited(trees()[:2], algorithm)
    assert [tree.index for tree, _ in found] == [0, 1]
    for (_, credit), (_, wanted) in zip(found, expected, strict=True):
        assert credit.adv_pos.tolist() == wanted.adv_pos.tolist()
    of_all = settled(builder(algorithm), trees()).trained
    assert [tree.index for tree, _ in of_all] == [0, 1, 2]
    assert all(credit.has_signal for _, credit in of_all), "a mean that is not 0 is taken off"


def test_a_run_whose_groups_are_all_equal_ends_though_they_are_counted() -> None:
    ours = builder(ARPO(group_size=4))
    ours.config = replace(ours.config, train=replace(ours.config.train, max_untrained_steps=2))
    assert len(settled(ours, alike(right=True)).trained) == 2
    with pytest.raises(EnvError, match="2 with equal"):
        settled(ours, alike(right=True))


@pytest.mark.parametrize(
    ("gpus", "overrides", "agreement"),
    [
        ("", [], "exact"),
        ("0", [], "exact"),  # Muon: float32 on a GPU too
        ("", ["learner.optimizer=adamw", "sft=none"], "exact"),
        ("0", ["learner.optimizer=adamw", "sft=none"], "unknown"),  # bfloat16
        ("", ["learner={optimizer='adamw',dtype='bfloat16',zero_stage=1}", "sft=none"], "unknown"),
        ("0", ["learner={optimizer='adamw',dtype='bfloat16',zero_stage=1}", "sft=none",
               "engine.dtype=bfloat16"], "unknown"),
    ],
)  # fmt: skip
def test_figures_of_the_embedded_engine_are_the_learners_in_float32_only(
    monkeypatch: pytest.MonkeyPatch, gpus: str, overrides: list[str], agreement: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    config = load_config(TrainConfig, CONFIG, overrides)
    assert is_exact(config) == (agreement == "exact")


class Broken(ARPO, frozen=True, kw_only=True, tag="broken"):
    factor: float = math.nan

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        found = super().credit(tree)
        assert found is not None, "mine"
        return replace_credit(found, found.adv_pos * self.factor)


def replace_credit(credit: TreeCredit, adv_pos: Any) -> TreeCredit:
    rest = (credit.adv_neg, credit.weight, credit.returns, credit.advantages)
    return TreeCredit(adv_pos, *rest)


def test_the_credit_of_a_custom_algorithm_is_checked_when_computed() -> None:
    grown = trees()
    with pytest.raises(ConfigError, match=r"Broken\.credit.*adv_pos"):
        builder(Broken(group_size=5)).credit(grown[0])
    with pytest.raises(
        ConfigError, match=r"(?s)Broken\.credit raised AssertionError: mine.*\(test_b"
    ):
        builder(Broken(group_size=5)).credit(grown[3])
    grown[1].nodes[-1].reward = None  # type: ignore[assignment]
    with pytest.raises(TypeError):  # a bug of our own algorithms keeps its traceback
        builder(ARPO(group_size=5)).credit(grown[1])
