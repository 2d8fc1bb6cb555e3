"""An evaluation that is killed at any moment, or interrupted, continues and repeats no question."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from agentenv.evaluation.store import read_rows
from tests.commands.evaluating import arguments_of
from tests.support.forks import Command

NUM_KILLS = 4
CONCURRENCY = 3
LATENCY_S = 0.05  # of a turn
SLOW_S = 1.0  # so that a signal comes in time on a busy machine
LOG = "EVALUATE_KILL_LOG"


def logged(prompt: str, rng: random.Random) -> str:
    """Writes down each question that is begun, and answers it in two turns."""
    if "<result>" not in prompt:
        question = prompt.partition("How many ")[2].partition(")")[0] + ")"
        with Path(os.environ[LOG]).open("a") as file:
            file.write(f"How many {question}\n")
        return "<think>look</think><stock>bolts</stock>"
    return f"<answer>{rng.choice([1240, 7])}</answer>"


class Evaluation:
    """The command in a separate process; `begun_questions` returns the questions begun so far."""

    def __init__(self, warehouse: Path, folder: Path, latency_s: float = LATENCY_S) -> None:
        self.out, self.log, self.folder = folder / "out", folder / "log", folder
        self.log.touch()
        self.path = warehouse.parent
        keys = [f"data={self.path}/a.jsonl", "--out", str(self.out), f"concurrency={CONCURRENCY}"]
        keys += [f"engine.latency_s={latency_s}", f"engine.script={__name__}:logged"]
        self.arguments = ["-m", "agentenv.launchers", "evaluate", *arguments_of(warehouse, *keys)]

    def start(self) -> Command:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(LOG, str(self.log))
            return Command(*self.arguments, log=self.folder / "said", path=[self.path])

    def begun_questions(self) -> list[str]:
        return self.log.read_text().splitlines()

    def stored(self) -> set[str]:
        return {row.question for row in read_rows(self.out)}


def test_an_evaluation_killed_at_any_moment_repeats_no_stored_question(
    warehouse: Path, tmp_path: Path
) -> None:
    command, rng = Evaluation(warehouse, tmp_path), random.Random(time.time_ns())
    lines = (warehouse.parent / "a.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    for _ in range(NUM_KILLS):
        begun, kept = len(command.begun_questions()), command.stored()
        with command.start() as process:
            more = rng.randint(1, 6)
            while process.poll() is None and len(command.begun_questions()) < begun + more:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 2.5 * LATENCY_S))
            process.kill()
        assert kept.isdisjoint(command.begun_questions()[begun:]), "what was stored was asked again"
    with (command.out / "rows.jsonl").open("ab") as file:  # as if cut off while writing
        file.write(b'{"dataset":"a","task":"a-1","sam')
    begun, kept = len(command.begun_questions()), command.stored()
    with command.start() as process:
        out = process.read_log()
    assert process.returncode == 0, out
    assert kept.isdisjoint(command.begun_questions()[begun:])
    assert command.stored() == set(questions)
    assert len(read_rows(command.out)) == len(questions)
    assert len((command.out / "rows.jsonl").read_bytes().splitlines()) == len(questions)
    # only questions in flight at the kill were begun again
    assert len(command.begun_questions()) <= len(questions) + NUM_KILLS * CONCURRENCY


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_evaluation_can_be_continued(
    warehouse: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = Evaluation(warehouse, tmp_path, SLOW_S)
    with command.start() as process:
        while process.poll() is None and len(command.begun_questions()) < 6:
            time.sleep(0.005)
        process.send_signal(number)
        out = process.read_log()
    assert process.returncode == 130, out
    assert "same command continues" in out
    assert "Traceback" not in out
    assert 1 <= len(command.stored()) < 24
