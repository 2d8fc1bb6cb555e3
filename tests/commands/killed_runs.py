"""Runs that are killed, resumed with the command of a user, and inspected from outside: which trees
were lost, which were trained twice, and which weights resulted."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import msgspec
import psutil

from agentenv.assembly.run.checkpoints import Checkpoints, load_state
from agentenv.envs.sandbox.program import PREFIX
from agentenv.training.loop.state import RunState
from benchmarks.parts.chaos import CONFIG, Reader, Servers, Witness
from tests.envs.sandbox.test_program import MARK
from tests.support.forks import Command
from tests.support.killing import Plan

NUM_STEPS, GROUPS = 4, 2
# By the victim, in the command line of one of them.
WORDS = {"agent": "agent.py", "sandbox": "program_init.py", "endpoint": "rollout_worker"}
LIMIT_S = 120.0  # until a process reaches its kill point or ends


class KilledRun:
    """One run of NUM_STEPS steps, in as many processes as it takes. No checkpoint is ever removed,
    so that nothing of the journal is."""

    def __init__(self, workspace: Path, name: str, *overrides: str) -> None:
        self.workspace, self.name = workspace, name
        self.path = workspace.parent / "runs" / name
        self.witness = Witness()
        self._overrides = overrides
        self._reader = Reader(self.path / "journal")
        self._num_starts = 0

    def keys(self) -> list[str]:
        """Of its engine and its evaluations."""
        here = self.workspace.parent
        chosen = [f"eval.sets.a.path={here}/a.jsonl", "eval.sets.a.every=2"]
        return [*chosen, "eval.sets.a.max_tasks=1", "engine.latency_s=0.02"]

    def arguments(self) -> list[str]:
        given = [str(self.workspace), f"run.name={self.name}", f"train.num_steps={NUM_STEPS}"]
        given += ["checkpoint.every=2", "checkpoint.keep_last=1000"]
        given += [*self.keys(), *self._overrides]
        return [*given, *(["--resume"] if (self.path / "config.json").is_file() else [])]

    @contextmanager
    def process(self, plan: Plan = Plan()) -> Iterator[Command]:  # noqa: B008 - it is frozen
        """A process of the run; its output is read after its end."""
        log = self.workspace.parent / f"{self.name}-{self._num_starts}.log"
        self._num_starts += 1
        self.witness.begin()
        command = ("-m", "tests.support.killing", msgspec.json.encode(plan).decode())
        with Command(*command, *self.arguments(), log=log, path=[log.parent]) as process:
            yield process
            process.kill()
            process.wait()
        self.check()

    def start(self, plan: Plan = Plan()) -> int:  # noqa: B008
        """Its exit status, once it has ended by itself or was killed by its plan."""
        with self.process(plan) as process:
            until(lambda: self.has_ended(process), f"{self.name}: {plan} or its end")
            assert process.returncode is not None
            return process.returncode

    def has_ended(self, process: Command) -> bool:
        return process.poll() is not None

    def start_and_kill(self, victim: str, rng: Random, seconds: float) -> str:
        """Kill the process or its children at a random moment within these seconds and wait for the
        rest to end. Returns a description of the kill."""
        moment = rng.uniform(0, seconds)
        with self.process(Plan(own_rank=victim == "rank")) as process:
            end = time.monotonic() + moment
            while time.monotonic() < end and process.poll() is None:
                time.sleep(0.002)
            while not kill(process, victim, rng) and process.poll() is None:
                time.sleep(0.002)
            has_begun = "an update takes" in process.log.read_text()  # no check ends it any more
            until(lambda: process.poll() is not None, f"{self.name}: its end")
            goes_on = victim in WORDS and has_begun
            assert not goes_on or process.returncode == 0, f"{self.name}: {victim}, see its log"
        return f"{victim}: after {moment:.3f} s"

    def check(self) -> None:
        for frame in self._reader.read():
            self.witness.add(frame)

    # its fate

    def lost(self) -> list[int]:
        """Trees that were not trained, or rolled out again although they were finished."""
        return self.witness.lost(range(NUM_STEPS * GROUPS))

    def duplicated(self) -> list[int]:
        """Trees that weights were trained on more than once."""
        return self.witness.duplicated()

    def is_done(self) -> bool:
        """Whether its last step has a checkpoint."""
        found = Checkpoints(self.path / "checkpoints").finished()
        return bool(found) and load_state(found[-1], RunState).step == NUM_STEPS

    def last(self) -> Path:
        """The last checkpoint, which is that of the last step."""
        last = Checkpoints(self.path / "checkpoints").finished()[-1]
        state = load_state(last, RunState)
        assert state.step == NUM_STEPS
        assert state.position == NUM_STEPS * GROUPS == state.counters.num_delivered
        return last

    def trained_again(self) -> KilledRun:
        """The same trees in the same order, from the first checkpoint on, in one process."""
        name = f"{self.name}-again"
        other = type(self)(self.workspace, name, *self._overrides)
        shutil.rmtree(other.path, ignore_errors=True)
        shutil.copytree(self.path, other.path)
        other.check()
        other.witness = Witness()
        for path in Checkpoints(other.path / "checkpoints").finished()[1:]:
            shutil.rmtree(path)
        assert other.start() == 0
        assert not other.witness.tasks, "it rolls nothing out"
        return other

    def weights(self) -> dict[str, bytes]:
        """Weights and optimizer of the last checkpoint, by file."""
        last = self.last()
        paths = [last / "model.safetensors", *sorted((last / "trainer").glob("rank-*"))]
        assert len(paths) == 2
        return {path.name: path.read_bytes() for path in paths}

    def remove(self) -> None:
        for path in (self.path, self.path.with_name(f"{self.name}-again")):
            shutil.rmtree(path, ignore_errors=True)


class CountingRun(KilledRun):
    """With an interpreter in a sandbox as its tool."""

    def keys(self) -> list[str]:
        script = "tests.support.warehouse:counting_turn"
        env = ["env.id=agentenv/CodeInterpreter-v0", f"engine.script={script}"]
        return [*env, "python.preload=[]", *super().keys()]


class ProgramRun(KilledRun):
    """With programs in sandboxes, whose calls are the turns. `left` returns the remaining processes
    and folders."""

    def left(self) -> list[str]:
        """Processes of programs and of their sandboxes, and their folders."""
        folder = tempfile.gettempdir()
        words = (MARK, f"{folder}/{PREFIX}")
        lines = map(line_of, psutil.process_iter())
        found = [line[:80] for line in lines if any(word in line for word in words)]
        return found + [str(path) for path in Path(folder).glob(f"*{PREFIX}*")]


class WorkedProgramRun(ProgramRun):
    """The programs, and the endpoints that answer them, are those of two workers."""

    def keys(self) -> list[str]:
        return [*super().keys(), "cluster.kind=processes", "cluster.workers=2"]


class ServedRun(KilledRun):
    """On replay engine servers. A killed server is restarted immediately; the sampled tokens, and
    so the weights, depend on the timing."""

    def __init__(self, folder: Path, servers: Servers, name: str) -> None:
        super().__init__(folder / CONFIG, name)
        self.servers = servers
        self.num_killed = 0

    def keys(self) -> list[str]:
        return []

    def has_ended(self, process: Command) -> bool:
        self.num_killed += self.servers.revive()
        return super().has_ended(process)


class ServedProgramRun(ProgramRun, ServedRun):
    """Programs that such servers answer."""

    def __init__(self, folder: Path, servers: Servers, name: str) -> None:
        ServedRun.__init__(self, folder, servers, name)
        self.workspace = folder / f"programs-{CONFIG}"


def kill(process: Command, victim: str, rng: Random) -> bool:
    """Whether there was a victim, or the process has ended."""
    if process.poll() is not None:
        return True
    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return True
    chosen: Sequence[psutil.Process] = [] if victim == "controller" else below
    if victim in WORDS:
        chosen = [one for one in below if WORDS[victim] in line_of(one)]
        chosen = rng.sample(chosen, min(1, len(chosen)))
    for one in chosen:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    if victim in ("controller", "tree"):
        process.kill()
    return victim not in WORDS or bool(chosen)


def line_of(process: psutil.Process) -> str:
    """Its command line."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(condition: object, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.01)
