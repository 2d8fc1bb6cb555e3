"""A training run that can be steered: what the requests of `agentenv ctl` find and do in it.

All but checkpoints and evaluations is answered at once, by what actors, queue and workers know
anyway. A list of many rollouts is made in pieces, between which the run goes on.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from agentenv.actor import HELD, STEP, TURN, Actor, Awaited, BranchNow, Rollout
from agentenv.config import apply_overrides, build_config, to_plain
from agentenv.encoder import decoder
from agentenv.errors import ConfigError
from agentenv.metrics import failure_kind_of
from agentenv.offload import in_thread
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.records.row import FAILED
from agentenv.pipelines.rl.inflight import Flight
from agentenv.pipelines.rl.report import phase_title
from agentenv.pipelines.rl.training import Training
from agentenv.pipelines.run.control import (
    MAX_ROWS,
    AskRollouts,
    AskStatus,
    AskWhy,
    BranchRow,
    Cancel,
    Change,
    Checkpoint,
    Done,
    Evaluate,
    Knob,
    Knobs,
    Pause,
    Reply,
    Request,
    Requeue,
    Resume,
    RolloutRow,
    Rollouts,
    Set,
    Status,
    Wait,
    Waits,
    Why,
    last_values,
    listening,
    looked_up,
    settings_of,
    write_change,
)
from agentenv.pipelines.run.rundir import RunDirectory
from agentenv.pipelines.run.terminal import View
from agentenv.pipelines.run.waits import by_what, expected_s

TRAINING, EVALUATION = "training", "evaluation"
PIECE = 200  # rollouts that are looked at before others go on
MAX_TEXT = 2000  # characters of a turn that are shown
CANCEL_REASON = "given up by agentenv ctl"
AT_START_HINT = "it is being set up; ask again when training has begun (`status` says so)"


class _Knob(NamedTuple):
    """`reach`: what a change reaches, for people."""

    meaning: str
    reach: str


_FROM_NOW = "rollouts under way and new ones, in workers too"
KNOBS = {
    "queue.max_rollouts": _Knob("trees that grow at a time; 0: all that fit", "trees to come"),
    "limits.max_seconds": _Knob("seconds of work for a trajectory", _FROM_NOW),
    "limits.max_tree_seconds": _Knob("seconds of work for a tree", _FROM_NOW),
    "limits.env_timeout_s": _Knob("deadline of reset, fork, finish, close", "calls to come"),
    "limits.outage_s": _Knob("how long machinery that is down is waited for", _FROM_NOW),
    "eval.concurrency": _Knob("questions of an evaluation at a time", "evaluations to come"),
    "eval.timeout_s": _Knob("deadline of an evaluation", "evaluations to come"),
    "checkpoint.every": _Knob("updates between checkpoints; 0: by minutes only", "at once"),
    "checkpoint.minutes": _Knob("minutes between checkpoints; 0: by updates only", "at once"),
    "log.level": _Knob("least level of what parts say in run.log", "this process, not its workers"),
}


# What a wait may mean, by how it begins.
ADVICE = (
    (HELD, "the run is paused: `resume` lets it go on"),
    (TURN, "the engine generates: look at engine/waiting and the servers' logs if it takes long"),
    (
        "a place on a server",
        "all servers are busy or gone: more servers, fewer rollouts (queue.max_rollouts)",
    ),
    (
        "a place at the tool",
        "the tool's own limit: raise its max_concurrency, or see what holds it",
    ),
    ("the tool", "the tool's code or its service: its timeout_s ends it; `cancel` gives it up"),
    ("a place for", "all grading or tool processes are busy: raise their number"),
    ("a break before", "it failed and is tried again: run.log names the failure"),
    ("the rate limit", "the service allows no more: a second key, a cache, or fewer rollouts"),
    (STEP, "code of the environment: its own deadlines end it, else limits.max_seconds"),
    ("its environment", "limits.env_timeout_s ends it: is a sandbox, or a service, slow to start?"),
    ("the copies of its environment", "forks take their copies: limits.env_timeout_s ends it"),
    ("the journal", "the disk of the run's folder is slow or full"),
)


def advice_on(what: str) -> str:
    """What a wait may mean; empty: nothing is known."""
    return next((text for start, text in ADVICE if what.startswith(start)), "")


def clock_text(seconds_ago: float) -> str:
    """The time of day so many seconds ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))


def with_settings(config: TrainConfig, run: RunDirectory, view: View) -> TrainConfig:
    """The configuration of a run that goes on, with what was set in flight before."""
    plain = to_plain(config)
    values = settings_of(run.path, plain)
    if not values:
        return config
    told = ", ".join(f"{key} = {value}" for key, value in values.items())
    view.say(f"set in flight by agentenv ctl, and held on to: {told}")
    for key, value in values.items():
        _put(plain, key, value)
    return build_config(TrainConfig, plain, f"{run.path}/steering.jsonl")


def _put(plain: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        plain = plain[table]
    plain[last] = value


async def run_steered(training: Training) -> None:
    """The whole run, which can be steered meanwhile."""
    steered = Steered(training)
    steered.set_level(training.config.log.level)
    steered.take_up(last_values(training.run.path))
    async with listening(training.run.path, steered.answer, training.view.warn):
        await training.run_all()


class Steered:
    """Answers requests about one run."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._configured = to_plain(training.config)
        self._setting = asyncio.Lock()

    async def answer(self, request: Request) -> Reply:
        """Raises AgentEnvError for what cannot be done."""
        match request:
            case AskStatus():
                return self._status()
            case AskRollouts():
                return await self._rollouts(request)
            case AskWhy(tree=None):
                return await self._waits()
            case AskWhy():
                return await self._why(request)
            case Cancel():
                return await self._each(request.trees, "cancel", self._cancel)
            case Requeue():
                return await self._each(request.trees, "requeue", self._requeue)
            case Pause():
                return await self._pause()
            case Resume():
                return await self._resume()
            case Checkpoint():
                return await self._checkpoint()
            case Evaluate():
                return await self._evaluate(request.sets)
            case Set():
                return await self._set(request.values)

    # looking

    def _status(self) -> Status:
        """Where the run stands: phase, step, queue, and what is under way."""
        training = self.training
        state, queue = training.state, training.queue
        found = Status(
            run=str(training.run.path),
            pid=os.getpid(),
            host=socket.gethostname(),
            since=self._since,
            phase=training.phase,
            is_paused=training.is_paused,
            step=state.step,
            num_steps=0,
            policy_version=0,
            doing=training.view.activity,
            evaluating="" if state.evaluating is None else state.evaluating.phase,
            queue={
                "growing": queue.num_waiting - queue.num_ready,
                "ended": queue.num_ready,
                "slots": queue.num_reserved,
                "capacity": queue.capacity,
            },
            loop=training.lag.figures(),
            longest_wait=training.view.behind(),
            set={**training.was_set},
        )
        ledger = state.ledger
        found.trees = ledger.counts(in_flight=ledger.offered - ledger.num_delivered)
        if training.phase == "set-up":
            return found
        parts = training.parts
        found.num_steps, found.policy_version = parts.num_steps, parts.learner.policy_version
        found.num_open_envs = training._num_open_envs()
        found.engine = dict(parts.engine.stats())
        if training.workers is not None:
            found.workers = training.workers.stats()
        return found

    async def _rollouts(self, asked: AskRollouts) -> Rollouts:
        rows = [row async for row in self._rows(text=asked.text)]
        rows.sort(key=lambda row: (-row.for_s, -row.age_s))
        shown = rows[: max(1, min(asked.max_rows, MAX_ROWS))]
        note = ""
        if self.training.workers is not None:
            note = "of a tree in a worker, `why TREE` asks the worker what it awaits"
        return Rollouts(shown, len(rows) - len(shown), note)

    async def _rows(self, *, text: bool) -> Any:
        """Of trees that hold a slot, and of evaluations."""
        training = self.training
        if training.phase == "set-up":
            return
        growing = {one.tree.index: one for one in training.parts.actor.rollouts}
        workers = training.workers
        places = {} if workers is None else workers.places()
        for number, (index, flight) in enumerate(sorted(training.flights.items())):
            if number % PIECE == PIECE - 1:
                await asyncio.sleep(0)
            row = self._row_of_flight(index, flight, growing.get(index))
            if index in places:
                row.worker, row.state = places[index].worker or "none yet", "grows"
            row.question = flight.task.question if text else None
            yield row
        for number, rollout in enumerate(list(self._evaluated())):
            if number % PIECE == PIECE - 1:
                await asyncio.sleep(0)
            tree = rollout.tree
            row = RolloutRow(tree.index, tree.task.id, EVALUATION, "grows")
            _fill(row, rollout)
            row.question = tree.task.question if text else None
            yield row

    def _row_of_flight(self, index: int, flight: Flight, rollout: Rollout | None) -> RolloutRow:
        training = self.training
        now = asyncio.get_running_loop().time()
        row = RolloutRow(index, flight.task.id, TRAINING, "begins", now - flight.began)
        row.num_before = sum(1 for one in training.flights if one < index)
        if flight.has_ended:
            row.state = "ended"
        elif rollout is not None:
            row.state = "grows"
            _fill(row, rollout)
        return row

    def _evaluated(self) -> Iterator[Rollout]:
        parts = self.training.parts
        yield from parts.eval_actor.rollouts
        other = parts.overlapping
        if other is not None and other.rollouts is not parts.eval_actor.rollouts:
            yield from other.rollouts

    def _actors(self) -> list[Actor]:
        """Of this process; a set of rollouts that two have in common once."""
        parts = self.training.parts
        found = {id(one.rollouts): one for one in (parts.actor, parts.eval_actor)}
        if parts.overlapping is not None:
            found.setdefault(id(parts.overlapping.rollouts), parts.overlapping)
        return list(found.values())

    async def _waits(self) -> Waits:
        """What rollouts await, the longest first, and what holds up the run as a whole."""
        training = self.training
        if training.phase == "set-up":
            return Waits([], [f"the run has not begun: {training.view.activity or 'set-up'}"])
        now = asyncio.get_running_loop().time()
        awaited: list[Awaited] = []
        for actor in self._actors():
            for number, rollout in enumerate(list(actor.rollouts)):
                awaited += rollout.awaited()
                if number % PIECE == PIECE - 1:
                    await asyncio.sleep(0)
        waits = []
        for what, group in by_what(awaited).items():
            first = min(group, key=lambda one: (one.since, one.tree, one.branch))
            for_s = now - first.since
            waits.append(
                Wait(
                    what,
                    len(group),
                    for_s,
                    clock_text(for_s),
                    first.tree,
                    first.branch,
                    first.task_id,
                    for_s >= expected_s(what),
                    advice_on(what),
                )
            )
        waits.sort(key=lambda one: -one.longest_s)
        return Waits(waits, self._lines())

    def _lines(self) -> list[str]:
        """What else holds the run, or will."""
        training, lines = self.training, []
        if training.is_paused:
            lines.append("the run is paused: `resume` lets it go on")
        if training.state.evaluating is not None:
            has_sft = training.config.sft is not None
            when = phase_title(training.state.evaluating.phase, cold_start=has_sft)
            lines.append(f"the evaluation {when} goes on")
        if training.view.activity:
            lines.append(f"{training.view.activity} is being done")
        head = min(training.flights, default=None)
        if head is not None and not training.flights[head].has_ended and training.phase == "RL":
            lines.append(f"the learner takes trees in start order, and waits for tree {head} first")
        if training.workers is not None and training.workers.behind():
            lines.append(training.workers.behind())
        lag_ms = training.lag.figures().get("lag_p99_ms", 0.0)
        if lag_ms > 100:
            lines.append(f"the event loop is late, by {lag_ms:.0f} ms or more in 1 % of the time")
        return lines

    async def _why(self, asked: AskWhy) -> Why:
        """What a tree and each of its branches await, and since when."""
        assert asked.tree is not None
        index, training = asked.tree, self.training
        flight = self._flight(index)
        rollout = training.parts.actor.growing(index)
        row = self._row_of_flight(index, flight, rollout)
        row.question = flight.task.question if asked.text else None
        lines, branches = [], []
        limit_s = training.config.limits.max_seconds
        if training.workers is not None and not flight.has_ended:
            place = training.workers.places().get(index)
            if place is not None:
                row.worker, row.state = place.worker or "none yet", "grows"
            told = await training.workers.look(index)
            if told is None:
                lines.append("its worker has not said what it awaits")
            branches = [_branch_row(one, limit_s) for one in told or ()]
            lines.append("ended branches and texts of a tree in a worker cannot be reached")
        elif rollout is not None:
            branches = [_branch_row(one, rollout.limits.max_seconds) for one in rollout.now()]
        ends: Counter[str] = Counter()
        failures: Counter[str] = Counter()
        if rollout is not None:
            for node in rollout.tree.nodes:
                if node.end == FAILED:
                    failures[failure_kind_of(node)] += 1
                elif node.end is not None:
                    ends[f"{node.end}{f' by {node.limit}' if node.limit else ''}"] += 1
            worked_s, of_s = rollout.clock(), rollout.limits.seconds_of_tree
            lines.append(f"worked for {worked_s:.1f} s of {of_s:g} s (limits.max_tree_seconds)")
            if asked.text:
                await self._add_texts(branches, rollout)
        lines += self._lines_of(index, flight)
        return Why(row, branches, dict(ends), dict(failures), lines)

    def _lines_of(self, index: int, flight: Flight) -> list[str]:
        lines = []
        if flight.has_ended:
            lines.append("it has ended, and waits for the learner")
        number = sum(1 for one in self.training.flights if one < index)
        before = f"{number} trees are taken before it" if number else "the learner takes it next"
        lines.append(f"{before} (start order)")
        if flight.num_requeued:
            lines.append(f"times that it was requeued: {flight.num_requeued}")
        return lines

    async def _add_texts(self, branches: list[BranchRow], rollout: Rollout) -> None:
        """What each branch has read and written last."""
        to_text = decoder(self.training.parts.tokenizer)
        cursors = {one.name: one.pending or one.cursor for one in rollout.branches}

        def texts() -> None:
            for row in branches:
                node = cursors.get(row.branch)
                if node is not None:
                    ids = [*node.action_ids, *node.observation_ids]
                    row.text = to_text(ids)[-MAX_TEXT:]

        await in_thread(texts)

    # acting

    def _flight(self, index: int) -> Flight:
        """Raises ConfigError for a tree that has no slot."""
        training = self.training
        if training.phase == "set-up":
            raise ConfigError(f"the run has not begun: {AT_START_HINT}")
        if index not in training.flights:
            known = sorted(training.flights)
            span = f"; under way are {known[0]} to {known[-1]}" if known else "; none is"
            raise ConfigError(f"tree {index} is not under way{span}")
        return training.flights[index]

    async def _each(
        self, trees: list[int], command: str, act: Callable[[int, Flight], str]
    ) -> Done:
        """All of them, or the reason why not even the first that cannot be done."""
        if not trees:
            raise ConfigError("no tree is named")
        for index in trees:
            flight = self._flight(index)
            if flight.has_ended:
                raise ConfigError(f"tree {index} has ended, and waits for the learner")
            if not flight.has_begun:
                raise ConfigError(f"tree {index} only begins; ask again")
        lines = [act(index, self._flight(index)) for index in trees]
        await self._note(command, {"trees": trees}, "; ".join(lines))
        return Done(lines, {"trees": trees})

    def _cancel(self, index: int, flight: Flight) -> str:
        training = self.training
        if training.workers is not None:
            place = training.workers.places().get(index)
            if training.workers.give_up(index, CANCEL_REASON):
                if place is not None and place.worker:
                    return f"tree {index} is being cancelled: {place.worker} is told to end it"
                return f"tree {index} is cancelled; it had no worker"
        rollout = training.parts.actor.growing(index)
        if rollout is None:
            raise ConfigError(f"tree {index} only begins, from the journal; ask again")
        number = rollout.give_up(CANCEL_REASON)
        if not number:
            return f"tree {index}: all its branches are ending already"
        return f"tree {index} is cancelled, with {number} live branches"

    def _requeue(self, index: int, flight: Flight) -> str:
        flight.requeue()
        return f"tree {index} begins again, in its place"

    async def _pause(self) -> Done:
        training = self.training
        if training.phase != "RL":
            raise ConfigError(
                f"only rollouts and updates of RL can be paused; the run is in phase "
                f"{training.phase!r}"
            )
        if training.is_paused:
            return Done(["the run is paused already"])
        training.pause()
        await self._note("pause", {}, "paused")
        return Done(
            [
                "paused: no tree, no turn and no update begins; turns and tools that run come to "
                "their end, clocks of rollouts stand; checkpoint and evaluate work"
            ]
        )

    async def _resume(self) -> Done:
        if not self.training.is_paused:
            return Done(["the run is not paused"])
        self.training.go_on()
        await self._note("resume", {}, "goes on after a pause")
        return Done(["the run goes on"])

    def _check_steps(self, what: str) -> None:
        phase = self.training.phase
        if phase != "RL":
            raise ConfigError(
                f"{what} on demand is for the updates of RL; the run is in phase {phase!r}, which "
                "saves and evaluates by its own rules"
            )

    async def _checkpoint(self) -> Done:
        self._check_steps("a checkpoint")
        training = self.training

        async def save() -> str:
            await training.saver.save()
            return str(training.run.checkpoints.path(training.state.step))

        path = await training.orders.place(save)
        await self._note("checkpoint", {"path": path}, f"{path} is saved")
        told = f"{path} is saved; it goes when checkpoint.keep_last later ones are there"
        return Done([told], {"path": path, "step": training.state.step})

    async def _evaluate(self, sets: list[str]) -> Done:
        """Have these sets evaluated between two updates, all of them if none is named."""
        self._check_steps("an evaluation")
        training = self.training
        known = list(training.config.eval.sets)
        for name in sets:
            if name not in known:
                raise ConfigError(f"there is no evaluation set {name!r}; known: {known}")
        if not known:
            raise ConfigError("the configuration has no evaluation set, [eval.sets.NAME]")
        chosen = sets or known
        when, found = await training.orders.place(lambda: training.evaluator.asked(chosen))
        lines, facts = [f"written to {training.run.path}/eval/{when}"], {}
        for name, result in found.items():
            overall = result.overall
            low, high = overall.interval
            lines.append(
                f"{name}: success {overall.success:.3f} [{low:.3f}, {high:.3f}], reward "
                f"{overall.reward:.3f}, {overall.num_trajectories} trajectories"
            )
            facts[name] = {
                "success": overall.success,
                "interval": list(overall.interval),
                "reward": overall.reward,
                "num_trajectories": overall.num_trajectories,
                "num_failed": overall.num_failed,
            }
        if not found:
            raise ConfigError(f"there is no evaluation {when}: run.log says why")
        await self._note("evaluate", {"when": when, "sets": chosen}, lines[0])
        return Done(lines, {"when": when, "sets": facts})

    # keys

    async def _set(self, values: list[str]) -> Reply:
        async with self._setting:
            if not values:
                return self._knobs()
            return await self._change(values)

    def _knobs(self) -> Knobs:
        plain = to_plain(self.training.config)
        return Knobs(
            [
                Knob(
                    key,
                    looked_up(plain, key),
                    looked_up(self._configured, key),
                    knob.meaning,
                    knob.reach,
                )
                for key, knob in KNOBS.items()
            ]
        )

    async def _change(self, values: list[str]) -> Done:
        """All of the keys or none."""
        training = self.training
        if training.phase == "set-up":
            raise ConfigError(f"the run has not begun: {AT_START_HINT}")
        keys = []
        for text in values:
            key, equals, _ = text.partition("=")
            keys.append(key.strip())
            if not equals or key.strip() not in KNOBS:
                near = difflib.get_close_matches(key.strip(), KNOBS, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                problem = "it cannot be changed in flight" if equals else "expected KEY=VALUE"
                raise ConfigError(f"{text!r}: {problem}; {hint}known: {', '.join(KNOBS)}")
        before = to_plain(training.config)
        plain = to_plain(training.config)
        apply_overrides(plain, values, TrainConfig)
        config = await in_thread(build_config, TrainConfig, plain, "set")
        self._apply(config)
        after = to_plain(config)
        changed = {key: looked_up(after, key) for key in keys}
        lines = [
            f"{key}: {looked_up(before, key)} -> {changed[key]} ({KNOBS[key].reach})"
            for key in keys
        ]
        facts = {"values": changed, "before": {key: looked_up(before, key) for key in keys}}
        await self._note("set", facts, "; ".join(lines))
        return Done(lines, facts)

    def _apply(self, config: TrainConfig) -> None:
        """Give the values to those who read them."""
        training, old = self.training, to_plain(self.training.config)
        new = to_plain(config)
        training.config = config
        for actor in self._actors():
            actor.set_times(config.limits)
        if training.workers is not None:
            training.workers.steer()
        training.evaluator.set(config.eval)
        training.saver.config = config.checkpoint
        self.set_level(config.log.level)
        for key in KNOBS:
            value = looked_up(new, key)
            if value != looked_up(old, key) and isinstance(value, int | float):
                training.was_set[key] = float(value)

    def take_up(self, values: dict[str, Any]) -> None:
        """What an earlier process was told and this one has held on to, for the metrics."""
        plain = to_plain(self.training.config)
        for key, value in values.items():
            if looked_up(plain, key) == value and isinstance(value, int | float):
                self.training.was_set[key] = float(value)

    def set_level(self, level: str) -> None:
        """What of the parts' own messages goes into run.log."""
        logging.getLogger().setLevel(level.upper())

    async def _note(self, command: str, facts: dict[str, Any], line: str) -> None:
        """For the log, the terminal, and whoever reads the run's folder."""
        training = self.training
        training.view.say(f"agentenv ctl {command}: {line}")
        version = 0
        if training.phase != "set-up":
            version = training.parts.learner.policy_version
        change = Change(
            time.strftime("%Y-%m-%dT%H:%M:%S"),
            command,
            training.state.step,
            version,
            training.state.incarnation,
            facts,
        )
        try:
            await in_thread(write_change, training.run.path, change)
        except OSError as error:
            training.view.warn(f"{training.run.path}/steering.jsonl cannot be written: {error}")


def _fill(row: RolloutRow, rollout: Rollout) -> None:
    """What is known of a rollout of this process."""
    branches = rollout.now()
    row.num_branches = len(rollout.branches)
    row.num_turns = sum(1 for node in rollout.tree.nodes if node.action_ids)
    row.num_failures = len(rollout.tree.failures())
    if branches:
        oldest = max(branches, key=lambda one: one.for_s)
        row.what, row.for_s, row.branch = oldest.what, oldest.for_s, oldest.branch
        row.since = clock_text(oldest.for_s)


def _branch_row(now: BranchNow, limit_s: float) -> BranchRow:
    return BranchRow(
        now.branch,
        now.what,
        now.for_s,
        clock_text(now.for_s),
        now.num_turns,
        now.num_response_tokens,
        now.num_tool_calls,
        now.worked_s,
        limit_s,
        advice_on(now.what),
    )
