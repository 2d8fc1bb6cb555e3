"""A training run from set-up to report.

setup        create or check model, data and environment
cold start   imitate demonstrations, if [sft] is configured
RL           feeder --slot--> rollouts --trees--> learner    concurrently: rollouts continue
                ^                                    |       while the learner trains and
                +---- release <--- engine <--- publish       weights are replaced (loop.py)
evaluation   before and after the cold start, at intervals of steps, and at the end
checkpoint   after the cold start, at intervals of steps or minutes, and at any end of the run

`SelfCriticRun` has rounds of the self-critic instead of RL.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.actor import Actor
from agentenv.cluster.workers import RolloutWorkers
from agentenv.config import to_plain
from agentenv.deadline import uncancelled
from agentenv.engine import Engine
from agentenv.engines.pool.pool import EnginePool
from agentenv.failures import Redactor
from agentenv.journal import Journal
from agentenv.learners.optimizer import optimizer_of
from agentenv.metrics import LoopLag
from agentenv.offload import in_thread
from agentenv.pipelines.config.cluster import WHERE
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.batching import BatchBuilder, refuse_total_failure
from agentenv.pipelines.rl.cold_start import ColdStart
from agentenv.pipelines.rl.evaluations import Evaluator
from agentenv.pipelines.rl.feeder import Feeder, JournalListener, Listener
from agentenv.pipelines.rl.loop import Loop, PendingActions
from agentenv.pipelines.rl.parts import Build, Parts, build_parts
from agentenv.pipelines.rl.placement import start_workers
from agentenv.pipelines.rl.publishing import ParityCheck
from agentenv.pipelines.rl.recorder import PhaseClock, Recorder, Stopwatch
from agentenv.pipelines.rl.report import StepReport
from agentenv.pipelines.rl.self_critic import SelfCritic, round_line
from agentenv.pipelines.rl.state import RunSaver, RunState
from agentenv.pipelines.run.checkpoints import load_state
from agentenv.pipelines.run.rundir import JOURNAL, RunDirectory
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.run.watchdog import rolling_out, watched
from agentenv.queue import ReplayQueue
from agentenv.tree import TrajectoryTree
from agentenv.types import TIMES


def engine_stats(engine: Engine) -> dict[str, Any]:
    """The statistics of the engine for the summary: per server, or the counters of an engine
    without servers."""
    if isinstance(engine, EnginePool):
        return engine.account()
    return dict(engine.stats())


def rollout_settings(config: TrainConfig) -> str:
    """A hash of all settings that affect trees, except weights and time limits: a tree started
    under other settings is not resumed."""
    tables = ("model", "data", "env", "python", "search", "grader", "prompt", "renderer", "limits")
    plain = to_plain(config)
    plain["env"] = {key: value for key, value in plain["env"].items() if key not in WHERE}
    plain["limits"] = {key: value for key, value in plain["limits"].items() if key not in TIMES}
    chosen = {name: plain.get(name) for name in (*tables, "sampling", "algorithm")}
    return blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=8).hexdigest()


Subscriber = Callable[["Training"], AbstractAsyncContextManager[None]]


class Training:
    """The phases of a run, and the objects that they share."""

    parts: Parts
    recorder: Recorder
    saver: RunSaver
    evaluator: Evaluator
    feeder: Feeder
    report: StepReport
    parity: ParityCheck
    feeder_class: type[Feeder] = Feeder  # simulated runs replace these
    report_class: type[StepReport] = StepReport

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        view: View,
        *,
        resume: str,
        build: Build = build_parts,
        subscribers: Sequence[Subscriber] = (),
    ) -> None:
        """`resume`: latest, best or a checkpoint's path; empty: a new run. `build` creates the
        parts of the loop. Each subscriber is entered before the set-up and exited at the end of the
        run."""
        self.config = config
        self.run = run
        self.view = view
        self.subscribers = subscribers
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
        self.batches = BatchBuilder(config, self.state)
        self.clock = PhaseClock(self.state.wall_s, self.state.cpu_s)
        self.queue = ReplayQueue(
            config.queue.groups_per_step,
            config.queue.max_staleness,
            just_in_time=config.queue.just_in_time,
        )
        self.lag = LoopLag()
        self.phase = "set-up"  # cold start, RL, end
        self.actions = PendingActions()
        self.listeners: list[Listener] = []
        self.journal: Journal | None = None
        self.workers: RolloutWorkers | None = None

    async def run_all(self) -> None:
        """The whole run. A cancellation stops it cleanly, with a checkpoint if RL has begun."""
        async with AsyncExitStack() as stack:
            for subscriber in self.subscribers:
                await stack.enter_async_context(subscriber(self))
            with self.clock.phase("setup"), self.view.doing("the start of the run"):
                await self._set_up(stack)
                await self._start_workers(stack)
                self.feeder.workers = self.workers
                await self._announce()
            self.view.end()
            measuring = asyncio.create_task(self.lag.run())
            stack.callback(measuring.cancel)
            stack.enter_context(watched(self._actors, self.view))
            if self.workers is not None:
                self.view.longest_wait = partial(
                    self._longest_waits, self.view.longest_wait, self.workers
                )
            stack.callback(self.actions.close, "the run is ending")
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
            await self._finish()

    async def _finish(self) -> None:
        """Write the report, and raise if too many rollouts failed."""
        self.view.wait_for("writing the report and its plots")
        with self.view.doing("the report"):  # the plots take seconds on a busy machine
            finish = partial(
                self.recorder.finish,
                policy_version=self.parts.learner.policy_version,
                in_flight=self.queue.num_waiting,
                event_loop=self.lag.figures(),
                engine=engine_stats(self.parts.engine),
                failures=self.parts.actor.failures.log.lines(),
            )
            await uncancelled(in_thread(finish))
        self.view.end()
        if self.workers is not None:
            self.workers.is_over = True
        for actor in self._actors():
            actor.failures.check_share()

    def _actors(self) -> list[Actor]:
        parts = self.parts
        return [parts.actor, parts.eval_actor]

    @staticmethod
    def _longest_waits(here: Callable[[], str], workers: RolloutWorkers) -> str:
        """The longest waits, in this process and in workers."""
        return "; ".join(filter(None, [here(), workers.behind()]))

    def _critic(self) -> SelfCritic | None:
        parts, config = self.parts, self.config.self_critic
        if config is None:
            return None
        return SelfCritic(
            config,
            parts.tasks,
            parts.actor,
            parts.learner,
            optimizer_of(self.config.learner),
            f"{self.config.run.seed}/self_critic",
            self.run,
        )

    # before RL

    async def _set_up(self, stack: AsyncExitStack) -> None:
        """Build the parts, recorder, journal, feeder, saver, evaluator and parity check."""
        config, run, state = self.config, self.run, self.state
        parts = await self._build(config, run, self.checkpoint, stack, self.view.log)
        self.parts = parts
        log = parts.actor.failures.log
        log.redactor = Redactor(to_plain(config))
        for actor in (parts.eval_actor, parts.overlapping):
            if actor is not None:
                actor.failures.log = log
        stack.callback(log.report)
        self.recorder = Recorder(config, run, self.view, state, parts.tokenizer)
        stack.push_async_callback(self.recorder.close)
        if config.journal.enabled:
            self.journal = Journal(
                run.path / JOURNAL,
                config.journal,
                settings=self.settings,
                incarnation=state.incarnation,
            )
            stack.push_async_callback(self.journal.close)
            self.listeners.append(JournalListener(self.journal))
        self.feeder = self.feeder_class(
            config, state, parts, self.queue, self.batches, self.journal, self.listeners
        )
        kept = [] if config.sft is None else [0]  # runs of other algorithms can start from it
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
        self.parity = ParityCheck(config, parts.probe, parts.learner, state.parity)

    async def _start_workers(self, stack: AsyncExitStack) -> None:
        """Start the rollout workers, unless rollouts grow in this process."""
        self.workers = await start_workers(
            self.config,
            self.parts,
            self.run.path,
            self.journal,
            self.view,
            stack,
            settings=self.settings,
            incarnation=self.state.incarnation,
        )

    async def _announce(self) -> None:
        """Mark the folder as a run, or resume it, and report the plan of the run."""
        config, parts = self.config, self.parts
        is_recorded = self.evaluator.is_recorded
        if self.checkpoint is None:
            self.run.forget_metrics_after(0, is_recorded, 0)  # rows of an interrupted start
            self.run.begin(config)
        else:
            imitating = self.state.imitating
            self.recorder.archive.forget_after(self.state.step)
            done = imitating.step if imitating else None
            has_newer = self.run.resume_from(
                config, self.state.step, self.view.log, is_recorded, done
            )
            if has_newer and self.journal is not None:
                await self.journal.rotate(sys.maxsize)  # trees of abandoned weights
        self.view.log(
            f"{config.algorithm_name} on {config.env.id}: {len(parts.tasks)} training questions, "
            f"{parts.num_steps} updates; an update takes {config.size_of_update}"
        )
        if dropped := config.dropped_terms:
            self.view.warn(dropped)

    async def _begin(self) -> None:
        """Run or resume the cold start, if there is one, and the evaluations around it."""
        state = self.state
        if self.checkpoint is None:  # engine and learner have loaded the same file
            self.parts.probe.start()
        if "before_sft" not in state.reports:
            await self.evaluator.around("before_sft")
        if self.parts.demonstrations is not None:
            await self.parity.check()
            cold_start = ColdStart(
                self.config,
                self.view,
                state,
                self.parts,
                self.recorder,
                self.run.checkpoints,
                self.checkpoint,
                self.batches.alarms,
            )
            with self.clock.phase("sft"):
                try:
                    await cold_start.run_all()
                except BaseException:
                    if state.imitating is None:  # it had ended
                        await self.saver.finish()
                    raise
        await self.saver.save()
        if self.config.sft is None:
            state.reports["after_sft"] = state.reports["before_sft"]
        else:
            await self._saved_at_end(self.evaluator.around("after_sft"))
        await self.saver.amend()

    async def _saved_at_end(self, evaluation: Coroutine[Any, Any, None]) -> None:
        """Await the evaluation; if it is interrupted, save a checkpoint that resumes it."""
        try:
            await evaluation
        except BaseException:
            await self.saver.finish()
            raise

    # RL

    async def _run_rl(self) -> None:
        """Run rollouts, updates, evaluations and checkpoints until the last update."""
        self.view.begin("RL", self.parts.num_steps, self.state.step, "evaluation and report")
        loop = self._loop()
        if self.checkpoint is not None:
            step = self.state.step
            await self.evaluator.resume(self.evaluator.due(step) if step else [])
        try:
            async with asyncio.TaskGroup() as rollouts:
                try:
                    await self._take_steps(loop, rollouts)
                    await self.saver.save()
                except BaseException:  # also a rollout's, which cancels this task
                    await self.saver.finish()
                    raise
            await self.recorder.written()
            await self.recorder.archive.written()
            await self.evaluator.finish()
            await self.saver.amend()
        except BaseException:
            with suppress(OSError), self.view.doing("the plots"):
                await uncancelled(in_thread(self.recorder.draw))
            raise
        finally:
            self.evaluator.cancel()
            self.view.end()

    def _loop(self) -> Loop:
        """Build the loop; its report starts to measure."""
        parts, state = self.parts, self.state
        watch = Stopwatch()
        self.report = self.report_class(
            state, self.feeder, self.batches.alarms, self.recorder, watch, self.lag
        )
        return Loop(
            config=self.config,
            state=state,
            parts=parts,
            queue=self.queue,
            feeder=self.feeder,
            batches=self.batches,
            parity=self.parity,
            saver=self.saver,
            recorder=self.recorder,
            evaluator=self.evaluator,
            report=self.report,
            critic=self._critic(),
            actions=self.actions,
            listeners=self.listeners,
            clock=self.clock,
            watch=watch,
            view=self.view,
            settings=self.settings,
        )

    async def _take_steps(self, loop: Loop, rollouts: asyncio.TaskGroup) -> None:
        """Run all steps while rollouts grow, then cancel the remaining rollouts."""
        feeding = rollouts.create_task(self.feeder.run(rollouts))
        showing = rollouts.create_task(loop.report.live.run())
        self.actions.begin(rollouts)
        await loop.run()
        self.actions.close("the run is ending")
        feeding.cancel()
        showing.cancel()
        for rollout in self.queue.drain():
            rollout.cancel()


class SelfCriticRun(Training):
    """A run of `agentenv dpo --self-critic`."""

    async def run_rounds(self, num_rounds: int) -> None:
        """Run `num_rounds` rounds, with checkpoints when due."""
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            self.view.end()
            critic = self._critic()
            assert critic is not None
            stack.enter_context(watched(self._actors, self.view))
            stack.enter_context(rolling_out())
            if self.checkpoint is None:
                self.run.forget_metrics_after(-1)  # rows of an interrupted start
                self.run.begin(self.config)
                await self._evaluate_all("before_rl")
            else:
                self.run.resume_from(self.config, self.state.step, self.view.log)
            while self.state.step < num_rounds:
                try:
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
            self.view.log(
                f"results in {self.run.path}: pairs/, metrics.jsonl, "
                f"checkpoints/{self.run.checkpoints.path(self.state.step).name}"
            )

    async def _one_round(self, critic: SelfCritic, trees: list[TrajectoryTree]) -> None:
        """Train a round of the self-critic on these trees, and publish the new weights."""
        parts, state = self.parts, self.state
        refuse_total_failure(trees)
        async with self.saver.moving():
            metrics = await critic.learn(state.step, trees)
            state.step += 1
        if metrics["self_critic/num_steps"]:
            await parts.publish()
        version = parts.learner.policy_version
        await self.recorder.log({"step": state.step, "policy_version": version, **metrics})
        self.view.log(f"round {state.step}: {round_line(metrics)}")
        await self.recorder.write_trajectories(f"self-critic-{state.step:06d}", trees)

    async def _evaluate_all(self, when: str) -> None:
        await self.evaluator.evaluate(list(self.config.eval.sets), when)
