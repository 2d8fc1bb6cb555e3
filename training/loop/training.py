"""A training run from set-up to report.

setup        create or check model, data and environment
cold start   imitate demonstrations, if [sft] is configured
RL           feeder --slot--> rollouts --trees--> learner    concurrently: rollouts continue
                ^                                    |       while the learner trains and
                +---- release <--- engine <--- publish       weights are replaced (loop.py)
evaluation   before and after the cold start, at intervals of steps, and at the end
checkpoint   after the cold start, at intervals of steps or minutes, and at any end of the run
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.checkpoints import load_state
from agentenv.assembly.run.kept import check_optimizer, checkpoint_to_resume, resume_from
from agentenv.assembly.run.rundir import JOURNAL, RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.assembly.run.waits import watched
from agentenv.assembly.run.watchdog import rolling_out
from agentenv.base.config import to_plain
from agentenv.base.deadline import uncancelled
from agentenv.base.offload import in_thread
from agentenv.base.types import TIMES
from agentenv.rollout.journal import Journal
from agentenv.rollout.metrics import LoopLag
from agentenv.rollout.queue import ReplayQueue
from agentenv.training.loop.batching import BatchBuilder
from agentenv.training.loop.clocks import PhaseClock
from agentenv.training.loop.evaluations import RunEvaluator
from agentenv.training.loop.feeder import Feeder, Workers
from agentenv.training.loop.loop import Critic, Loop, Teacher
from agentenv.training.loop.parity import ParityCheck
from agentenv.training.loop.parts import Build, Parts
from agentenv.training.loop.recorder import Recorder
from agentenv.training.loop.state import RunSaver, RunState
from agentenv.training.loop.step_report import StepReport


def rollout_settings(config: TrainConfig) -> str:
    """A hash of all settings that affect trees, except weights and time limits: a tree started
    under other settings is not resumed."""
    tables = ("model", "data", "env", "python", "search", "grader", "prompt", "renderer", "limits")
    plain = to_plain(config)
    plain["limits"] = {key: value for key, value in plain["limits"].items() if key not in TIMES}
    chosen = {name: plain.get(name) for name in (*tables, "sampling", "algorithm")}
    return blake2b(json.dumps(chosen, sort_keys=True).encode(), digest_size=8).hexdigest()


Subscriber = Callable[["Training"], AbstractAsyncContextManager[None]]


@dataclass(eq=False)
class Training:
    """The phases of a run. `loop` has the objects that they share, from the set-up on.

    `training/start.py` passes the functions that make the parts, simulated runs others. `resume`:
    latest, best or a checkpoint's path; empty: a new run. Each subscriber is entered before the
    set-up and exited at the end of the run."""

    config: TrainConfig
    run: RunDirectory
    view: View
    _: KW_ONLY
    build: Build
    make_recorder: Callable[[TrainConfig, RunDirectory, View, RunState, Any], Recorder]
    start_workers: Callable[[Loop, AsyncExitStack], Awaitable[Workers | None]]
    cold_start: Callable[[Parts, Recorder, Path | None], Awaitable[None]]
    make_critic: Callable[[TrainConfig, Parts, RunDirectory], Critic]
    make_teacher: Callable[[TrainConfig, Parts, AsyncExitStack], Awaitable[Teacher]]
    resume: InitVar[str] = ""
    make_feeder: type[Feeder] = Feeder
    make_report: type[StepReport] = StepReport
    subscribers: Sequence[Subscriber] = ()
    loop: Loop = field(init=False)

    def __post_init__(self, resume: str) -> None:
        config, run = self.config, self.run
        self.state = RunState()
        self.checkpoint = checkpoint_to_resume(run.checkpoints, resume) if resume else None
        if self.checkpoint is not None:
            check_optimizer(run, config.learner.optimizer)
            self.state = load_state(self.checkpoint, RunState)
        self.state.incarnation = run.count_start(self.state.incarnation)
        self.clock = PhaseClock(self.state.wall_s, self.state.cpu_s)
        self.queue = ReplayQueue(config.queue.groups_per_step, config.queue.max_staleness)
        self.lag = LoopLag()
        self.phase = "set-up"  # cold start, RL, end

    async def run_all(self) -> None:
        """The whole run. A cancellation stops it cleanly, with a checkpoint if RL has begun."""
        async with AsyncExitStack() as stack:
            for subscriber in self.subscribers:
                await stack.enter_async_context(subscriber(self))
            with self.clock.phase("setup"), self.view.doing("the start of the run"):
                loop = await self.set_up(stack)
                workers = loop.feeder.workers = await self.start_workers(loop, stack)
                await self._announce()
            self.view.end()
            measuring = asyncio.create_task(self.lag.run())
            stack.callback(measuring.cancel)
            stack.enter_context(watched(loop.actors, self.view))
            if workers is not None:
                here, behind = self.view.longest_wait, workers.behind
                self.view.longest_wait = lambda: "; ".join(filter(None, [here(), behind()]))
            with rolling_out():
                if "after_sft" not in self.state.reports:
                    self.phase = "cold start"
                    await self._begin()
                self.phase = "RL"
                await self.run_rl()
                self.phase = "end"
                if "after_rl" not in self.state.reports:
                    async with loop.saver.finishing():
                        await loop.evaluator.around("after_rl")
                    await loop.saver.amend()
            await self._finish()

    async def set_up(self, stack: AsyncExitStack) -> Loop:
        """Build all objects of the run but the rollout workers; `stack` closes them."""
        config, run, state = self.config, self.run, self.state
        parts = await self.build(config, run, self.checkpoint, stack, self.view.log)
        log = parts.actor.failures.log
        parts.eval_actor.failures.log = log
        stack.callback(log.report)
        recorder = self.make_recorder(config, run, self.view, state, parts.tokenizer)
        stack.push_async_callback(recorder.close)
        settings, journal = rollout_settings(config), None
        if config.journal.enabled:
            folder, incarnation = run.path / JOURNAL, state.incarnation
            journal = Journal(folder, settings=settings, incarnation=incarnation)
            stack.push_async_callback(journal.close)
        feeder = self.make_feeder(parts, self.queue, BatchBuilder(config, state), journal)
        saver = RunSaver(
            config.checkpoint,
            run.checkpoints,
            parts.learner,
            self.view,
            step=lambda: state.step,
            snapshot=state.resumable,
            # the checkpoint after the cold start: runs of other algorithms can start from it
            needed=() if config.sft is None else (0,),
            state=state,
            journal=journal,
            archive=recorder.archive,
        )
        teacher = None
        if config.algorithm.teach:
            teacher = await self.make_teacher(config, parts, stack)
        self.loop = Loop(
            feeder=feeder,
            parity=ParityCheck(config, parts.probe, state.parity),
            evaluator=RunEvaluator(parts, recorder, saver, self.clock),
            report=self.make_report(feeder, recorder, self.lag),
            critic=None if config.self_critic is None else self.make_critic(config, parts, run),
            teacher=teacher,
            settings=settings,
        )
        return self.loop

    async def _finish(self) -> None:
        """Write the report, and raise if too many rollouts failed."""
        loop, parts = self.loop, self.loop.parts
        self.view.wait_for("writing the report and its plots")
        with self.view.doing("the report"):  # the plots take seconds on a busy machine
            figures = {
                "policy_version": parts.learner.policy_version,
                "event_loop": self.lag.figures(),
                "engine": parts.engine.account(),
            }
            failures = parts.actor.failures.log.lines()
            finish = partial(loop.recorder.finish, self.queue.num_waiting, failures, figures)
            await uncancelled(in_thread(finish))
        self.view.end()
        if loop.feeder.workers is not None:
            loop.feeder.workers.is_over = True
        for actor in loop.actors():
            actor.failures.check_share()

    # before RL

    async def _announce(self) -> None:
        """Mark the folder as a run, or resume it, and report the plan of the run."""
        config, loop = self.config, self.loop
        is_recorded, journal = loop.evaluator.is_recorded, loop.feeder.journal
        if self.checkpoint is None:
            self.run.forget_metrics_after(0, is_recorded, 0)  # rows of an interrupted start
            self.run.begin(config)
        else:
            imitating = self.state.imitating
            loop.recorder.archive.forget_after(self.state.step)
            done = imitating.step if imitating else None
            has_newer = resume_from(
                self.run, config, self.state.step, self.view.log, is_recorded, done
            )
            if has_newer and journal is not None:
                await journal.rotate(sys.maxsize)  # trees of abandoned weights
        self.view.log(
            f"{config.algorithm_name} on {config.env.id}: {len(loop.parts.tasks)} training "
            f"questions, {loop.parts.num_steps} updates; an update takes {config.size_of_update}"
        )
        if dropped := config.dropped_terms:
            self.view.warn(dropped)

    async def _begin(self) -> None:
        """Run or resume the cold start, if there is one, and the evaluations around it."""
        loop, state = self.loop, self.state
        if self.checkpoint is None:  # engine and learner have loaded the same file
            loop.parts.probe.start()
        if "before_sft" not in state.reports:
            await loop.evaluator.around("before_sft")
        if loop.parts.demonstrations is not None:
            await loop.parity.check()
            with self.clock.phase("sft"):
                async with loop.saver.finishing(lambda: state.imitating is None):  # it had ended
                    await self.cold_start(loop.parts, loop.recorder, self.checkpoint)
        await loop.saver.save()
        if self.config.sft is None:
            state.reports["after_sft"] = state.reports["before_sft"]
        else:
            async with loop.saver.finishing():  # a checkpoint that resumes the evaluation
                await loop.evaluator.around("after_sft")
        await loop.saver.amend()

    # RL

    async def run_rl(self) -> None:
        """Run rollouts, updates, evaluations and checkpoints until the last update."""
        loop, step = self.loop, self.state.step
        self.view.begin("RL", loop.parts.num_steps, step, "evaluation and report")
        loop.report.begin()
        if self.checkpoint is not None:
            await loop.evaluator.resume(loop.evaluator.due(step) if step else [])
        try:
            # Also at the error of a rollout, which cancels this task.
            async with asyncio.TaskGroup() as rollouts, loop.saver.finishing():
                await self._take_steps(rollouts)
                await loop.saver.save()
            await loop.recorder.written()
            await loop.recorder.archive.written()
        except BaseException:
            with suppress(OSError), self.view.doing("the plots"):
                await uncancelled(in_thread(loop.recorder.draw))
            raise
        finally:
            self.view.end()

    async def _take_steps(self, rollouts: asyncio.TaskGroup) -> None:
        """Run all steps while rollouts grow, then cancel the remaining rollouts."""
        loop = self.loop
        feeding = rollouts.create_task(loop.feeder.run(rollouts))
        showing = rollouts.create_task(loop.recorder.show(self.queue, loop.parts.engine))
        await loop.run()
        feeding.cancel()
        showing.cancel()
        for rollout in self.queue.drain():
            rollout.cancel()
