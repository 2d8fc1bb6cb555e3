"""One training run from set-up to report.

setup        make or check model, data and environment; nothing is trained yet
cold start   imitate demonstrations, if [sft] is configured
RL           feeder --slot--> rollouts --trees--> learner    all at the same time: actors go
                ^                                    |       on while the learner trains and
                +---- release <--- engine <--- publish       weights are replaced
evaluation   before, after the cold start, every so many steps, and at the end
checkpoint   after the cold start, every so many steps or minutes, and whatever ends the run
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.actor import Actor
from agentenv.archive import Fate, StepHeader
from agentenv.cluster.workers import RolloutWorkers
from agentenv.config import to_plain
from agentenv.dataset import TaskStream
from agentenv.deadline import uncancelled
from agentenv.engine import Engine
from agentenv.engines.pool.engine import PooledEngineConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.env import shared_stats
from agentenv.errors import SHOWN, EnvError, LearnerError
from agentenv.journal import Journal, Leased, Recorded, Started, Trained
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.credit import CreditedTree, TreeCredit, counted_leaves, step_score
from agentenv.learners.learner import Agreement, Metrics, lr_factor, optimizer_of
from agentenv.learners.partition import forget_entropies
from agentenv.metrics import (
    LoopLag,
    Throughput,
    entropy_profile,
    failure_kind,
    rollout_metrics,
    trained_metrics,
)
from agentenv.offload import in_thread
from agentenv.pipelines.cluster.places import Elsewhere, Places
from agentenv.pipelines.cluster.processes import WorkerProcesses
from agentenv.pipelines.config.cluster import (
    FOLDER,
    ExternalCluster,
    RayCluster,
    Setup,
    SpreadCluster,
)
from agentenv.pipelines.config.rl import WHERE, TrainConfig
from agentenv.pipelines.rl import report
from agentenv.pipelines.rl.cold_start import ColdStart
from agentenv.pipelines.rl.evaluations import Evaluator
from agentenv.pipelines.rl.inflight import Flight, Orders
from agentenv.pipelines.rl.parts import Build, Parts, build_parts
from agentenv.pipelines.rl.recorder import (
    PhaseClock,
    Recorder,
    Settled,
    Stopwatch,
    Told,
    adding,
    first_entropies,
)
from agentenv.pipelines.rl.report import LiveFigures
from agentenv.pipelines.rl.self_critic import SelfCritic, round_line
from agentenv.pipelines.rl.state import RunSaver, RunState
from agentenv.pipelines.run.event_loop import rolling_out
from agentenv.pipelines.run.rundir import JOURNAL, RunDirectory, load_state
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.run.timings import FILE as TIMINGS
from agentenv.pipelines.run.timings import TimedEngine, Timings
from agentenv.pipelines.run.waits import watched
from agentenv.pipelines.serving.gpus import trains_on_gpu
from agentenv.queue import ReplayQueue
from agentenv.redact import Redactor
from agentenv.tree import TrajectoryTree
from agentenv.types import MALFORMED_CALL, TIMES, UNKNOWN_TOOL, Limit, Task

logger = logging.getLogger(__name__)

EQUAL = "with equal returns"  # why a tree teaches nothing
ROOM_S = 0.2  # between two looks at whether a tree may begin
MANY_CALLS = 10  # of a tool in a step, of which one might succeed
MAX_SAID = 500  # characters of a warning
FAR_KL = 0.5  # nats a token; updates that learn move by a hundredth of that
MAX_LATE = 0.01  # share of trajectories cut by seconds above which that is said


def is_exact(config: TrainConfig) -> bool:
    """Whether the engine's figures are the learner's up to rounding in float32: both round to
    bfloat16 in places of their own."""
    local = config.engine.local_model
    if local is None or not config.engine.is_exact:
        return config.engine.is_exact
    learner = config.learner.resolved(on_gpu=trains_on_gpu(config))
    return learner.dtype == local.dtype == "float32"


class StepAccounts:
    """Says what becomes of each tree of a step, and keeps the sums of it in the run's state."""

    def __init__(self, config: TrainConfig, state: RunState) -> None:
        self.config = config
        self.state = state
        self.counts_equal = config.counts_equal_groups
        self.is_exact = is_exact(config)
        self.agreement: Agreement = "exact" if self.is_exact else "unknown"
        self._credits: dict[int, TreeCredit | None] = {}  # by the tree's index, until it settles
        self.settled: list[Settled] = []  # the trees of the last step
        self._num_untrained = 0  # steps in a row without a trained tree
        self._refused: list[TrajectoryTree] = []  # in a row, fewer than a step has
        self._said: set[str] = set()  # warnings that hold since the last step

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        """The tree's credit, computed once; None where too few leaves count for a group."""
        if tree.index not in self._credits:
            self._credits[tree.index] = self.config.algorithm.credit(tree)
        return self._credits[tree.index]

    def has_signal(self, tree: TrajectoryTree) -> bool:
        """Whether the tree will be trained on returns that are not all equal."""
        credit = self.credit(tree)
        return credit is not None and credit.has_signal

    def keep(self, tree: TrajectoryTree) -> bool:
        """Whether a tree is one of those that a step waits for, which has a signal.

        Each time that as many as a step has are not, one after the other, they count as a step
        without a signal, since the one that is waited for may never be full. Raises EnvError as
        `settle` does.
        """
        if self.has_signal(tree):
            self._refused, self._num_untrained = [], 0
            return True
        self._refused.append(tree)
        if len(self._refused) == self.config.queue.groups_per_step:
            row, self._refused = self._refused, []
            refuse_total_failure(row)
            self._judge(row, Counter(self._why(one, self.credit(one)) for one in row))
        return False

    @staticmethod
    def _why(tree: TrajectoryTree, credit: TreeCredit | None) -> str:
        """Why a tree has no signal."""
        return failure_kind(tree) if credit is None else EQUAL

    def settle(self, delivered: list[TrajectoryTree]) -> list[CreditedTree]:
        """Account for each tree of a step: trained, filtered (all returns equal and not counted) or
        failed. Returns those to train, with their credit.

        Raises EnvError when not one trajectory succeeded, or when no tree had a signal for
        `train.max_untrained_steps` steps; then nothing is counted.
        """
        refuse_total_failure(delivered)
        trained: list[CreditedTree] = []
        fates: Counter[str] = Counter()
        own = [self.credit(tree) for tree in delivered]
        is_taken = [one is not None and (self.counts_equal or one.has_signal) for one in own]
        credits = credits_of_update(self.config.algorithm, delivered, own, is_taken)
        settled: list[Settled] = []
        for tree, credit, taken in zip(delivered, credits, is_taken, strict=True):
            self._credits.pop(tree.index)
            has_signal = credit is not None and credit.has_signal
            why = "" if has_signal else self._why(tree, credit)
            fate: Fate = "failed" if credit is None else "filtered"
            if credit is not None and taken and (self.counts_equal or has_signal):
                fate = "trained"
                trained.append((tree, credit))
            settled.append(Settled(tree, credit, fate, why))
            fates.update([why] if why else [])
        self._judge(delivered, fates)
        self.settled = settled
        num_equal = fates.pop(EQUAL, 0)
        equal, filtered = (num_equal, 0) if self.counts_equal else (0, num_equal)
        self.state.ledger.add(len(trained), filtered, fates, equal)
        return trained

    def num_minibatches(self, num_taken: int) -> int | None:
        """Optimizer steps of an epoch over a step for which the queue gave so many trees: fixed,
        whatever their returns; None where it depends on how many have a signal."""
        if not (self.counts_equal or self.config.refills):
            return None
        return -(-num_taken // self.config.learner.groups_per_minibatch)

    def _judge(self, delivered: list[TrajectoryTree], fates: Counter[str]) -> None:
        """Say at once, when it begins, that most of a step is lost; end a run without a signal.
        `fates` counts the trees that have none, by the reason."""
        reasons = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
        num_lost = fates.total() - fates[EQUAL]
        self._say(
            "lost",
            num_lost > len(delivered) / 2,
            f"{num_lost} of {len(delivered)} trees of the step were dropped: {reasons}",
        )
        everything = [one for tree in delivered for one in tree.trajectories()]
        ends = [one.leaf.limit for one in everything]
        limits = Counter(filter(None, ends))
        advice = (
            "is the answer in the form that the grader reads, and does the prompt "
            "(prompt.template) tell the policy of its tools?"
        )
        if limits.total() > len(ends) / 2:
            limit, count = limits.most_common(1)[0]
            advice = f"{count} of {len(ends)} trajectories were cut by the limit of {limit}"
        self._say(
            "unlearned",
            fates[EQUAL] == len(delivered) and not any(one.success for one in everything),
            "no tree of the step teaches anything: in each all returns are equal, and no answer "
            f"is right; read trajectories/: {advice}",
        )
        num_late = ends.count(Limit.SECONDS)
        self._say(
            "late",
            num_late > len(ends) * MAX_LATE,
            f"{num_late} of {len(ends)} trajectories ended at limits.max_seconds or "
            "max_tree_seconds; the longest go first, so that what is left is no fair sample: raise "
            "them, or look for what is slow (tool/NAME/mean_s, engine/waiting)",
        )
        self._num_untrained = self._num_untrained + 1 if fates.total() == len(delivered) else 0
        allowed = self.config.train.max_untrained_steps
        if allowed and self._num_untrained >= allowed:
            num_right = sum(one.success for one in everything)
            raise EnvError(
                f"no tree had a signal in {allowed} steps in a row (train.max_untrained_steps); of "
                f"the last {len(delivered)}: {reasons}; {num_right} of their {len(everything)} "
                "answers were right"
            )

    def look_at_hits(self, hits: Metrics) -> None:
        """Say when a server with a prefix cache finds nothing in it."""
        for name, share in hits.items():
            self._say(
                name,
                share == 0 and not self.config.engine.is_exact,
                f"{name} is 0: the engine computes every prefix again; is its prefix cache off, or "
                "too small for the trajectories in flight?",
            )

    def look_at_tools(self, metrics: Metrics, trees: Sequence[TrajectoryTree] = ()) -> None:
        """Say when each call of a tool fails, and what it said in the first of the trees."""
        for name in [key for key in metrics if key.startswith("tool/") and key.endswith("/calls")]:
            if name[5:-6] in (UNKNOWN_TOOL, MALFORMED_CALL):  # by the policy, no tool
                continue
            calls, errors = metrics[name], metrics.get(f"{name[:-6]}/errors", 0.0)
            if calls >= MANY_CALLS and errors == calls:
                tool, said = name[5:-6], "what they were told stands in trajectories/"
                records = (
                    record
                    for tree in trees
                    for node in tree.nodes
                    for record in node.info.get("tool_calls", ())
                )
                said = next((one["error"] for one in records if one["name"] == tool), said)
                text = f"all {calls:.0f} calls of the tool {tool!r} in this step failed: {said}"
                self._say(name, True, text[:MAX_SAID])
            else:
                self._said.discard(name)

    def look_at_update(self, metrics: Metrics) -> None:
        """Say when an update has moved the policy further than any that learns."""
        moved = metrics.get("learner/kl_to_proximal", 0.0)
        self._say(
            "moved",
            moved > FAR_KL,
            f"the update moved the policy by {moved:.2g} nats a token (learner/kl_to_proximal), "
            f"above {FAR_KL:g}: learner.learning_rate is too high, or engine and learner disagree",
        )

    def _say(self, what: str, holds: bool, text: str) -> None:
        if holds and what not in self._said:
            logger.warning("%s", text, extra=SHOWN)
        (self._said.add if holds else self._said.discard)(what)

    async def parity(self, parts: Parts) -> Metrics:
        """The gap that the probe found since the last call; a warning if it is too wide, and a
        LearnerError if it is so wide that one of them computes another model."""
        gap = await parts.probe.finish()
        if gap is None:
            return {}
        self.state.parity.add(gap)
        if not self.is_exact:
            is_close = gap.max <= self.config.train.max_logprob_gap
            self.agreement = "close" if is_close else "unknown"
        allowed = max(self.config.train.stop_logprob_gap, self.config.train.max_logprob_gap)
        if gap.mean > allowed:
            raise LearnerError(
                f"{gap.worst or 'the engine'} and the learner disagree by {gap.mean:.2g} nats a "
                f"token at policy version {parts.learner.policy_version}, more than "
                f"train.stop_logprob_gap = {allowed:g}: they do not "
                "compute the same model; look for another dtype, quantization or model path"
            )
        if gap.max > self.config.train.max_logprob_gap:
            logger.warning(
                "%s and learner disagree by up to %.4f nats at policy version %d "
                "(train.max_logprob_gap = %g)",
                gap.worst or "engine",
                gap.max,
                parts.learner.policy_version,
                self.config.train.max_logprob_gap,
                extra=SHOWN,
            )
        return {"parity/logprob_gap_mean": gap.mean, "parity/logprob_gap_max": gap.max}


def engine_account(engine: Engine) -> dict[str, Any]:
    """What befell the engine, for the summary; of one without servers its counters."""
    if isinstance(engine, EnginePool):
        return engine.account()
    return dict(engine.stats())


def credits_of_update(
    algorithm: Algorithm,
    trees: Sequence[TrajectoryTree],
    own: Sequence[TreeCredit | None],
    is_taken: Sequence[bool],
) -> list[TreeCredit | None]:
    """Credit of the trees of a step, from that of each by itself: what an algorithm computes over
    an update is over those that are taken, the others keep their own."""
    taken = [one if is_one else None for one, is_one in zip(own, is_taken, strict=True)]
    found = zip(algorithm.over_update(trees, taken), own, is_taken, strict=True)
    return [after if is_one else before for after, before, is_one in found]


def refuse_total_failure(trees: list[TrajectoryTree]) -> None:
    """Stop when not one trajectory of a step succeeded: something is broken, not unlucky. What a
    person has given up says nothing."""
    failures = [leaf for tree in trees if not tree.is_cancelled for leaf in tree.failures()]
    if failures and not any(True for tree in trees for _ in tree.trajectories()):
        raise EnvError(
            f"all {len(failures)} trajectories of a step failed; the first: {failures[0].error}"
        )


def rollout_settings(config: TrainConfig) -> str:
    """Names what trees depend on, but for weights and limits of time: one that was begun under
    other settings is not gone on with."""
    tables = ("model", "data", "env", "python", "search", "grader", "prompt", "renderer", "limits")
    plain = to_plain(config)
    plain["env"] = {key: value for key, value in plain["env"].items() if key not in WHERE}
    plain["limits"] = {key: value for key, value in plain["limits"].items() if key not in TIMES}
    chosen = {name: plain.get(name) for name in (*tables, "sampling", "algorithm")}
    return blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=8).hexdigest()


class Training:
    """State and loops of one run."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        view: View,
        *,
        resume: str,
        build: Build = build_parts,
    ) -> None:
        """`resume`: latest, best or a checkpoint's path; empty starts anew. `build` makes the parts
        that the loop works with."""
        self.config = config
        self.run = run
        self.view = view
        self.state = RunState()
        self._build = build
        self.checkpoint: Path | None = None
        if resume:
            self.checkpoint = run.checkpoints.to_resume(resume)
        if self.checkpoint is not None:
            run.check_optimizer(config.learner.optimizer)
            self.state = load_state(self.checkpoint, RunState)
        self.state.incarnation = run.count_start(self.state.incarnation)
        self.settings = rollout_settings(config)
        self.accounts = StepAccounts(config, self.state)
        self.clock = PhaseClock(self.state.wall_s, self.state.cpu_s)
        self.queue = ReplayQueue(
            config.queue.groups_per_step,
            config.queue.max_staleness,
            just_in_time=config.queue.just_in_time,
        )
        self.refill = config.refills
        self.lag = LoopLag()
        self.refused: list[TrajectoryTree] = []  # by the current queue.get, not accounted yet
        self.throughput = Throughput()
        self.scored_s = 0.0  # when the last step was, on the loop's clock
        self.step_began_s = 0.0  # when this one began to wait for trees
        self.held_back = {"s": 0.0}  # seconds in which trees were
        self.watch = Stopwatch()
        self.phase = "set-up"  # cold start, RL, end
        self.is_paused = False  # by a person
        self.flights: dict[int, Flight] = {}  # trees that have a slot, by their place
        self.orders = Orders()
        self._getting: asyncio.Task[list[TrajectoryTree]] | None = None  # of the next step
        self.was_set: dict[str, float] = {}  # figures that a person has changed, for the metrics
        self.journal: Journal | None = None
        self.timings: Timings | None = None
        self.workers: RolloutWorkers | None = None
        self.parts: Parts
        self.recorder: Recorder
        self.saver: RunSaver
        self.evaluator: Evaluator

    async def run_all(self) -> None:
        """The whole run. Cancelling it stops cleanly, with a checkpoint if RL has begun."""
        async with AsyncExitStack() as stack:
            with self.clock.phase("setup"), self.view.doing("the start of the run"):
                await self._set_up(stack)
                await self._start_workers(stack)
                await self._announce()
            measuring = asyncio.create_task(self.lag.run())
            stack.callback(measuring.cancel)
            stack.enter_context(watched(self._actors, self.view))
            if self.workers is not None:
                self.view.behind = partial(self._behind, self.view.behind, self.workers)
            stack.callback(self.orders.close, "the run is at its end")
            with rolling_out():
                if "after_sft" not in self.state.reports:
                    self.phase = "cold start"
                    await self._begin()
                self.phase = "RL"
                await self._run_rl()
                self.phase = "end"
                if "after_rl" not in self.state.reports:
                    await self._saved_at_end(self.evaluator.around("after_rl"))
                    await self.saver.amend()
            with self.view.doing("the report"):  # drawing takes seconds on a busy machine
                finish = partial(
                    self.recorder.finish,
                    policy_version=self.parts.learner.policy_version,
                    in_flight=self.queue.num_waiting,
                    event_loop=self.lag.figures(),
                    engine=engine_account(self.parts.engine),
                    failures=self.parts.actor.failures.log.lines(),
                )
                await uncancelled(in_thread(finish))
            if self.workers is not None:
                self.workers.is_over = True
            for actor in self._actors():
                actor.failures.check_share()

    def _actors(self) -> list[Actor]:
        parts = self.parts
        return [parts.actor, parts.eval_actor]

    @staticmethod
    def _behind(here: Callable[[], str], workers: RolloutWorkers) -> str:
        """Who waits longest, in this process and in workers."""
        return "; ".join(filter(None, [here(), workers.behind()]))

    async def run_rounds(self, num_rounds: int) -> None:
        """So many rounds of the self-critic by themselves, in place of reinforcement learning."""
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            stack.enter_context(watched(self._actors, self.view))
            stack.enter_context(rolling_out())
            if self.checkpoint is None:
                self.run.forget_metrics_after(-1)  # of a start that was ended early
                self.run.begin(self.config)
                await self._evaluate_all("before_rl")
            else:
                self.run.go_on(self.config, self.state.step, self.view.say)
            while self.state.step < num_rounds:
                try:
                    critic = self._critic()
                    trees = await critic.sample(self.state.step)
                    with self.view.doing(f"round {self.state.step + 1}"):
                        await uncancelled(self._one_round(critic, trees))
                    if self.saver.is_due():
                        await self.saver.save()
                except BaseException:
                    await self.saver.finish()
                    raise
            await self.saver.save()
            await self._evaluate_all("after_rl")
            self.view.say(
                f"written to {self.run.path}: pairs/, metrics.jsonl, "
                f"checkpoints/{self.run.checkpoints.path(self.state.step).name}"
            )

    # before RL

    async def _set_up(self, stack: AsyncExitStack) -> None:
        """Build the parts, and what evaluates, saves and writes from here on."""
        config, run, state = self.config, self.run, self.state
        parts = await self._build(config, run, self.checkpoint, stack, self.view.say)
        self.parts = parts
        log = parts.actor.failures.log
        log.redactor = Redactor(to_plain(config))
        for actor in (parts.eval_actor, parts.overlapping):
            if actor is not None:
                actor.failures.log = log
        stack.callback(log.report)
        self.recorder = Recorder(config, run, self.view, state, parts.tokenizer)
        stack.push_async_callback(self.recorder.close)
        if config.log.timings:
            self.timings = Timings(
                run.path / TIMINGS,
                parts.vocab_size,
                config.queue.max_staleness,
                self._num_open_envs,
            )
            for actor in (parts.actor, parts.eval_actor):
                trains = actor is parts.actor
                actor.engine = TimedEngine(actor.engine, self.timings, trains)
        if config.journal.enabled:
            self.journal = Journal(
                run.path / JOURNAL,
                config.journal,
                settings=self.settings,
                incarnation=state.incarnation,
            )
            stack.push_async_callback(self.journal.close)
        kept = [] if config.sft is None else [0]  # for other algorithms to begin with
        self.saver = RunSaver(
            config.checkpoint,
            run.checkpoints,
            state,
            parts.learner,
            self.view,
            kept,
            self.journal,
            self.recorder.archive,
        )
        self.evaluator = Evaluator(config, run, state, self.clock, parts, self.recorder, self.saver)

    async def _start_workers(self, stack: AsyncExitStack) -> None:
        """The rollout workers, unless rollouts grow in this process."""
        config, parts = self.config, self.parts
        cluster = config.cluster
        if not isinstance(cluster, SpreadCluster):
            return
        workers = self.workers = RolloutWorkers(
            parts.actor,
            silence_s=cluster.silence_s,
            tell=self.view.warn,
            journal=self.journal,
            plan=parts.plan,
        )
        setup = Setup(
            config=to_plain(config),
            folder=str(self.run.path.absolute()),
            model=str(parts.model.absolute()),
            urls=parts.urls,
            vocab_size=parts.vocab_size,
            is_leased=(
                isinstance(config.engine, PooledEngineConfig)
                and config.engine.is_shared
                and isinstance(parts.actor.engine, EnginePool)
            ),
            settings=self.settings,
            incarnation=self.state.incarnation,
        )
        folder = self.run.path / FOLDER
        kind, tell = cluster.processes(), self.view.warn
        places: Places | None = None
        token = None
        if isinstance(cluster, ExternalCluster):
            places, token = Elsewhere(cluster.where()), cluster.token()
        elif isinstance(cluster, RayCluster):
            assert parts.ray is not None
            parts.ray.follow(kind.name, workers.leave)
            places = parts.ray
        processes = WorkerProcesses(kind, workers, setup, folder, tell, places, token)
        stack.push_async_callback(processes.close)
        with self.view.doing("the start of the rollout workers"):
            await processes.start()
        at = f" at {processes.address}" if isinstance(cluster, ExternalCluster) else ""
        self.view.say(f"{cluster.workers} rollout workers{at}, logs in {folder}")

    async def _announce(self) -> None:
        """The run has begun, or goes on: from here on its folder stays. Say what it will do."""
        config, parts = self.config, self.parts
        is_told = self.evaluator.is_told
        if self.checkpoint is None:
            self.run.forget_metrics_after(0, is_told, 0)  # of a start that was ended early
            self.run.begin(config)
        else:
            imitating = self.state.imitating
            self.recorder.archive.forget_after(self.state.step)
            done = imitating.step if imitating else None
            goes_back = self.run.go_on(config, self.state.step, self.view.say, is_told, done)
            if goes_back and self.journal is not None:
                await self.journal.rotate(sys.maxsize)  # trees of weights that are given up
        self.view.say(
            f"{config.algorithm_name} on {config.env.id}: {len(parts.tasks)} training questions, "
            f"{parts.num_steps} updates; an update takes {config.size_of_update}"
        )
        if dropped := config.dropped_terms:
            self.view.warn(dropped)

    async def _begin(self) -> None:
        """The cold start, if there is one, from where a checkpoint has it, and evaluations."""
        state = self.state
        if "before_sft" not in state.reports:
            await self.evaluator.around("before_sft")
        if self.parts.demonstrations is not None:
            cold_start = ColdStart(
                self.config,
                self.view,
                state,
                self.parts,
                self.recorder,
                self.run.checkpoints,
                self.checkpoint,
            )
            with self.clock.phase("sft"):
                try:
                    await cold_start.run_all()
                except BaseException:
                    if state.imitating is None:  # it was done
                        await self.saver.finish()
                    raise
        await self.saver.save()
        if self.config.sft is None:
            state.reports["after_sft"] = state.reports["before_sft"]
        else:
            await self._saved_at_end(self.evaluator.around("after_sft"))
        await self.saver.amend()

    async def _saved_at_end(self, evaluation: Coroutine[Any, Any, None]) -> None:
        """The evaluation; where it is broken off, the checkpoint remembers that it goes on."""
        try:
            await evaluation
        except BaseException:
            await self.saver.finish()
            raise

    # RL

    async def _run_rl(self) -> None:
        """Rollouts, updates, evaluations and checkpoints until the last update."""
        self.throughput.rate(self.parts.engine.stats())
        self.scored_s = asyncio.get_running_loop().time()
        self.view.begin("RL", self.parts.num_steps, self.state.step)
        if self.checkpoint is not None:
            await self.evaluator.resume(self._due_evaluations() if self.state.step else [])
        self.live = LiveFigures(self.view, self.state, self.queue, self.parts.engine)
        try:
            async with asyncio.TaskGroup() as rollouts:
                try:
                    await self._take_steps(rollouts)
                    await self.saver.save()
                except BaseException:  # also a rollout's, which cancels this task
                    await self.saver.finish()
                    raise
            await self.recorder.written()
            await self.recorder.archive.written()
            await self.evaluator.finish()
            await self.saver.amend()
        except BaseException:
            with suppress(OSError), self.view.doing("the pictures"):
                await uncancelled(in_thread(self.recorder.draw))
            raise
        finally:
            self.evaluator.cancel()
            self.view.end()

    async def _take_steps(self, rollouts: asyncio.TaskGroup) -> None:
        """Steps until the last update, while rollouts grow; those that are left are cancelled."""
        feeder = rollouts.create_task(self._feed(rollouts))
        showing = rollouts.create_task(self.live.run())
        while self.state.step < self.parts.num_steps:
            await self.orders.carry_out()
            with self.clock.phase("rl"):
                self.step_began_s = asyncio.get_running_loop().time()
                with self.watch.part("wait"):
                    trees = await self._next_trees()
                if trees is None:
                    continue
                critic = self._due_critic()
                answers = [] if critic is None else await critic.sample(self.state.step)
                with self.view.doing(f"step {self.state.step + 1}"):
                    await uncancelled(self._learn(trees, critic, answers))
            with self.watch.part("evaluate_and_save"):
                await self.evaluator.after_step(self._due_evaluations())
                if self.saver.is_due():
                    await self.saver.save()
        feeder.cancel()
        showing.cancel()
        for rollout in self.queue.drain():
            rollout.cancel()

    async def _next_trees(self) -> list[TrajectoryTree] | None:
        """The trees of the next step, once there are enough of them and the run is not paused;
        None: an order came before."""
        self._getting = self._getting or asyncio.ensure_future(self.queue.get(self._keep))
        getting = self._getting
        try:
            while self.is_paused or not getting.done():
                if self.orders.are_waiting:
                    return None
                await self.orders.until(*([] if getting.done() else [getting]))
        except BaseException:
            if not getting.done():  # what it has taken goes back
                getting.cancel()
                await asyncio.wait({getting})
            raise
        self._getting = None
        return getting.result()

    def pause(self) -> None:
        """No tree, no turn and no update begins until `go_on`; evaluations do."""
        self.is_paused = True
        self.parts.actor.hold()
        if self.workers is not None:
            self.workers.steer()

    def go_on(self) -> None:
        """After a pause."""
        self.is_paused = False
        self.parts.actor.let_go()
        if self.workers is not None:
            self.workers.steer()
        self.orders.look()

    def _due_evaluations(self) -> list[str]:
        """The evaluation sets that are due after this step."""
        sets, step = self.config.eval.sets, self.state.step
        return [name for name, one in sets.items() if one.every and step % one.every == 0]

    async def _feed(self, rollouts: asyncio.TaskGroup) -> None:
        """Start rollouts as slots allow; without refill no more than the run will train."""
        parts, config = self.parts, self.config
        needed = None if self.refill else parts.num_steps * self.queue.groups_per_step
        stream = TaskStream(parts.tasks, config.run.seed, self.state.position)
        for position, task in stream:
            if needed is not None and position >= needed:
                break
            is_new = self.journal is None or not self.journal.started(position)
            early_s = await self.queue.reserve(at_once=not is_new)
            await self._until_allowed()
            await self._until_room()
            if self.journal is not None and is_new:
                self.journal.append(Started(position, self.state.step, round(early_s, 3)))
            self.state.ledger.offered += 1
            flight = self.flights[position] = Flight(task)
            flight.growing = rollouts.create_task(self._roll_out(task, position))
            self.queue.put(flight.growing, is_new=is_new)
            await asyncio.sleep(0)  # so that not all of them begin in one go
        self.queue.finish()

    async def _until_allowed(self) -> None:
        """Hold the next tree back while the run is paused, or queue.max_rollouts trees grow."""
        while self.is_paused or self._grows_enough():  # noqa: ASYNC110 (many things change it)
            await asyncio.sleep(ROOM_S)

    def _grows_enough(self) -> bool:
        allowed = self.config.queue.max_rollouts
        return bool(allowed) and self.queue.num_waiting - self.queue.num_ready >= allowed

    async def _until_room(self) -> None:
        """Hold the next tree back while the engine has more than it can do, or more than its caches
        hold: what is under way goes on sooner, on prefixes that are still there. One tree always
        grows."""
        engine = self.parts.engine
        if not isinstance(engine, EnginePool):
            return
        with adding(self.held_back, "s"):
            while self.queue.num_waiting > self.queue.num_ready:
                if engine.has_room(self._num_open_envs()):
                    return
                await asyncio.sleep(ROOM_S)

    def _num_open_envs(self) -> int:
        """Trajectories that are under way."""
        elsewhere = 0 if self.workers is None else self.workers.num_open_envs
        return self.parts.actor.envs.count + elsewhere

    async def _roll_out(self, task: Task, position: int) -> TrajectoryTree:
        """The tree of this place: from the journal if an earlier process finished it, gone on with
        if one began it, else grown; anew each time that it is requeued."""
        recorded, journal, flight = None, self.journal, self.flights[position]
        while True:
            try:
                flight.begins()
                await asyncio.sleep(0)  # what was dropped writes the last of it before
                if journal is not None and journal.knows(position):
                    recorded = await journal.recall(position, task)
                    flight.num_known = 0 if recorded is None else len(recorded.tree.nodes)
                if recorded is not None and recorded.is_finished:
                    tree = recorded.tree
                else:
                    tree = await self._grow(task, position, recorded)
                self.accounts.credit(tree)  # now, while others grow: not of a whole step at once
                return tree
            except asyncio.CancelledError:
                if not flight.begins_again():
                    raise
            recorded, journal = None, None

    async def _grow(self, task: Task, position: int, recorded: Recorded | None) -> TrajectoryTree:
        """In a worker, or here."""
        parts, journal, workers = self.parts, self.journal, self.workers
        if workers is not None:
            return await workers.rollout(task, index=position, recorded=recorded)
        return await parts.actor.rollout(
            task,
            parts.plan,
            index=position,
            record=None if journal is None else journal.record(position),
            recorded=recorded,
        )

    def _keep(self, tree: TrajectoryTree) -> bool:
        if not self.refill or self.accounts.keep(tree):
            return True
        self.refused.append(tree)
        return False

    async def _learn(
        self,
        trees: list[TrajectoryTree],
        critic: SelfCritic | None,
        answers: list[TrajectoryTree],
    ) -> None:
        """Update on the trees, account for every one, publish, and release their slots. A round of
        the self-critic goes before, if one is due, on its `answers`."""
        parts, state = self.parts, self.state
        delivered, self.refused = trees + self.refused, []
        if self.journal is not None:
            self.journal.append(Leased(state.step, [tree.index for tree in delivered]))
        async with parts.learner.turn():
            with self.watch.part("parity"):
                metrics = await self.accounts.parity(parts)
            version = parts.learner.policy_version
            trained = self.accounts.settle(delivered)
            learned = [(tree, credit) for tree, credit in trained if credit.has_signal]
            told: Told = {}
            if not self.config.engine.tells_entropies:
                told = first_entropies(delivered, parts.plan.fork_window)
                forget_entropies(delivered)
            async with self.saver.moving():
                if critic is not None:
                    metrics |= await critic.learn(state.step, answers)
                if trained:
                    metrics |= await self._update(
                        trained, self.accounts.num_minibatches(len(trees))
                    )
                problem: Exception | None = None
                try:
                    metrics |= await self._figures(delivered, learned, version)
                except Exception as error:  # the learner is well, and is saved first
                    problem = error
                state.position += len(delivered)
                state.step += 1
            header = StepHeader(
                step=state.step,
                policy_version=version,
                incarnation=state.incarnation,
                settings=self.settings,
                vocab_size=parts.vocab_size,
                num_trees=len(delivered),
                metrics={name: float(value) for name, value in metrics.items()},
            )
            settled, self.accounts.settled = self.accounts.settled, []
            try:
                if trained or metrics.get("self_critic/num_steps"):
                    with self.watch.part("publish"):
                        await parts.publish()
            finally:  # from now on a checkpoint may be of these weights, and needs their trees
                await self.recorder.keep_trees(header, settled, told)
        if problem is not None:
            raise problem
        if self.journal is not None:
            indices = [tree.index for tree, _ in trained]
            self.journal.append(Trained(state.step - 1, parts.learner.policy_version, indices))
        if critic is not None:
            name = f"self-critic-{state.step - 1:06d}"
            await self.recorder.write_trajectories(name, answers)
        self.queue.release(len(trees))
        num_known: dict[int, int] = {}
        for tree in delivered:
            flight = self.flights.pop(tree.index, None)
            num_known[tree.index] = 0 if flight is None else flight.num_known
        state.ledger.check(in_flight=self.queue.num_waiting)
        began_s, self.scored_s = self.scored_s, asyncio.get_running_loop().time()
        metrics |= await in_thread(
            step_score,
            delivered,
            learned,
            policy_version=version,
            seconds=self.scored_s - began_s,
            groups_per_step=self.queue.groups_per_step,
            num_known=num_known,
        )
        await self._report_step(delivered, metrics)

    async def _figures(
        self, delivered: list[TrajectoryTree], learned: list[CreditedTree], version: int
    ) -> Metrics:
        """Of the trees of a step, some of which the state sums up; `learned` have a signal."""
        state = self.state
        figures = await in_thread(rollout_metrics, delivered, version)
        counted = [(tree, counted_leaves(tree, credit)) for tree, credit in learned]
        figures |= await in_thread(trained_metrics, delivered, counted, version)
        profile = await in_thread(entropy_profile, delivered)
        state.entropy = state.entropy.merged(profile)
        state.totals.add(figures)
        return figures

    async def _update(self, groups: list[CreditedTree], num_minibatches: int | None) -> Metrics:
        scale = lr_factor(self.config.learner, self.state.step, self.parts.num_steps)
        busy = nullcontext() if self.timings is None else self.timings.learning()
        with self.watch.part("update"), busy:
            agreement = self.accounts.agreement
            update = await self.parts.learner.update(groups, scale, agreement, num_minibatches)
        self.state.totals.trained_tokens += int(update["num_tokens"])
        return {
            "learner/lr_scale": scale,
            "learner/learning_rate": self.config.learner.learning_rate * scale,
            **{f"learner/{name}": value for name, value in update.items()},
        }

    def _due_critic(self) -> SelfCritic | None:
        """The self-critic, if a round of it is due. The round moves the weights before the update
        and is published with it, so that it counts as no policy version of its own."""
        config, step = self.config.self_critic, self.state.step
        return None if config is None or not step or step % config.every else self._critic()

    def _critic(self) -> SelfCritic:
        parts, config = self.parts, self.config.self_critic
        assert config is not None
        return SelfCritic(
            config,
            parts.tasks,
            parts.actor,
            parts.learner,
            optimizer_of(self.config.learner),
            self.config.run.seed,
            self.run,
        )

    async def _one_round(self, critic: SelfCritic, trees: list[TrajectoryTree]) -> None:
        """A round of the self-critic on these trees, then the new weights into the engine."""
        parts, state = self.parts, self.state
        refuse_total_failure(trees)
        async with self.saver.moving():
            metrics = await critic.learn(state.step, trees)
            state.step += 1
        if metrics["self_critic/num_steps"]:
            await parts.publish()
        version = parts.learner.policy_version
        await self.recorder.log({"step": state.step, "policy_version": version, **metrics})
        self.view.say(f"round {state.step}: {round_line(metrics)}")
        await self.recorder.write_trajectories(f"self-critic-{state.step:06d}", trees)

    async def _evaluate_all(self, when: str) -> None:
        await self.evaluator.evaluate(list(self.config.eval.sets), when)

    async def _report_step(self, trees: list[TrajectoryTree], metrics: Metrics) -> None:
        state = self.state
        engine = self.parts.engine.stats()
        trees_by_fate = state.ledger.counts(in_flight=self.queue.num_waiting)
        hits = self.parts.actor.prefixes.take()
        self.accounts.look_at_hits(hits)
        self.accounts.look_at_tools(metrics, trees)
        self.accounts.look_at_update(metrics)
        row = {
            "step": state.step,
            "policy_version": self.parts.learner.policy_version,
            **metrics,
            **{f"trees/{name}": count for name, count in trees_by_fate.items()},
            "staleness/bound": self.queue.max_staleness,
            **self.queue.flow.take(),
            "queue/ready": self.queue.num_ready,
            "queue/held_back_s": self.held_back["s"],
            **{f"engine/{name}": value for name, value in engine.items()},
            **hits,
            **self.parts.actor.probes.take(),
            "env/num_open": self._num_open_envs(),
            **self._env_figures(),
            **self._worker_figures(),
            "time/sampled_tokens_per_s": self.throughput.rate(engine),
            "time/run_tokens_per_s": report.run_rate(
                state, asyncio.get_running_loop().time() - self.step_began_s
            ),
            **self.watch.take(),
            **{f"event_loop/{name}": value for name, value in self.lag.figures().items()},
            **{f"steering/{key}": value for key, value in self.was_set.items()},
        }
        await self.recorder.log(row)
        if self.timings is not None:
            await in_thread(self.timings.write, self.timings.row(trees, row))
        self.live.row = row
        self.view.say(report.step_line(row, self.parts.num_steps))
        self.view.advance(state.step)
        await self.recorder.write_behind(f"step-{state.step:06d}", trees)

    def _env_figures(self) -> Metrics:
        """What environments have counted since the start, in this process and in workers."""
        total = Counter(shared_stats())
        num_cut = getattr(self.parts.actor.renderer, "num_cut", 0)
        for figures in () if self.workers is None else self.workers.figures():
            total.update(figures.env)
            num_cut += figures.num_cut
        counted = {f"env/{name}": value for name, value in total.items()}
        return {"env/num_results_cut": num_cut, **counted}

    def _worker_figures(self) -> Metrics:
        stats = {} if self.workers is None else self.workers.stats()
        return {f"workers/{name}": value for name, value in stats.items()}
