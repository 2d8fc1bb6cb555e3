"""Prefix starts: a group begins after given turns, which are context and nothing else, and where it
begins follows the success of its question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from agentenv.archive import Archive, Credit, Entry, KeptTree, StepHeader
from agentenv.config import load_config
from agentenv.curriculum import Curriculum, Outcomes
from agentenv.dataset import parts_of
from agentenv.env import Env, StepResult
from agentenv.errors import ConfigError, EnvError
from agentenv.frames import ArchiveConfig, Started, framed, read_frames
from agentenv.learners.aepo import AEPO
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.arpo import ARPO
from agentenv.learners.baselines import DAPO, GRPO
from agentenv.learners.gigpo import GiGPO
from agentenv.learners.tree_grpo import TreeGRPO
from agentenv.learners.turnwise import Turnwise
from agentenv.metrics import entropy_profile, rollout_metrics
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.setup.environments import check_replayable
from agentenv.pipelines.viewing.trees import _tree
from agentenv.plan import Independent, RolloutPlan
from agentenv.prefix_starts import (
    BLOCK,
    PrefixStarts,
    PrefixStartsConfig,
    QuestionStarts,
    best_depth,
    expected_rate,
)
from agentenv.rows import CurriculumConfig
from agentenv.tree import GIVEN, LED, REFUSED, GivenTurn, Order, Start, TrajectoryTree, packed_ids
from agentenv.types import Info, Limits, Message, Task
from tests import test_journal
from tests.support.toy import CharTokenizer, CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.support.warehouse import ROOT
from tests.test_actor import TASK, make_actor
from tests.test_late_forks import searches

NUM_GIVEN = 2
PLAN = Independent(4)


@pytest.fixture(autouse=True)
def _no_env_left_open() -> Iterator[None]:
    CountingEnv.num_open = 0
    yield
    assert CountingEnv.num_open == 0


def start_of(tree: TrajectoryTree, size: int = NUM_GIVEN) -> Start:
    """After the first turns of the first trajectory of a tree."""
    path = next(tree.trajectories()).turns[:size]
    turns = [GivenTurn(node.action_ids, node.observation_ids) for node in path]
    return Start(tree.index, True, tree.root.observation_ids, turns)


def grown(
    plan: RolloutPlan,
    start: Start | None,
    index: int = 1,
    **keys: object,
) -> TrajectoryTree:
    actor = make_actor(searches, **keys)  # type: ignore[arg-type]
    return run_virtual(actor.rollout(TASK, plan, index=index, order=Order(start)))


@pytest.fixture
def start() -> Start:
    return start_of(grown(Independent(1), None, 0))


ALGORITHMS: list[Algorithm] = [
    GRPO(group_size=6),
    ARPO(group_size=6, initial_rollouts=3, beam_size=2, base_probability=0.9),
    Turnwise(group_size=6, initial_rollouts=2, plan_name="uniform", weight_exponent=0.5),
    Turnwise(group_size=6, initial_rollouts=2, plan_name="spread", local=1.0),
    AEPO(group_size=6),
    TreeGRPO(group_size=6, initial_rollouts=2),
    GiGPO(group_size=6),
    DAPO(group_size=6),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_every_trajectory_continues_from_tokens_and_state_of_the_start(
    algorithm: Algorithm, start: Start
) -> None:
    """The env counts its searches and returns the number: after a replay it continues with the
    next."""
    tree = grown(algorithm.plan(256), start)
    paths = list(tree.trajectories())
    assert len(paths) == 6
    given = [token for turn in start.turns for token in turn.action_ids + turn.observation_ids]
    for path in paths:
        assert path.token_ids[: len(tree.prompt_ids) + len(given)] == [*tree.prompt_ids, *given]
        text = CharTokenizer().decode(path.token_ids)
        numbers = [int(part.split(":")[0]) for part in text.split("<result>\n")[1:]]
        assert numbers == list(range(1, len(numbers) + 1))
        assert path.reward == len(numbers), "the env has seen the given calls"
    assert len({tuple(path.token_ids) for path in paths}) > 1, "they differ after it"
    assert tree.given == start.turns
    assert tree.prompt_ids == start.prompt_ids


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_given_tokens_are_masked_and_have_no_weight(algorithm: Algorithm, start: Start) -> None:
    tree = grown(algorithm.plan(256), start)
    for number, leaf in enumerate(tree.leaves()):
        leaf.reward = float(number % 2)
    credit = algorithm.credit(tree)
    assert credit is not None
    assert credit.has_signal
    names = Credit.__struct_fields__
    kept = KeptTree(tree, "trained", "", Credit(*(getattr(credit, one).tolist() for one in names)))
    size = len(tree.root.observation_ids)
    for path in tree.trajectories():
        assert not any(path.loss_mask[:size])
        assert all(path.loss_mask[size : size + len(path.turns[0].action_ids)])
        columns = kept.columns(path.leaf)
        assert not columns.mask[:size].any()
        assert not np.any([columns.weight[:size], columns.adv_pos[:size], columns.adv_neg[:size]])
        assert np.isnan(columns.logprobs[:size]).all()
        assert np.isnan(columns.entropies[:size]).all()
        assert columns.weight[size] > 0
    sampled = sum(len(node.action_ids) for node in tree.nodes[1:])
    assert tree.num_action_tokens == sampled, "nothing of the start was sampled"
    assert not tree.root.version_spans, "nor does it make the tree stale"


def test_calls_up_to_the_start_count_as_replayed_calls(start: Start) -> None:
    tree = grown(Independent(3), start)
    led = [node.info.get(LED, 0) for node in tree.nodes if node.parent == 0]
    assert led == [NUM_GIVEN] * 3
    metrics = rollout_metrics([tree], 0)
    assert metrics["rollout/led_calls"] == 3 * NUM_GIVEN
    own = sum(len(node.info.get("tool_calls", ())) for node in tree.nodes)
    assert metrics["rollout/tool_calls"] == own
    text = CharTokenizer().decode(next(tree.trajectories()).token_ids)
    assert text.count("<result>") > max(metrics["rollout/turns"] - 1, 0)


def test_limits_include_the_given_turns(start: Start) -> None:
    tree = grown(Independent(4), start, limits=Limits(max_turns=NUM_GIVEN + 1))
    assert {(len(path.turns), path.leaf.limit) for path in tree.trajectories()} == {(1, "turns")}
    tree = grown(Independent(4), start, limits=Limits(max_tool_calls=NUM_GIVEN))
    assert {len(path.turns) for path in tree.trajectories()} == {1}
    tree = grown(Independent(4), start, limits=Limits(max_turns=NUM_GIVEN))
    assert REFUSED in tree.root.info, "no turn is left"


class DifferingEnv(CountingEnv):
    """Answers otherwise than the env of the trajectory that the start comes from."""

    async def step(self, action: Message) -> StepResult:
        messages, *rest = await super().step(action)
        return [Message("tool", f"{one.content}!") for one in messages], *rest


def test_an_env_with_other_replies_begins_at_the_question(start: Start) -> None:
    actor = make_actor(searches)
    actor.make_env = DifferingEnv
    tree = run_virtual(actor.rollout(TASK, Independent(4), index=1, order=Order(start)))
    assert tree.root.info == {REFUSED: {"tree": 0, "success": True}}
    assert not tree.given
    assert not tree.failures()
    actor = make_actor(searches)
    actor.make_env = DifferingEnv
    scratch = run_virtual(actor.rollout(TASK, Independent(4), index=1))
    assert [path.token_ids for path in tree.trajectories()] == [
        path.token_ids for path in scratch.trajectories()
    ], "as if there had been no start"
    assert tree.num_roots == 4


class Dying(DifferingEnv):
    """The second one of them, in which the root begins, answers once."""

    num_made = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        Dying.num_made += 1
        self.number = Dying.num_made

    async def step(self, action: Message) -> StepResult:
        if self.number == 2 and self.calls:
            raise EnvError("on purpose")
        return await super().step(action)


def test_a_root_with_a_refused_start_is_replayed_like_any_other(start: Start) -> None:
    actor = make_actor(searches)
    actor.make_env = Dying
    tree = run_virtual(actor.rollout(TASK, Independent(1), index=1, order=Order(start)))
    assert REFUSED in tree.root.info
    assert Dying.num_made == 3
    assert (tree.num_retaken, tree.num_retries, len(list(tree.trajectories()))) == (1, 0, 1)


def test_a_start_of_another_prompt_is_refused(start: Start) -> None:
    start.prompt_ids[0] += 1
    tree = grown(Independent(2), start)
    assert REFUSED in tree.root.info
    assert len(list(tree.trajectories())) == 2


def test_from_every_cut_of_the_journal_the_same_tree_results(tmp_path: Path) -> None:
    first = grown(Independent(1), None, 0)
    start = start_of(first, 1)
    whole = test_journal.grown(tmp_path / "w", test_journal.make_actor(), PLAN, start=start)
    assert whole.given
    seen = Counter[str]()
    for number, cut in enumerate(test_journal.cuts(tmp_path / "w")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "000001.frames").write_bytes(cut)
        recorded = test_journal.read(folder)
        if recorded is not None and recorded.is_finished:
            continue
        seen["anew" if recorded is None else "gone on with"] += 1
        again = test_journal.grown(
            folder, test_journal.make_actor(), PLAN, incarnation=2, start=start
        )
        assert test_journal.paths_by_branch(again) == test_journal.paths_by_branch(whole)
        assert again.root.info == whole.root.info
        calls = ("rollout/led_calls", "rollout/tool_calls")
        mine, other = rollout_metrics([again], 0), rollout_metrics([whole], 0)
        assert [mine[name] for name in calls] == [other[name] for name in calls]
    assert min(seen.values()) > 1


# figures


def test_success_and_entropy_are_those_of_groups_that_begin_at_the_question(start: Start) -> None:
    given, scratch = grown(Independent(4), start), grown(Independent(4), None, 2)
    for leaf in scratch.leaves():
        leaf.info["success"], leaf.reward = False, 0.0
    assert all(path.success for path in given.trajectories())
    both, alone = rollout_metrics([given, scratch], 0), rollout_metrics([scratch], 0)
    for name in ("reward/mean", "reward/success", "reward/success_if_failed_wrong"):
        assert both[name] == alone[name] == 0.0
    assert both["rollout/trajectories"] == 8
    only = rollout_metrics([given], 0)
    assert not [name for name in only if name.startswith("reward/")]
    assert entropy_profile([given]).start.mean == []
    assert entropy_profile([scratch]).start.mean != []


def test_a_curriculum_uses_only_groups_that_begin_at_the_question(start: Start) -> None:
    outcomes = Outcomes()
    curriculum = Curriculum(CurriculumConfig(), parts_of([TASK]), 0, outcomes)
    curriculum.add([grown(Independent(4), start)])
    assert outcomes.questions == {}
    curriculum.add([grown(Independent(4), None, 2)])
    assert outcomes.questions == {"t": (1.0, 1.0)}


# where a group begins


@pytest.mark.parametrize(
    ("q", "length", "success", "known", "expected"),
    [
        (0.0, 6, True, {}, 3),  # 0.5 = 3 / 6
        (0.2, 6, True, {}, 2),  # 0.2 + 0.8 / 3 = 0.47, nearer than 0.6
        (0.2, 6, True, {2: 0.9}, 3),  # measured: too easy
        (0.2, 6, True, {1: 0.52, 2: 0.9}, 1),
        (1.0, 6, False, {}, 3),
        (0.8, 5, False, {}, 2),  # 0.8 * 3 / 5 = 0.48
        (0.8, 5, False, {2: 0.1, 1: 0.3}, 3),  # 0.32 by the formula, nearer than 0.3
        (0.0, 2, True, {}, 1),
        (0.0, 3, True, {}, 1),  # 1 / 3 and 2 / 3 are equally near
    ],
)
def test_the_depth_is_the_one_whose_success_is_nearest_to_half(
    q: float, length: int, success: bool, known: dict[int, float], expected: int
) -> None:
    assert best_depth(q, length, known, success=success) == expected


def test_the_expected_success_interpolates_between_question_and_outcome() -> None:
    for q in (0.0, 0.1, 0.8):
        assert expected_rate(q, 0, 5, success=True) == expected_rate(q, 0, 5, success=False) == q
        assert expected_rate(q, 5, 5, success=True) == pytest.approx(1.0)
        assert expected_rate(q, 5, 5, success=False) == pytest.approx(0.0)


def group(
    index: int, *lengths: tuple[int, bool], task: str = "t", start: Start | None = None
) -> TrajectoryTree:
    """A trajectory from scratch of each length, with its success."""
    tree = TrajectoryTree(Task(task, "toy", "?", ()), index=index)
    tree.add(None, observation_ids=[7])
    if start is not None:
        tree.root.observation_ids += packed_ids(
            [one for turn in start.turns for one in (*turn.action_ids, *turn.observation_ids)]
        )
        tree.root.info[GIVEN] = {
            "tree": start.tree,
            "success": start.success,
            "turns": [[1, 1]] * len(start.turns),
        }
    for number, (length, success) in enumerate(lengths):
        node = tree.root
        for turn in range(length):
            node = tree.add(
                node,
                branch=str(number),
                action_ids=[10 * index + turn],
                observation_ids=[] if turn == length - 1 else [turn],
            )
        node.end, node.info = "terminated", {"success": success}
    return tree


class Run:
    """Groups of questions, one an update."""

    def __init__(self, num_steps: int = 1000, **keys: float) -> None:
        self.config = PrefixStartsConfig(**{"root_share": 0.0, **keys})  # type: ignore[arg-type]
        self.questions: dict[str, QuestionStarts] = {}
        self.num_steps = num_steps
        self.starts = PrefixStarts(self.config, self.questions, 0, num_steps)
        self.step = 0

    def choose(self, task: str = "t", position: int | None = None) -> Start | None:
        place = self.step if position is None else position
        return self.starts.choose(place, self.step, self.step, Task(task, "toy", "?", ()))

    def group(self, *lengths: tuple[int, bool], task: str = "t") -> Start | None:
        """Where the next group began, of which this came."""
        start = self.choose(task)
        tree = group(self.step, *lengths, task=task, start=start)
        self.figures = self.starts.learn(self.step + 1, [tree])
        self.step += 1
        return start


def test_groups_that_mostly_fail_begin_after_a_success() -> None:
    run = Run()
    assert run.group((4, True), *[(2, False)] * 7) is None, "nothing is known"
    second = run.group((3, True), (3, False))
    assert second == Start(0, True, packed_ids([7]), second.turns if second else [])
    assert [list(turn.action_ids) for turn in second.turns] == [[0], [1]]
    assert run.figures == {
        "starts/share": 1.0,
        "starts/refused": 0.0,
        "starts/turns": 2.0,
        "starts/success": 0.5,
    }
    assert run.questions["t"].rate == 0.125, "without the given group"
    assert run.questions["t"].after_success == {2: 0.5}


def test_an_average_counts_a_new_group_three_tenths() -> None:
    run = Run(root_share=1.0)
    run.group((4, True), (2, False))
    run.group((2, False))
    assert run.questions["t"].rate == pytest.approx(0.7 * 0.5)


def test_groups_that_mostly_succeed_begin_after_a_failure() -> None:
    run = Run()
    run.group(*[(3, True)] * 7, (4, False))
    start = run.group((2, True))
    assert start is not None
    assert not start.success
    assert len(start.turns) == 2, "0.875 * (1 - 2 / 4) is nearest to 0.5"
    assert run.questions["t"].after_failure == {2: 1.0}


@pytest.mark.parametrize("right", [2, 4, 6])
def test_groups_in_the_middle_begin_at_the_question(right: int) -> None:
    run = Run()
    for _ in range(5):
        assert run.group(*[(3, number < right) for number in range(8)]) is None


def test_groups_without_a_fitting_trajectory_begin_at_the_question() -> None:
    run = Run()
    for _ in range(3):
        assert run.group(*[(3, False)] * 8) is None, "no success is known"
    run = Run()
    for _ in range(3):
        assert run.group((1, True), *[(3, False)] * 8) is None, "a success of one turn"


def test_a_trajectory_of_a_given_group_is_kept_with_its_given_turns() -> None:
    run = Run(keep=1)
    run.group((4, True), *[(2, False)] * 7)
    run.group((3, True), (3, False))
    (kept,) = run.questions["t"].successes
    assert kept.tree == 1
    start = run.group((2, False))
    assert start is not None
    assert [list(turn.action_ids) for turn in start.turns[:2]] == [[0], [1]], "as it was given"


def test_old_trajectories_are_not_used_and_no_more_than_keep_are_kept() -> None:
    run = Run(max_age=3, keep=2)
    run.group((4, True), *[(2, False)] * 7)
    for _ in range(4):
        run.group(*[(2, False)] * 8, task="other")
    assert run.questions["t"].successes == []
    assert run.choose() is None
    run = Run(keep=2)
    for _ in range(6):
        run.group((4, True), *[(2, False)] * 7)
    assert [one.tree for one in run.questions["t"].successes] == [4, 5]


@pytest.mark.parametrize("root_share", [0.0, 0.5, 0.81, 1.0])
def test_the_root_share_of_groups_begins_at_their_questions(root_share: float) -> None:
    """Of each block of groups, for any order of their questions, and of the groups of each
    question."""
    run = Run(root_share=root_share, num_steps=10**6)
    run.group((4, True), *[(2, False)] * 7, task="a")
    run.group((4, True), *[(2, False)] * 7, task="b")
    began = [run.choose("ab"[number % 2], number) is not None for number in range(2000)]
    expected = {0.0: 20, 0.5: 10, 0.81: 3, 1.0: 0}[root_share]
    assert {sum(began[at : at + BLOCK]) for at in range(0, 2000, BLOCK)} == {expected}
    assert sum(began[::2]) == pytest.approx(1000 * expected / BLOCK, abs=60)


def test_all_groups_of_the_last_updates_begin_at_the_question() -> None:
    run = Run(num_steps=20)
    began = [run.group((4, True), *[(2, False)] * 7) is not None for _ in range(20)]
    assert any(began[10:16])
    assert not any(began[16:])


def archived(folder: Path, step: int, tree: TrajectoryTree) -> None:
    header = StepHeader(step, 0, 1, "", 9, 1)
    Archive(folder, ArchiveConfig()).write(header, [KeptTree(tree, "trained")])


def test_a_resumed_run_chooses_the_starts_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """From the state of a checkpoint and the archive."""
    rng = Random(1)
    run = Run()
    for _ in range(40):
        task = rng.choice("abc")
        chance = {"a": 0.1, "b": 0.5, "c": 0.9}[task]
        start = run.choose(task)
        paths = [(rng.randrange(2, 6), rng.random() < chance) for _ in range(8)]
        tree = group(run.step, *paths, task=task, start=start)
        archived(tmp_path, run.step + 1, tree)
        run.starts.learn(run.step + 1, [tree])
        run.step += 1
    saved = msgspec.json.encode(run.questions)
    wanted = [run.choose(task, 40 + at) for at, task in enumerate("aabbcc" * 3)]
    assert {one is None or one.success for one in wanted} == {True, False}
    again = Run()
    again.questions = msgspec.json.decode(saved, type=dict[str, QuestionStarts])
    again.starts = PrefixStarts(run.config, again.questions, 0, run.num_steps)
    again.step = run.step
    again.starts.restore(tmp_path)
    assert [again.choose(task, 40 + at) for at, task in enumerate("aabbcc" * 3)] == wanted


def test_a_trajectory_missing_in_the_archive_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()
    run.group((4, True), *[(2, False)] * 7)
    again = Run()
    again.starts = PrefixStarts(run.config, run.questions, 0, 100)
    again.starts.restore(tmp_path)
    again.step = 1
    assert again.choose() is None
    assert "archive.max_gb" in caplog.text


def test_the_journal_records_the_start_of_a_tree(start: Start) -> None:
    frame = Started(3, 1, 0.0, "t", Order(start))
    ((_, found),) = read_frames(framed(frame))
    assert found == frame


class Program(CountingEnv):
    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        messages, info = await super().reset()
        return messages, info | {"turn": {}}


@pytest.mark.parametrize(
    ("make_env", "why"),
    [
        (partial(CountingEnv, fork_mode="none"), "cannot be copied or replayed"),
        (Program, "is a program, whose trajectories have several contexts"),
    ],
)
async def test_environments_that_cannot_be_replayed_are_refused(
    make_env: Callable[[Task], Env], why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.prefix_starts: the environment toy {why}.*; "):
        await check_replayable(make_env, TASK, "data.prefix_starts")


def test_environments_that_can_be_replayed_are_not_refused() -> None:
    run_virtual(check_replayable(CountingEnv, TASK, "data.prefix_starts"))


def test_prefix_starts_require_an_archive() -> None:
    keys = ("data.prefix_starts={}", "archive.max_gb=0")
    with pytest.raises(ConfigError, match=r"data.prefix_starts: .* archive.max_gb = 0 turns off"):
        load_config(TrainConfig, ROOT / "configs" / "quickstart.toml", keys)


def test_the_page_of_a_tree_shows_which_turns_were_given(start: Start) -> None:
    kept = KeptTree(grown(Independent(2), start), "trained")

    def texts(ids: Sequence[int]) -> list[str]:
        return [CharTokenizer().decode([one]) for one in ids]

    shown = _tree(kept, Entry.of(kept), texts)["nodes"][0]["observation"]
    prompt, first, second = shown.split("\n[given turn ")
    assert prompt == "how many?\n"
    assert first.startswith("1, of tree 0; not trained]\n<think>")
    assert "1:q" in first
    assert "2:q" in second


def test_contradictory_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"low = 0.8 must be below high = 0.75"):
        PrefixStartsConfig(low=0.8)
