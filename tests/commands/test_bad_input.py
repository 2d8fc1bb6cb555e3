"""A user's mistake is refused with its place and a way out, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentenv.launchers import sft, train
from tests.support.golden import Golden
from tests.support.warehouse import ROOT


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.replace("\n", " ")


CONFIGURATIONS = [
    "queue.max_stalenes=2",
    "algorithm.name=arop",
    "algorithm.name=apro",
    "algorithm.nam=grpo",
    "algorithm.budget_beta=2",
    "cluster.workers=2",
    "nothing.at.all=1",
    "env.tools=[{name=5}]",
    "engine={name='vllm', urls=['127.0.0.1:9']}",
    "grader.own={name='nowhere'}",
    "cluster.wrkrs=2",
    "train.num_steps=many",
    "engine.max_num_seqs=4",
    "queue.groups_per_step=many",
    "queue.groups_per_step=0",
    "queue.groups_per_step=3",
    "learner={}",
    "train.num_epochs=1.0",
    "sampling.train.top_p=0.9",
    "data.train=/nowhere/x.jsonl",
    "model.path=/nowhere",
    "env.module=nowhere",
    "env.module=my_evn",
    "env.module=agentenv.evns",
    "env.kwargs={size=3}",
    "env={id='agentenv/Quickstart-v0', kwargs={corpsu='kb.jsonl'}}",
    "env={id='agentenv/Quickstart-v0'}",
    "limits.max_response_tokens=100000",
    "data.prefix_starts={low=0.9}",
    "checkpoint.best_metric=dev/reward",
    "train.stop_at=0.9",
    "run.setup=nowhere:prepare",
    "run.dir=/dev/null/runs",
    "renderer.name=native",
    "renderer.style=hermes",
    "prompt.template=serch",
    "env.tools=[{name='stok'}]",
    "limits.on_limit=stop",
    "nonsense",
]

A_GRADER = """
from agentenv import ToolEnv
from agentenv import Grade
class Lenient:
    {grade}
class Mine(ToolEnv):
    def __init__(self, task):
        super().__init__(task, tools=[], grader=Lenient())
"""
MODULES = {  # of environments
    "number": A_GRADER.format(grade="async def grade(self, *_): return 1.0"),
    "text": A_GRADER.format(grade="async def grade(self, *_): return Grade('1', True)"),
    "half": A_GRADER.format(grade="async def grade(self, *_): return Grade(1.0)"),
    "plain": A_GRADER.format(grade="def grade(self, *_): return Grade(1.0, True)"),
    "few": A_GRADER.format(grade="async def grade(self, task): return Grade(1.0, True)"),
    "unparsed": "class Mine(",
    "fails": "\n1 / 0",
    "making": "class Mine:\n  def __init__(self, task):\n    task.metadata['shop']",
}
ROWS = {
    "empty": "",
    "no_question": '{"question": "q", "answer": "a"}\n{"answer": "a"}\n',
    "no_answer": '{"question": "q"}\n',
    "no_json": '{"question": "q", "answer": "a"}\n{"question": "q", "answer":}\n',
}
FILES = ["nowhere.toml", "configs/quikstart.toml", "configs/quickstart", "run.seed=1"]


@pytest.mark.golden("train")
def test_mistakes_in_a_training(
    warehouse: Path, tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names its file, row, line or key, and leaves nothing that blocks the next attempt."""
    for override in CONFIGURATIONS:
        text = golden.run(train, warehouse, "run.name=bad", override, status=2)
        assert re.split(r"[=.{\[]", override)[0] in text, "it names the table"
    for name, rows in ROWS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(rows)
        text = golden.run(train, warehouse, "run.name=bad", f"data.train={path}", status=2)
        assert f"{path}" in text
    for name, source in MODULES.items():
        (warehouse.parent / f"{name}_env.py").write_text(source)
        told = golden.run(train, warehouse, f"env.id={name}_env:Mine", status=2)
        assert golden.run(train, warehouse, f"env.id={name}_env:Mine", "--dry-run", status=2)
        assert f"{name}_env" in told or "train-1" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    golden.run(train, warehouse, f"run.dir={tmp_path}", "run.name=mine", status=2)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "do not touch"
    golden.run(train, warehouse, "run.name=never", "--resume", status=2)
    assert not [*(warehouse.parent / "runs").glob("bad*")]
    monkeypatch.chdir(ROOT)
    for argument in FILES:
        golden.run(train, argument, status=2)


def test_a_mistake_in_the_file_is_not_blamed_on_the_command_line(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(warehouse.read_text() + "\n[cluster]\nknd = 'local'\n")
    told = refused(capsys, train.main([str(path), "run.name=mine", "cluster.kind=local"]))
    assert f"{path}: cluster.knd: unknown" in told  # and not left out for the kind


def test_a_configuration_of_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, sft.main([str(ROOT / "configs" / "quickstart.toml")]))
    assert "key; known: ['checkpoint'" in told
    assert "to another command?" in told
