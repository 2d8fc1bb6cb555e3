"""An evaluation of a training run is one of `launchers/evaluate.py`: the same rows in the same
store, for the same commands."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import make_renderer
from agentenv.assembly.parts.environments import EnvMaker
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import load_tokenizer
from agentenv.base.types import Task
from agentenv.contract.env import Env
from agentenv.data.dataset import load_tasks
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.evaluation.store import load_saved, read_rows
from agentenv.launchers import evaluate
from agentenv.rollout.actor import Actor
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import TagsConfig
from agentenv.training.loop.evaluations import RunEvaluator
from agentenv.training.loop.state import Evaluating
from tests.support.runs import rows_of
from tests.support.warehouse import warehouse_turn


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The finished run, of which a test may change the evaluations."""
    return shutil.copytree(finished, tmp_path / "run")


def test_each_evaluation_has_a_directory_with_its_settings(finished: Path) -> None:
    found = {path.name: load_saved(path) for path in (finished / "eval").iterdir()}
    assert set(found) == {"before_sft", "after_rl", *(f"step-00000{n}" for n in range(1, 5))}
    saved = found["step-000003"]
    logged = [row for row in rows_of(finished) if row.get("phase") == "step-000003"]
    assert {row["step"] for row in logged} == {saved.subject["step"]} == {3}
    assert {row["policy_version"] for row in logged} == {saved.subject["policy_version"]}
    assert saved.config["seed"] == 0
    assert saved.config["sets"]["b"]["num_samples"] == 2
    datasets = Counter(row.dataset for row in read_rows(finished / "eval" / "step-000003"))
    assert datasets == {"a": 3, "b": 48}
    assert sorted(row.get("eval/b/trajectories", 0) for row in logged) == [0, 48]


def test_the_summary_and_the_report_have_the_same_figures(run: Path) -> None:
    assert evaluate.main(["report", str(run / "eval" / "after_rl")]) == 0
    report = json.loads((run / "eval" / "after_rl" / "summary.json").read_text())
    of_run = json.loads((run / "summary.json").read_text())
    overall = report["overall"]
    assert overall["num_trajectories"] == of_run["num_trajectories"]["after_rl"] == 3
    for name in ("success", "reward"):
        value = overall["estimates"][name]["value"]
        assert value == pytest.approx(of_run[name]["after_rl"])
    assert (run / "eval" / "after_rl" / "report.md").is_file()


def test_evaluating_the_run_yields_the_same_trajectories(finished: Path, tmp_path: Path) -> None:
    assert evaluate.main([str(finished), "--n", "3", "--out", str(tmp_path / "again")]) == 0
    again, within = read_rows(tmp_path / "again"), read_rows(finished / "eval" / "after_rl")
    assert [row.segments for row in again] == [row.segments for row in within]
    assert [row.seed for row in again] == [row.seed for row in within]


class Evaluator:
    """Evaluates five questions of the warehouse, one at a time, and counts them."""

    def __init__(self, warehouse: Path, folder: Path) -> None:
        keys = {"path": f"{warehouse.parent}/a.jsonl", "max_tasks": 5}
        overrides = [f"eval.sets.a.{key}={value}" for key, value in keys.items()]
        config = load_config(TrainConfig, warehouse, [*overrides, "eval.concurrency=1"])
        model = Path(config.model.path)
        tokenizer = load_tokenizer(model)
        self.tasks = load_tasks(keys["path"], config.env.id, max_samples=5)
        self.asked: list[str] = []
        self.breaks_at = ""
        make_env = EnvMaker(config, Path)
        engine = ScriptedEngine(ScriptedConfig(), tokenizer, script=warehouse_turn)
        renderer = make_renderer(TagsConfig(), PromptConfig(), tokenizer, model)
        params = config.sampling.eval.params()
        actor = Actor(engine, renderer, self._made(make_env), config.limits, params, "0")
        parts: Any = SimpleNamespace(eval_tasks={"a": self.tasks}, eval_actor=actor)
        run = SimpleNamespace(path=folder)
        recorder: Any = SimpleNamespace(
            config=config, state=None, run=run, view=View(), record_evaluation=self._recorded
        )
        unused: Any = None
        self._evaluator = RunEvaluator(parts, recorder, unused, unused)

    def _made(self, make_env: EnvMaker) -> Callable[[Task], Env]:
        def make(task: Task) -> Env:
            if task.id == self.breaks_at:
                raise ConfigError("killed")
            self.asked.append(task.id)
            return make_env(task)

        return make

    async def evaluate(self, incarnation: int, breaks_at: str = "") -> list[str]:
        """The evaluated questions."""
        self.asked, self.breaks_at = [], breaks_at
        what = Evaluating(4, 4, ["a"], incarnation)
        await self._evaluator._evaluate(what)
        return self.asked

    async def _recorded(self, result: Any, rows: list[Any], step: int, when: str) -> None:
        assert [row.task for row in rows] == [task.id for task in self.tasks]


@pytest.mark.parametrize(("incarnation", "num_asked"), [(1, 2), (2, 5)])
async def test_an_interrupted_evaluation_of_the_same_weights_is_continued(
    warehouse: Path, tmp_path: Path, incarnation: int, num_asked: int
) -> None:
    evaluator = Evaluator(warehouse, tmp_path)
    names = [task.id for task in evaluator.tasks]
    with pytest.raises(ExceptionGroup):
        await evaluator.evaluate(1, breaks_at=names[3])
    partial, folder = (tmp_path / "eval" / f"step-000004{end}" for end in (".partial", ""))
    assert len(read_rows(partial)) == 3
    assert await evaluator.evaluate(incarnation) == names[-num_asked:]
    lines = (folder / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in lines] == names, "none is doubled"
    assert not partial.exists()
    assert load_saved(folder).subject["incarnation"] == incarnation
