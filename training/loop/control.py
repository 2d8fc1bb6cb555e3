"""Runtime control of a training run: answers to the requests of `agentenv ctl`.

Control subscribes to a run and does not affect it otherwise. It replies to all requests but
checkpoints at once, from the state of actors, queue and workers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Any

from agentenv.assembly.reports.records import FAILED
from agentenv.assembly.run.control import ControlRequest, Reply, RequestDone, listening
from agentenv.assembly.run.waits import by_what, clock_text, expected_s, oldest
from agentenv.base.deadline import retrieve_exception
from agentenv.base.errors import ConfigError
from agentenv.rollout.branch import BranchNow
from agentenv.rollout.metrics import failure_kind_of
from agentenv.training.loop.brief_reports import phase_title
from agentenv.training.loop.feeder import Feeder, InflightRollout
from agentenv.training.loop.training import Training

PIECE = 200  # rollouts inspected between two yields to the event loop
CANCEL_REASON = "by agentenv ctl"
AT_START_HINT = "the run is being set up; retry after training has started (see `status`)"


def controlled(training: Training) -> AbstractAsyncContextManager[None]:
    """Inside, answer requests about the run; a subscriber of `Training`."""
    control = Control(training)
    return listening(training.run.path, control.answer, training.view.warn)


class Control:
    """Answers requests about one run."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")

    async def answer(self, request: ControlRequest) -> Reply:
        """The reply to a request. Raises AgentEnvError if it cannot be fulfilled."""
        match request.command:
            case "status":
                return self._status()
            case "why":
                return await (self._why(request.trees[0]) if request.trees else self._waits())
            case "cancel":
                return self._cancel_all(request.trees)
            case "pause":
                return self._pause()
            case "resume":
                return self._resume()
            case "checkpoint":
                return await self._checkpoint()

    @property
    def _feeder(self) -> Feeder:
        return self.training.loop.feeder

    # Requests that only read.

    def _status(self) -> RequestDone:
        """Phase, step, queue, engine and waits of the run."""
        training = self.training
        state, queue = training.state, training.queue
        counters = state.counters
        facts = {
            "run": str(training.run.path),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": self._since,
            "phase": training.phase,
            "is_paused": training.phase == "RL" and self._feeder.is_paused,
            "step": state.step,
            "doing": training.view.activity,
            "evaluating": "" if state.evaluating is None else state.evaluating.phase,
            "trees": counters.counts(in_flight=counters.offered - counters.num_delivered),
            "queue": {
                "growing": queue.num_waiting - queue.num_ready,
                "ended": queue.num_ready,
                "slots": queue.num_reserved,
                "capacity": queue.capacity,
            },
            "event_loop": training.lag.figures(),
            "longest_wait": training.view.longest_wait(),
        }
        if training.phase != "set-up":
            parts = training.loop.parts
            facts |= {
                "num_steps": parts.num_steps,
                "policy_version": parts.learner.policy_version,
                "num_open_envs": self._feeder.num_open_envs(),
                "engine": dict(parts.engine.stats()),
            }
            if self._feeder.workers is not None:
                facts["workers"] = self._feeder.workers.stats()
        return RequestDone([], facts)

    async def _waits(self) -> RequestDone:
        """The waits of rollouts, the longest first, and other delays of the run."""
        training = self.training
        if training.phase == "set-up":
            return RequestDone([f"training has not started: {training.view.activity or 'set-up'}"])
        awaited: list[BranchNow] = []
        for actor in training.loop.actors():
            for number, rollout in enumerate(list(actor.rollouts)):
                awaited += (one for one in rollout.now() if one.what)
                if number % PIECE == PIECE - 1:
                    await asyncio.sleep(0)
        waits: list[dict[str, Any]] = []
        for what, group in by_what(awaited).items():
            first = min(group, key=oldest)
            is_long = first.for_s >= expected_s(what)
            wait: dict[str, Any] = {
                "what": what, "branches": len(group), "longest_s": first.for_s, "is_long": is_long,
                "since": clock_text(first.for_s), "tree": first.tree, "branch": first.branch,
                "task": first.task_id,
            }  # fmt: skip
            waits.append(wait)
        waits.sort(key=lambda one: -one["longest_s"])
        lines = self._lines() if waits else ["no rollout of this process waits", *self._lines()]
        return RequestDone(lines, {"waits": waits})

    def _lines(self) -> list[str]:
        """Other reasons why the run waits, or will wait."""
        training, lines = self.training, []
        if self._feeder.is_paused:
            lines.append("the run is paused: `resume` ends the pause")
        if training.state.evaluating is not None:
            has_sft = training.config.sft is not None
            when = phase_title(training.state.evaluating.phase, cold_start=has_sft)
            lines.append(f"the evaluation {when} is running")
        if training.view.activity:
            lines.append(f"in progress: {training.view.activity}")
        inflight = self._feeder.inflight
        head = min(inflight, default=None)
        if head is not None and not inflight[head].has_ended and training.phase == "RL":
            lines.append(f"the learner takes trees in start order and waits for tree {head} next")
        if self._feeder.workers is not None and self._feeder.workers.behind():
            lines.append(self._feeder.workers.behind())
        lag_ms = training.lag.figures().get("lag_p99_ms", 0.0)
        if lag_ms > 100:
            lines.append(f"the event loop lags by {lag_ms:.0f} ms or more in 1 % of the time")
        return lines

    async def _why(self, index: int) -> RequestDone:
        """The waits of a tree and of each of its branches."""
        training = self.training
        one = self._inflight(index)
        rollout = training.loop.parts.actor.growing(index)
        state = "ended" if one.has_ended else "begins" if rollout is None else "grows"
        row: dict[str, Any] = {
            "tree": index,
            "task": one.task.id,
            "state": state,
            "age_s": asyncio.get_running_loop().time() - one.began_s,
        }
        lines, branches = [], []
        limit_s = training.config.limits.max_seconds
        if self._feeder.workers is not None and not one.has_ended:
            place = self._feeder.workers.places().get(index)
            if place is not None:
                row |= {"worker": place or "none yet", "state": "grows"}
            found = await self._feeder.workers.wait_info(index)
            if found is None:
                lines.append("its worker has not reported its waits")
            branches = [_branch_row(branch, limit_s) for branch in found or ()]
            lines.append("finished branches of a tree in a worker are not accessible")
        elif rollout is not None:
            limit_s = rollout.limits.max_seconds
            branches = [_branch_row(branch, limit_s) for branch in rollout.now()]
        ends: Counter[str] = Counter()
        failures: Counter[str] = Counter()
        if rollout is not None:
            for node in rollout.tree.nodes:
                if node.end == FAILED:
                    failures[failure_kind_of(node.error)] += 1
                elif node.end is not None:
                    ends[f"{node.end}{f' by {node.limit}' if node.limit else ''}"] += 1
            worked_s, allowed_s = rollout.clock(), rollout.limits.seconds_of_tree
            lines.append(f"used {worked_s:.1f} s of {allowed_s:g} s (limits.max_tree_seconds)")
        if one.has_ended:
            lines.append("it is finished and waits for the learner")
        number = sum(1 for other in self._feeder.inflight if other < index)
        before = f"{number} trees come before it" if number else "the learner takes it next"
        lines.append(f"{before} (start order)")
        facts = {**row, "branches": branches, "ends": ends, "failures": failures}
        return RequestDone(lines, facts)

    # Requests that act.

    def _inflight(self, index: int) -> InflightRollout:
        """The in-flight tree. Raises ConfigError if it has no slot."""
        if self.training.phase == "set-up":
            raise ConfigError(f"training has not started: {AT_START_HINT}")
        inflight = self._feeder.inflight
        if index not in inflight:
            known = sorted(inflight)
            span = f"; in flight are {known[0]} to {known[-1]}" if known else "; none is"
            raise ConfigError(f"tree {index} is not in flight{span}")
        return inflight[index]

    def _cancel_all(self, trees: list[int]) -> RequestDone:
        """Cancel all trees, or none if one of them cannot be cancelled."""
        if not trees:
            raise ConfigError("no tree given")
        for index in trees:
            if self._inflight(index).has_ended:
                raise ConfigError(f"tree {index} is finished and waits for the learner")
        return self._done("cancel", [self._cancel(index) for index in trees], {"trees": trees})

    def _cancel(self, index: int) -> str:
        training = self.training
        if self._feeder.workers is not None:
            place = self._feeder.workers.places().get(index)
            if self._feeder.workers.cancel(index, CANCEL_REASON):
                if place:
                    return f"tree {index} is being cancelled by {place}"
                return f"tree {index} is cancelled; it had no worker"
        rollout = training.loop.parts.actor.growing(index)
        if rollout is None:
            raise ConfigError(f"tree {index} is just starting; retry")
        number = rollout.cancel(CANCEL_REASON)
        if not number:
            return f"tree {index}: all its branches are ending already"
        return f"tree {index} is cancelled, with {number} live branches"

    def _pause(self) -> RequestDone:
        phase = self.training.phase
        if phase != "RL":
            raise ConfigError(
                f"only rollouts and updates of RL can be paused; the run is in phase {phase!r}"
            )
        if self._feeder.is_paused:
            return RequestDone(["the run is already paused"])
        self._feeder.steer(pauses=True)
        line = (
            "paused: no new tree, turn or update starts; running turns and tools finish, the "
            "clocks of rollouts stop; checkpoint works"
        )
        return self._done("pause", [line])

    def _resume(self) -> RequestDone:
        if self.training.phase != "RL" or not self._feeder.is_paused:
            return RequestDone(["the run is not paused"])
        self._feeder.steer(pauses=False)
        return self._done("resume", ["resumed"])

    async def _checkpoint(self) -> RequestDone:
        training = self.training
        if training.phase != "RL":
            raise ConfigError(
                "a checkpoint on demand is available during RL updates; the run is in phase "
                f"{training.phase!r}, which saves on its own schedule"
            )
        # in a task of its own: to cancel a save ends it, and with it the learner
        saving = asyncio.ensure_future(self._save())
        saving.add_done_callback(retrieve_exception)
        step = await asyncio.shield(saving)
        path = str(training.run.checkpoints.path(step))
        line = f"{path} is saved; it is deleted after checkpoint.keep_last later ones"
        return self._done("checkpoint", [line], {"path": path, "step": step})

    async def _save(self) -> int:
        """Save between two steps; returns the step."""
        async with self.training.loop.weights_at_rest:
            await self.training.loop.saver.save()
            return self.training.state.step

    def _done(
        self, command: str, lines: list[str], facts: dict[str, Any] | None = None
    ) -> RequestDone:
        """The reply to a command; terminal and run.log show it too."""
        for line in lines:
            self.training.view.log(f"agentenv ctl {command}: {line}")
        return RequestDone(lines, facts or {})


def _branch_row(now: BranchNow, limit_s: float) -> dict[str, Any]:
    """A live branch. `worked_s`: seconds without waits, `limit_s` their limit."""
    return {
        "branch": now.branch, "what": now.what, "for_s": now.for_s, "since": clock_text(now.for_s),
        "turns": now.num_turns, "tokens": now.num_response_tokens, "calls": now.num_tool_calls,
        "worked_s": now.worked_s, "limit_s": limit_s,
    }  # fmt: skip
