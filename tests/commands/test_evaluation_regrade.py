"""Regrade as a command over stored evaluations."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv import Task, ToolEnv, register
from agentenv.assembly.keys.benchmarks import BENCHMARKS
from agentenv.assembly.keys.benchmarks import ENV_ID as DEEP_SEARCH
from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.base.config import build_config, to_plain, values_in
from agentenv.base.errors import ConfigError
from agentenv.envs.grading.keys import GraderConfig, grader_config
from agentenv.envs.grading.reward import ExactMatch
from agentenv.evaluation.regrade import regraded_config
from agentenv.evaluation.store import Saved, Store, load_saved, lock, read_rows
from agentenv.launchers import evaluate
from tests.support.openai_endpoint import Json, ScriptedEndpoint, reply
from tests.support.stored_evaluation import QUICK, mixed_rows, rows_of, write_evaluation


def test_another_grader_flips_verdicts_and_lists_them(tmp_path, capsys):
    answers = {"1": ["World War I"], "2": ["WWII"], "3": ["World War II"]}
    folder = write_evaluation(tmp_path / "e", rows_of(answers, "World War II"), QUICK)
    assert evaluate.main(["regrade", str(folder)]) == 0
    before = (folder / "rows.jsonl").read_bytes()
    capsys.readouterr()
    assert evaluate.main(["regrade", str(folder), "grader.kind=exact"]) == 0
    said = capsys.readouterr().out
    assert "1 of 3" in said
    assert "qa/2/0" in said
    assert [row.success for row in read_rows(folder)] == [False, False, True]
    assert (folder / "rows.before.jsonl").read_bytes() == before
    saved = json.loads((folder / "config.json").read_text())["config"]
    assert saved["sets"]["qa"]["grader"]["kind"] == "exact"
    assert "qa/2/0" in (folder / "regrade.md").read_text()


def test_the_published_reward_is_graded_with_its_tools(tmp_path):
    rows = rows_of({"1": ["Paris"], "2": ["Paris"], "3": ["Rome"], "4": ["Paris"]})
    rows[1].tool_calls[1]["ok"] = False
    rows[3].segments[-1]["policy"] = "Paris"  # no tags
    folder = write_evaluation(tmp_path / "e", rows, {**QUICK, "reward": "tools"})
    assert evaluate.main(["regrade", str(folder)]) == 0
    assert [row.reward for row in read_rows(folder)] == [1.1, 1.0, 0.0, -1.0]


def test_one_set_may_have_its_own_grader(tmp_path):
    rows = rows_of({"1": ["WWII"]}, "World War II", dataset="a")
    rows += rows_of({"1": ["WWII"]}, "World War II", dataset="b")
    folder = write_evaluation(tmp_path / "e", rows, QUICK)
    assert evaluate.main(["regrade", str(folder), "sets.b.grader.kind=exact"]) == 0
    assert [row.success for row in read_rows(folder)] == [True, False]


def test_only_trajectories_that_failed_in_the_grader_are_regraded(tmp_path, said):
    rows = rows_of({"1": ["Paris"], "2": ["Paris"]})
    error = "GraderError: the judge is down"
    rows[0] = msgspec.structs.replace(rows[0], end="failed", error=error, success=False)
    rows[1] = msgspec.structs.replace(rows[1], end="failed", error="EngineError: x", success=False)
    folder = write_evaluation(tmp_path / "e", rows, QUICK)
    assert "1 of 2" in said(evaluate.main, "regrade", folder)
    found = read_rows(folder)
    assert [(row.end, row.success) for row in found] == [("terminated", True), ("failed", False)]


GRADER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "Rome" in solution_str:
        raise ValueError("no verdict")
    return 0.5 if ground_truth in solution_str else 0.0
"""


def test_rows_that_a_grader_cannot_grade_are_failed_not_wrong(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(GRADER)
    folder = write_evaluation(tmp_path / "e", rows_of({"1": ["Paris"], "2": ["Rome"]}), QUICK)
    keys = ["grader.kind=custom", f"grader.path={path}", "grader.success_at=0.5"]
    assert evaluate.main(["regrade", str(folder), *keys]) == 0
    first, second = read_rows(folder)
    assert (first.reward, first.success) == (0.5, True)
    assert second.end == "failed"
    assert "no verdict" in (second.error or "")
    capsys.readouterr()


def test_a_regrade_without_any_grade_changes_nothing(tmp_path, said):
    path = tmp_path / "mine.py"
    path.write_text(GRADER)
    rows = rows_of({str(i): ["Rome"] for i in range(25)})
    folder = write_evaluation(tmp_path / "e", rows, QUICK)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "nothing was changed" in said(
        evaluate.main, "regrade", folder, "grader.kind=custom", f"grader.path={path}", status=1
    )
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    after.pop(".lock")
    assert after == before


def test_regrading_refuses_unused_keys(tmp_path, said):
    folder = write_evaluation(tmp_path / "e", rows_of({"1": ["Paris"]}), QUICK)
    for text, why in (
        ("limits.max_turns=3", "regrading accepts grader.key=value"),
        ("grader", "regrading accepts grader.key=value"),
        ("sets.other.grader.kind=exact", "the sets are ['qa']"),
        ("grader.kidn=exact", "kidn"),
        ("grader.path=/tmp/x.py", "grader.path is only used by kind custom"),
    ):
        assert why in said(evaluate.main, "regrade", folder, text, status=2)


class SelfGradedEnv(ToolEnv):
    """Takes no [grader] table."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[], grader=ExactMatch())


def test_a_grader_that_the_environment_does_not_read_is_refused(tmp_path, said):
    register("test/SelfGraded-v0", f"{__name__}:SelfGradedEnv")
    rows = rows_of({"1": ["Paris"]})
    folder = write_evaluation(tmp_path / "e", rows, env="test/SelfGraded-v0")
    assert "used by test/SelfGraded-v0" in said(
        evaluate.main, "regrade", folder, "grader.kind=exact", status=2
    )


JUDGE = {"url": "http://judge/v1", "model": "m", "when": "always", "cache": "verdicts.db"}
STORED: list[dict[str, Any]] = [
    {}, {"kind": "exact"}, {"kind": "f1", "reward": "tools"}, {"reward": "tools"}, {"math": False},
    {"kind": "layered", "ordered": True, "partial_credit": True},
    {"reward": "tools", "compat": "reference"}, {"judge": JUDGE}, {"kind": "judge", "judge": JUDGE},
    {"path": "g.py", "name": "f", "timeout_s": 2.0, "success_at": 0.5, "solution_str": "sequence"},
    {"own": {"name": "reasoning_gym"}},
    {"combined": {"a": {"kind": "exact", "weight": 0.5}, "b": {"math": False, "decides": True}}},
]  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_regrading_with_the_stored_grader_changes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No key, for every key of every kind; no verdict, with and without tags."""
    for grader in STORED:
        keys = {"sets": {"qa": {"benchmark": name, "path": "q.jsonl"}}, "grader": grader}
        config = to_plain(resolve_sets(keys, "test"))
        table = config["sets"]["qa"]["grader"]
        assert grader_config(build_config(GraderConfig, table, "test")).kind
        same = [f"grader.{key}={json.dumps(value)}" for key, value in values_in(table) if value]
        for overrides in ([], *([one] for one in same), same):
            tree = regraded_config(config, overrides)
            assert to_plain(build_config(EvaluateConfig, tree, "test")) == config, overrides
    rows = rows_of({"1": ["Paris", "Rome"], "2": ["Paris", "Rome"]})
    for row in rows[2:]:
        row.segments[-1]["policy"] = rf"The answer is \boxed{{{row.prediction}}}."
    folder = write_evaluation(tmp_path / "e", rows, {"math": False}, DEEP_SEARCH, name)
    assert evaluate.main(["regrade", str(folder)]) == 0  # their labels become real grades
    before, summary = read_rows(folder), (folder / "summary.json").read_bytes()
    for overrides in ([], ["grader.kind=layered"], ["grader.math=false"]):
        assert evaluate.main(["regrade", str(folder), *overrides]) == 0
        assert "0 of 4" in capsys.readouterr().out
        assert (read_rows(folder), (folder / "summary.json").read_bytes()) == (before, summary)
    assert evaluate.main(["regrade", str(folder), "grader.kind=exact"]) == 0
    assert "rule of" not in capsys.readouterr().out
    assert evaluate.main(["regrade", str(folder), "grader.reward=tools"]) == 0
    told = "the rule of the reward changes, not only the comparison: grader.reward: 'answer'"
    assert told in capsys.readouterr().out.splitlines()[0]
    assert [row.success for row in read_rows(folder)] == [True, False, False, False]


def judged(body: Json, _: int) -> Json:
    """An answer with an "a" in it is right."""
    answer = body["messages"][-1]["content"].splitlines()[3]
    return reply("CORRECT" if "a" in answer else "INCORRECT")


def test_a_judge_is_queried_once_and_its_agreement_with_the_rules_reported(tmp_path, capsys):
    answers = {"1": ["Paris"], "2": ["Lutetia"], "3": ["Rome"], "4": ["paris!"], "5": ["Oslo"]}
    folder = write_evaluation(tmp_path / "e", rows_of(answers), QUICK)
    with ScriptedEndpoint(judged) as endpoint:
        keys = {"url": f"{endpoint.url}/v1", "model": "m", "when": "always",
                "cache": str(tmp_path / "verdicts.db")}  # fmt: skip
        asked = [f"grader.judge.{key}={value}" for key, value in keys.items()]
        asked += ["grader.kind=judge", "grader.math=false"]
        assert evaluate.main(["regrade", str(folder), *asked]) == 0
        assert "agree little" not in capsys.readouterr().err
        num_asked = len(endpoint.requests)
        assert num_asked >= 4
        assert evaluate.main(["regrade", str(folder)]) == 0
        again = [str(body) for body in endpoint.requests[num_asked:]]
    assert not [text for text in again if "Lutetia" in text or "Rome" in text], "from the cache"
    assert [row.success for row in read_rows(folder)] == [True, True, False, True, False]
    found = json.loads((folder / "summary.json").read_text())["overall"]
    assert found["agreement"]["both_right"] == 2
    assert found["agreement"]["only_judge"] == 1
    assert found["agreement"]["both_wrong"] == 2
    assert found["agreement"]["kappa"] == pytest.approx((0.8 - 12 / 25) / (1 - 12 / 25))
    assert found["estimates"]["judge"]["value"] == pytest.approx(0.6)
    assert "Cohen's kappa 0.615" in (folder / "report.md").read_text()


def test_a_running_evaluation_is_not_regraded(tmp_path, capsys):
    folder = write_evaluation(tmp_path / "e", rows_of({"1": ["Paris"]}), QUICK)
    with closing(lock(folder)):
        assert evaluate.main(["regrade", str(folder)]) == 2
    assert "in use" in capsys.readouterr().err


def test_the_writer_of_an_evaluation_is_named_with_a_remedy(tmp_path: Path) -> None:
    for _ in ("first", "after it"):
        with closing(lock(tmp_path)):
            me = rf"in use by process {os.getpid()} on \S+ since .*; wait until"
            with pytest.raises(ConfigError, match=me):
                lock(tmp_path)


@pytest.mark.usefixtures("without_file_locks")
def test_evaluations_are_written_on_file_systems_without_locks(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", rows_of({"1": ["Paris"]}), QUICK)
    Store(tmp_path / "new", saved_with(folder, "exact")).close()


def saved_with(folder: Path, grader: str) -> Saved:
    """The stored configuration of a command with this grader."""
    before = load_saved(folder)
    sets = {name: {"path": f"{name}.jsonl"} for name in before.config["sets"]}
    raw = {"env": {"id": "agentenv/QAGrader-v0"}, "grader": {"kind": grader}, "sets": sets}
    config = to_plain(resolve_sets(raw, "test"))
    return Saved(subject=before.subject, run=before.run, config=config)


def test_a_command_with_the_new_grader_continues_the_evaluation(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", mixed_rows(4, 1), {"kind": "layered"})
    Store(folder, saved_with(folder, "layered")).close()
    assert evaluate.main(["regrade", str(folder), "grader.kind=exact"]) == 0
    Store(folder, saved_with(folder, "exact")).close()
    with pytest.raises(ConfigError, match="different configuration"):
        Store(folder, saved_with(folder, "layered"))
