"""Any end of a run saves its progress first, and state and weights of a checkpoint belong together.
Runs are whole ones, started by their command, with a rank that computes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Set
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.checks import start_checks
from agentenv.assembly.run import checkpoints
from agentenv.assembly.run.checkpoints import Checkpoints
from agentenv.base.errors import DataError, EngineDeadError, EnvError, LearnerError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import ToolResult
from agentenv.contract.function_tool import FunctionTool
from agentenv.contract.http import status_error
from agentenv.engines.scripted import ScriptedEngine
from agentenv.launchers import train
from agentenv.learners.algorithms.credit import TreeCredit
from agentenv.rollout import journal
from agentenv.rollout.archive import Archive, StepHeader, steps_of
from agentenv.rollout.archive_reader import read_step
from agentenv.rollout.frames import Leased
from agentenv.training.loop import evaluations, step_report
from agentenv.training.loop.alarms import Alarms
from agentenv.training.loop.state import RunSaver
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.supervised import cold_start
from agentenv.training.supervised.assembly import TrainingAssembly
from benchmarks.parts.chaos import Reader
from tests.support.polling import until
from tests.support.runs import trees_of
from tests.support.toy_rank import COUNT, ToyRank, toy_ranks

NUM_STEPS = 4


class Trial:
    """A run, started by its command."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder = config, folder

    def start(self, *overrides: str) -> int:
        """The command's exit code."""
        # no trial, since calls of the environment are counted
        keys = [f"run.name={self.folder.name}", f"train.num_steps={NUM_STEPS}", "env.trial=false"]
        keys += [f"eval.sets.a.path={self.config.parent}/a.jsonl"]
        keys += ["eval.sets.a.every=2", "eval.sets.a.max_tasks=2"]
        return train.main([str(self.config), *keys, *overrides])

    def resume(self, *overrides: str) -> int:
        return self.start(*overrides, "--resume")

    def rows(self) -> list[dict[str, Any]]:
        """Of its metrics."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def saved_step(self) -> int:
        """The step of the last checkpoint. Its weights and learner state are those of the step: one
        update per step, since the script leaves no group with equal returns."""
        path = sorted((self.folder / "checkpoints").glob("step-*[0-9]"))[-1]
        state = json.loads((path / "state.json").read_text())
        step: int = state["step"]
        assert path.name == f"step-{step:06d}"
        assert state["position"] == 2 * step == state["counters"]["offered"]
        taken = [row for row in self.rows() if "trees/offered" in row and row["step"] <= step]
        num_untrained = sum("learner/num_trained" not in row for row in taken)
        for folder in (path, path / "trainer"):
            count = json.loads((folder / COUNT).read_text())
            assert count["updates"] == step - num_untrained
        assert not list((self.folder / "checkpoints").glob("*.partial"))
        return step

    def kept_steps(self) -> list[int]:
        """Those whose trees are kept, whole, as the step took them."""
        found = steps_of(self.folder / "trees")
        for number, path in found.items():
            step = read_step(path)
            assert step.is_whole
            assert step.header.step == number
            assert [entry.tree for entry in step.entries] == [2 * number - 2, 2 * number - 1]
        return [*found]

    def best(self) -> int:
        """The step of the best checkpoint, by its weights."""
        count = json.loads((self.folder / "checkpoints" / "best" / COUNT).read_text())
        return int(count["updates"])

    def assert_resumes(self, *overrides: str, unwritten: Set[int] = frozenset()) -> None:
        """Resumed, the run ends well, and each tree was trained once; `unwritten`: steps that were
        saved before their trajectories could be written."""
        assert self.resume(*overrides) == 0
        assert self.saved_step() == NUM_STEPS
        assert self.kept_steps() == [*range(1, NUM_STEPS + 1)]
        for step in {*range(1, NUM_STEPS + 1)} - unwritten:
            assert trees_of(self.folder, step) == [2 * step - 2, 2 * step - 1]
        evaluated = sorted(path.name for path in (self.folder / "eval").iterdir())
        assert evaluated == ["after_rl", "before_sft", "step-000002", "step-000004"]
        rows = self.rows()
        assert sorted(row["phase"] for row in rows if "eval/a/success" in row) == evaluated
        steps = [row["step"] for row in rows if "trees/offered" in row]
        assert len(steps) == len(set(steps))
        assert {*range(1, NUM_STEPS + 1)} - {*steps} <= unwritten


NUMBERS = count(1)


@pytest.fixture
def trial(warehouse: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    """With the class ToyRank for the learner's ranks, of which attributes are restored."""
    monkeypatch.setattr(ToyRank, "at", staticmethod(lambda name: None))
    with toy_ranks():
        yield Trial(warehouse, warehouse.parent / "runs" / f"ends-{next(NUMBERS)}")


# Moments of a signal: the current command of the learner and its number, or another activity; and
# the step that is then saved, which is the previous one if the step is incomplete.
POINTS = {
    "rollout": 1,
    "ScoreSequences 3": 3,  # the parity of step 2, in step 3; the first: of the start
    "Update 3": 3,
    "Publish 2": 2,
    "evaluation": 2,  # that of step 2, which is continued
    "Export 2": 2,  # of the checkpoint of step 2; the first is that of step 0
    "Save 2": 2,
    "archive 2": 2,  # the trees of step 2 are written
    "after_rl": 4,  # the evaluation of step 4
    "report": 4,
    "Close 1": 4,
}


class Signals:
    """Sends signals to this process when a point is reached; the second of two as soon as the first
    has been taken. `number` 0: one as of a terminal that is closed."""

    def __init__(self, point: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.point, self.number = point, number
        self.seen: dict[str, int] = {}
        self.sent = 0
        generate = ScriptedEngine.generate

        async def generating(engine: ScriptedEngine, *args: Any, **kwargs: Any) -> Any:
            session, version = kwargs["session"], engine.policy_version
            if self.point in ("before_sft", "after_sft") and not session.isdigit():
                name = "before_sft" if version == 0 else "after_sft"
                self.at("" if session.startswith("probe") else name)
            elif session == "4":  # it begins as soon as step 1 has given its slots back
                self.at("rollout")
            elif not session.startswith("probe") and not session.isdigit():
                self.at("evaluation" if version == 2 else "after_rl" if version == 4 else "")
            return await generate(engine, *args, **kwargs)

        monkeypatch.setattr(ScriptedEngine, "generate", generating)
        monkeypatch.setattr(ToyRank, "at", staticmethod(self.of_learner))
        write, finish = Archive.write, RunRecorder.finish

        def writing(archive: Archive, header: StepHeader, trees: Any) -> None:
            self.at(f"archive {header.step}")
            write(archive, header, trees)

        def finishing(recorder: RunRecorder, *figures: Any) -> None:
            self.at("report")
            finish(recorder, *figures)

        monkeypatch.setattr(Archive, "write", writing)
        monkeypatch.setattr(RunRecorder, "finish", finishing)

    def of_learner(self, name: str) -> float:
        self.seen[name] = self.seen.get(name, 0) + 1
        self.at(f"{name} {self.seen[name]}")
        return 0.0

    def at(self, point: str) -> None:
        if point != self.point or self.sent:
            return
        self.sent = 1
        first = signal.SIGHUP if self.number == 0 else signal.SIGTERM
        os.kill(os.getpid(), first)
        if self.number == 2:
            second = (os.kill, os.getpid(), signal.SIGINT)
            try:
                asyncio.get_running_loop().call_later(0.005, *second)
            except RuntimeError:  # in a thread, which the loop waits for
                time.sleep(0.05)
                second[0](*second[1:])


@pytest.mark.parametrize(
    ("point", "number"),
    [*((point, 2) for point in POINTS)]
    + [(point, number) for point in ("rollout", "Update 3", "Save 2") for number in (0, 1)],
)
def test_a_signal_saves_a_checkpoint_at_any_point(
    trial: Trial,
    point: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    signals = Signals(point, number, monkeypatch)
    code = trial.start("checkpoint.every=2")
    out = capsys.readouterr().out
    assert signals.sent
    assert code == 130 or point.startswith("Close")
    assert "interrupted" in out
    assert ("still shutting down" in out) == (number == 2) or point.startswith("Close")
    assert trial.saved_step() == POINTS[point]
    assert trial.kept_steps() == [*range(1, POINTS[point] + 1)]
    trial.assert_resumes()


BEST = "checkpoint.best_metric=a/success"


def test_the_best_checkpoint_is_kept_if_a_signal_precedes_the_write_of_its_trees(
    trial: Trial,
) -> None:
    """The checkpoint of an evaluation is saved then, and waits for them."""
    saving, save, write = threading.Event(), RunSaver.save, Archive.write

    async def saved(self: RunSaver, **keys: Any) -> None:
        if self.state.step == 2:
            saving.set()
        await save(self, **keys)

    def writing(archive: Archive, header: StepHeader, trees: Any) -> None:
        if header.step == 2:
            assert saving.wait(60)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # the signal has been taken
        write(archive, header, trees)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunSaver, "save", saved)
        patch.setattr(Archive, "write", writing)
        assert trial.start(BEST) == 130
    assert trial.saved_step() == 2
    assert trial.kept_steps() == [1, 2]
    assert trial.best() == 2
    trial.assert_resumes(BEST)


def test_the_journal_records_trained_trees_before_a_checkpoint_does(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no tree waits for the journal any more, as in the last step."""
    begin, known = Checkpoints.begin, dict[str, set[int]]()

    def beginning(self: Checkpoints, path: Path, *given: Any, **keys: Any) -> Any:
        frames = Reader(self.folder.parent / "journal").read()
        known[path.name] = {one.step for one in frames if isinstance(one, Leased)}
        return begin(self, path, *given, **keys)

    monkeypatch.setattr(journal, "GATHER_S", 60.0)
    monkeypatch.setattr(Checkpoints, "begin", beginning)
    keys = ("checkpoint.every=1", "checkpoint.keep_last=1000", "algorithm.group_size=2")
    assert trial.start(*keys) == 0
    for step in range(1, NUM_STEPS + 1):
        assert known[f"step-{step:06d}"] >= set(range(step))


def test_the_next_process_keeps_the_best_checkpoint_after_an_early_signal(trial: Trial) -> None:
    """The evaluation had finished but had not been processed."""
    replace = evaluations.replace_folder

    def replacing(partial: Path, folder: Path) -> None:
        replace(partial, folder)
        if folder.name == "step-000002":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluations, "replace_folder", replacing)
        assert trial.start(BEST) == 130
    assert trial.saved_step() == 2
    assert not (trial.folder / "checkpoints" / "best").exists()
    before = (trial.folder / "eval" / "step-000002" / "rows.jsonl").stat()
    trial.assert_resumes(BEST)
    after = (trial.folder / "eval" / "step-000002" / "rows.jsonl").stat()
    assert after.st_mtime_ns == before.st_mtime_ns, "nothing is asked again"
    assert trial.best() == 2, "that of step 4 is no better"


def test_a_run_stops_successfully_at_the_target_of_its_best_metric(trial: Trial) -> None:
    keys = (BEST, "train.stop_at=0.01")
    assert trial.start(*keys) == 0
    for _ in range(2):  # a resumed run restores the value
        assert trial.saved_step() == 2
        evaluated = {path.name for path in (trial.folder / "eval").iterdir()}
        assert evaluated == {"after_rl", "before_sft", "step-000002"}
        assert trial.resume(*keys) == 0
    assert trial.resume(BEST) == 0
    assert trial.saved_step() == NUM_STEPS


# Other ends of a run: the replacement, the exit code, the message, and the saved step.


def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that were sampled before may be trained by one more update."""
    generate = ScriptedEngine.generate

    async def generating(engine: ScriptedEngine, *args: Any, **kwargs: Any) -> Any:
        if engine.policy_version >= 2 and kwargs["session"].isdigit():
            raise EngineDeadError("out of memory")
        return await generate(engine, *args, **kwargs)

    monkeypatch.setattr(ScriptedEngine, "generate", generating)


def full(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RunRecorder.write_trajectories

    async def writing(recorder: RunRecorder, name: str, trees: list[TrajectoryTree]) -> None:
        if name == "step-000002":  # while step 3 is taken
            raise OSError(errno.ENOSPC, "No space left on device", f"{name}.jsonl")
        await write(recorder, name, trees)

    monkeypatch.setattr(RunRecorder, "write_trajectories", writing)


def teaching_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeCredit, "has_signal", False)


def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    def update(name: str) -> None:
        if name == "Publish":
            raise LearnerError("no")

    monkeypatch.setattr(ToyRank, "at", staticmethod(update))


@pytest.mark.parametrize(
    ("replace", "overrides", "told", "steps"),
    [
        (dying, [], "out of memory", {2, 3}),
        (full, [], "step-000002.jsonl: no space left on the device", {3}),
        (teaching_nothing, ["train.max_untrained_steps=3"], "train.max_untrained_steps", {2}),
        (lambda _: None, ["train.max_logprob_gap=0.01"], "disagree by", {0}),
        (refusing, [], "no", {1}),
    ],
    ids=["engine", "disk", "untrained", "parity", "publish"],
)
def test_any_other_cause_of_an_end_is_reported_after_saving(
    trial: Trial,
    replace: Callable[[pytest.MonkeyPatch], None],
    overrides: list[str],
    told: str,
    steps: set[int],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        replace(patch)
        assert trial.start(*overrides) == 1
    assert told in capsys.readouterr().err.replace("\n", " ")
    assert trial.saved_step() in steps
    trial.assert_resumes(unwritten={full: {2, 3}, refusing: {1}}.get(replace, set()))


@pytest.mark.parametrize(
    ("owner", "name"), [(Alarms, "check_step"), (step_report.measures, "rollout_metrics")]
)
def test_a_bug_of_the_core_ends_the_run_with_a_checkpoint(
    trial: Trial, owner: Any, name: str
) -> None:
    """Also a bug in the report of a step: its weights are whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *_: 1 / 0)
        with pytest.raises(ExceptionGroup):
            trial.start()
    assert trial.saved_step() == 1
    trial.assert_resumes(unwritten={1})


def test_weights_of_a_partial_step_are_not_saved(
    trial: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update that failed may have moved them."""
    signals: list[str] = []

    def failing(name: str) -> None:
        signals.append(name)
        if signals.count("Update") == 3 and name == "Update":
            raise LearnerError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyRank, "at", staticmethod(failing))
        assert trial.start("checkpoint.every=1") == 1
    err = capsys.readouterr().err.replace("\n", " ")
    assert "in the middle" in err
    assert "step-000002" in err
    assert trial.saved_step() == 2
    trial.assert_resumes()


def test_a_checkpoint_that_hangs_is_abandoned(
    trial: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    """After checkpoint.finish_s from the signal on; the one before is whole."""
    seen: list[str] = []

    def hanging(name: str) -> float:
        seen.append(name)
        if name != "Save" or seen.count("Save") != 3:
            return 0.0
        os.kill(os.getpid(), signal.SIGTERM)
        return 3600.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ToyRank, "at", staticmethod(hanging))
        assert trial.start("checkpoint.every=1", "checkpoint.finish_s=0.3") == 1
    assert "checkpoint.finish_s" in capsys.readouterr().err
    assert trial.saved_step() == 1
    trial.assert_resumes()


def test_a_checkpoint_on_a_hanging_disk_is_not_awaited(
    trial: Trial, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner is ended after checkpoint.finish_s, and soon the command without the disk."""
    ended, begin = threading.Event(), Checkpoints.begin

    def hanging(self: Checkpoints, path: Path) -> Path:
        if path.name == "step-000002":
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended.wait(60)
            raise OSError("nobody waits for it any more")
        return begin(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "begin", hanging)
        patch.setattr(checkpoints, "LAST_S", 0.3)
        patch.setattr(checkpoints.Saver, "_fail", lambda self, *args: ended.set())
        assert trial.start("checkpoint.every=1", "checkpoint.finish_s=0.3") == 1
    assert "hangs; is its" in capsys.readouterr().err.replace("\n", " ")
    assert trial.saved_step() == 1
    trial.assert_resumes()


def test_unwritable_trees_do_not_block_the_last_checkpoint(trial: Trial) -> None:
    written, write = threading.Event(), Archive.write

    def hanging(archive: Archive, header: StepHeader, trees: Any) -> None:
        if header.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            written.wait(2)
        write(archive, header, trees)
        if header.step == 2:
            written.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Archive, "write", hanging)
        assert trial.start("checkpoint.finish_s=0.3") == 130
    assert trial.saved_step() == 2
    log = (trial.folder / "run.log").read_text()
    assert "be written: writing" in log
    assert written.wait(20)
    trial.assert_resumes()


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_resumed_run_does_not_read_its_checkpoint_after_the_start(
    trial: Trial, keep_last: int
) -> None:
    """Three checkpoints further, when that is long pruned."""
    keys = ("checkpoint.every=1", f"checkpoint.keep_last={keep_last}")
    assert trial.start(*keys, "train.num_steps=1") == 0
    assert trial.resume(*keys) == 0
    kept = sorted(path.name for path in (trial.folder / "checkpoints").glob("step-*"))
    assert kept == [f"step-{n:06d}" for n in range(5 - keep_last, 5)]
    assert trial.saved_step() == NUM_STEPS
    assert not (trial.folder / "resumed").exists()


@pytest.mark.parametrize(("share", "code"), [(0.9, 0), (0.25, 1)])
def test_a_failure_that_repeats_is_shown_and_ends_a_run_above_its_share(
    trial: Trial,
    share: float,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Failures of any kind, including those that an environment raises itself."""
    numbers = count(1)

    async def call(self: FunctionTool, arguments: dict[str, Any], state: Any) -> ToolResult:
        if next(numbers) % 2:
            return ToolResult("7")
        raise EnvError("shelf 7 is locked")

    monkeypatch.setattr(FunctionTool, "call", call)
    given = [str(trial.config), f"run.name={trial.folder.name}", "train.num_steps=12"]
    given += ["limits.max_turn_retries=0", "limits.max_failures=1", "train.max_untrained_steps=0"]
    assert train.main([*given, f"limits.max_failed_share={share}"]) == code
    err = capsys.readouterr().err
    first, *_, last = [line for line in err.splitlines() if "shelf 7 is locked" in line]
    assert "test_ends.py, line " in first
    assert re.search(r"\d+ x EnvError: shelf 7", last)
    assert (trial.folder / "run.log").read_text().count("its rollout fails") == 1
    trial.saved_step()
    if code:
        return
    rollouts = json.loads((trial.folder / "summary.json").read_text())["rollouts"]
    assert 0.2 < rollouts["failed_share"] < 0.9
    assert "7 is locked" in rollouts["causes"][0]


def test_a_tool_outage_trains_nothing_and_the_run_resumes_after_the_repair(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although the tool blames the policy, by a 404. Trees in flight are rolled out again, too."""
    numbers, is_mended = count(1), False

    async def call(self: FunctionTool, arguments: dict[str, Any], state: Any) -> ToolResult:
        if (number := next(numbers)) > 40 and not is_mended:
            raise status_error(404, f"request {number}: the token is revoked", what="GET host")
        return ToolResult("7")

    monkeypatch.setattr(FunctionTool, "call", call)
    keys = [f"algorithm.{key}=8" for key in ("group_size", "initial_rollouts")]
    assert trial.start(*keys) == 1
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert re.search(r"all \d+ calls of the tool 'stock' failed with one error: requ", line)
    assert "continue with --resume" in line
    step = trial.saved_step()
    assert step < NUM_STEPS
    is_mended = True
    assert trial.resume(*keys) == 0
    assert trial.saved_step() == NUM_STEPS
    for number in range(step + 1, NUM_STEPS + 1):
        stored = trial.folder / "trajectories" / f"step-{number:06d}.jsonl"
        assert "is revoked" not in stored.read_text()


COLD_START = [
    "sft.data={here}/sft.jsonl", "sft.gate={here}/sft.jsonl", "sft.gate_every=2",
    "sft.stages=[{num_steps=4,batch_size=1}]",
]  # fmt: skip

# Before the updates, and the checkpoint of that moment.
COLD_POINTS = {
    "Init 1": "",
    "before_sft": "",
    "Imitate 3": "sft-000003",
    "ScoreSequences 1": "",  # the parity of the start
    "ScoreSequences 2": "sft-000004",  # its gate
    "ResetOptimizer 2": "step-000000",  # its end
    "after_sft": "step-000000",
}


def cold_keys(here: Path) -> list[str]:
    turns = [{"action": "<stock>nuts</stock>", "result": "310"}, {"action": "<answer>310</answer>"}]
    rows = [{"question": "How many nuts are there?", "turns": turns}]
    (here / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [text.replace("{here}", str(here)) for text in COLD_START]


@pytest.mark.parametrize(
    ("point", "number"), [*((point, 1) for point in COLD_POINTS), ("Imitate 3", 2)]
)
def test_a_cold_start_resumes_where_a_signal_interrupted_it(
    trial: Trial, point: str, number: int
) -> None:
    keys, folder = cold_keys(trial.config.parent), trial.folder
    with pytest.MonkeyPatch.context() as patch:
        signals = Signals(point, number, patch)
        assert trial.start(*keys) == 130
    assert signals.sent
    kept = sorted(path.name for path in folder.glob("checkpoints/*"))
    assert kept == [COLD_POINTS[point]] if COLD_POINTS[point] else not kept
    if kept:
        count = json.loads((folder / "checkpoints" / kept[0] / COUNT).read_text())
        assert count["imitations"] == (int(kept[0][4:]) if kept[0][0:3] == "sft" else 4)
    rows = folder / "eval" / f"{point}.partial" / "rows.jsonl"
    stored = rows.read_text() if rows.exists() else ""
    assert (trial.resume if folder.exists() else trial.start)(*keys) == 0
    assert trial.saved_step() == NUM_STEPS
    last = folder / "checkpoints" / f"step-{NUM_STEPS:06d}"
    assert json.loads((last / COUNT).read_text())["imitations"] == 4, "none is taken twice"
    if stored:
        assert (folder / "eval" / point / "rows.jsonl").read_text().startswith(stored)


def test_a_cold_start_reports_its_loss_and_its_checkpoint_is_kept_for_other_algorithms(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold_start, "REPORT_EVERY_S", 0.0)
    often = ["checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.minutes=1e-6"]
    assert trial.start(*cold_keys(trial.config.parent), *often) == 0
    told = capsys.readouterr().out
    assert all(f"step {step}, stage" in told for step in (1, 3))
    folder = trial.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000", "step-000004"]
    other = Trial(trial.config, trial.folder.with_name("from-cold"))
    assert other.start(f"model.path={folder}/step-000000") == 0


def test_a_late_evaluation_is_a_gap_in_the_curve(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = ScriptedEngine.generate

    async def generating(engine: ScriptedEngine, *args: Any, **kwargs: Any) -> Any:
        session = kwargs["session"]
        if engine.policy_version == 2 and not (session.isdigit() or session.startswith("probe")):
            await asyncio.sleep(3600)
        return await generate(engine, *args, **kwargs)

    monkeypatch.setattr(ScriptedEngine, "generate", generating)
    monkeypatch.setattr(start_checks, "contradictions", lambda config: ())  # for a short test
    assert trial.start("eval.timeout_s=1") == 0
    log = (trial.folder / "run.log").read_text()
    assert "evaluation step-000002" in log
    assert "eval.timeout_s" in log
    evaluated = [row["phase"] for row in trial.rows() if "eval/a/success" in row]
    assert sorted(evaluated) == ["after_rl", "before_sft", "step-000004"]


# Slow parts start in parallel to the checks before them.


def test_learner_and_engine_start_during_the_checks(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a new run, whose imports take seconds; the ranks of a resumed run load weights,
    too."""
    renderers, commands = TrainingAssembly.renderers, list[str]()
    is_there: Callable[[], object] = lambda: ToyRank.alive  # noqa: E731

    async def waiting(self: TrainingAssembly) -> Any:
        await until(is_there)
        return await renderers(self)

    monkeypatch.setattr(ToyRank, "at", staticmethod(commands.append))
    monkeypatch.setattr(TrainingAssembly, "renderers", waiting)
    assert trial.start("train.num_steps=1") == 0
    commands.clear()
    is_there = lambda: "Load" in commands  # noqa: E731
    trial.assert_resumes()


@pytest.mark.parametrize("is_slow", [False, True], ids=["started", "starting"])
def test_a_run_refused_during_the_start_leaves_no_folder_or_process(
    trial: Trial, is_slow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start, began = ToyRank.start, []

    async def starting(self: ToyRank, timeout_s: float) -> None:
        self.log_path.write_text("it imports\n")
        began.append(self)
        try:
            await asyncio.sleep(3600 if is_slow else 0)
            await start(self, timeout_s)
        except BaseException:
            await self.close()
            raise

    async def refused(self: TrainingAssembly) -> Any:
        await until(lambda: began if is_slow else ToyRank.alive)
        raise DataError("row 3: no question")

    monkeypatch.setattr(ToyRank, "start", starting)
    monkeypatch.setattr(TrainingAssembly, "renderers", refused)
    assert trial.start() == 2
    assert "3: no question" in capsys.readouterr().err
    assert not ToyRank.alive
    assert not trial.folder.exists()


def test_a_learner_that_fails_to_start_is_reported_once(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[float] = []

    async def failing(self: ToyRank, timeout_s: float) -> None:
        tries.append(timeout_s)
        raise LearnerError("the learner ended with exit code 1")

    monkeypatch.setattr(ToyRank, "start", failing)
    assert trial.start() == 1
    assert capsys.readouterr().err.count("exit code 1") == 1
    assert len(tries) == 1
