"""Typing mistakes of a newcomer, and the replies to the first evaluation of the quick start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentenv import Message, Task
from agentenv.contract.env import close_shared
from agentenv.envs.quickstart.world import QuickstartEnv
from agentenv.evaluation.report import MAX_UNREADABLE_SHARE
from agentenv.evaluation.subject import of_env
from agentenv.launchers import evaluate, train
from tests.support.golden import Golden
from tests.support.stored_evaluation import row, write_evaluation
from tests.support.warehouse import ROOT


def test_the_configuration_of_the_readme_is_enough(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (mine,) = (block for block in blocks if "me/Warehouse-v0" in block)
    folder = warehouse.parent
    (tmp_path / "mine.toml").write_text(mine)
    more = [f"data.train={folder}/train.jsonl", f"eval.sets.heldout.path={folder}/a.jsonl"]
    more += [f"model.path={folder}/model", "limits.max_prompt_tokens=256"]
    more += ["limits.max_response_tokens=512", "limits.max_turn_tokens=256"]
    assert train.main([str(tmp_path / "mine.toml"), *more, "--dry-run"]) == 0
    assert "data: read 24" in capsys.readouterr().out


FILES = [
    "[sets.a]\npath = 'x.jsonl'\nlimits = { max_turn = 1 }",
    "[sets.a]\nbenchmark = 'gsm9k'",
    "[sets.a]\nnum_samples = 2",
    "data = 'x'\n[sets.a]\npath = 'x'",
    "data = 'x.jsonl'\n[sets.x]\npath = 'y'",
    "temperature = 0.5",
    "num_samples = 1",
]
ASSIST = [
    "assist.debugger={url='http://127.0.0.1:9',tool='stock'}",
    "assist.refiner={url='http://127.0.0.1:9',min_response_tokens=600}",
    "assist.refiner={url='{role:refiner}/v1',min_response_tokens=100}",
    "roles.refiner.url=http://h",
    "assist.browser.url=x",
]


@pytest.mark.golden("evaluate")
def test_mistakes_in_an_evaluation(
    warehouse: Path, finished: Path, tmp_path: Path, golden: Golden
) -> None:
    """Of a folder or model that is none, of a run without a checkpoint, of a number."""
    golden.run(evaluate, tmp_path / "nothing", status=2)
    a_model = ["--env", "agentenv/QAGrader-v0", "data=q.jsonl"]
    golden.run(evaluate, tmp_path, *a_model, status=2)
    assert "--n -1" in golden.run(evaluate, tmp_path, *a_model, "--n", -1, status=2)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    golden.run(evaluate, run, status=2)
    (run / "config.json").write_bytes((finished / "config.json").read_bytes())
    for named in (run, run / "checkpoints"):
        assert "--checkpoint start" in golden.run(evaluate, named, status=2)
    for command in ("report", "regrade"):
        golden.run(evaluate, command, run, status=2)
    golden.run(evaluate, finished / "checkpoints" / "step-000099", status=2)
    base = [warehouse.parent / "model", "--env", "me/Warehouse-v0", "env.module=my_env"]
    out = str(tmp_path / "out")
    for number, text in enumerate(FILES):
        file = tmp_path / f"eval-{number}.toml"
        file.write_text(text)
        golden.run(evaluate, *base, "--out", out, "--config", file, status=2)
    keys = ["limits.max_prompt_tokens=300", "limits.max_response_tokens=600"]
    for key in ASSIST:
        given = [*keys, f"data={warehouse.parent}/a.jsonl", key]
        status = 1 if key == ASSIST[0] else 2  # a server that does not answer may do so later
        golden.run(evaluate, *base, "--out", out, *given, status=status)
    for key in ("set.a.path=x", "sets={}"):  # a misspelled key is reported before no questions
        golden.run(evaluate, *base, "--out", out, key, status=2)
    assert not Path(out).exists()
    assert evaluate.main([str(run), "--checkpoint", "start", "--n", "2", "--out", out]) == 0


def test_environment_keys_of_a_run_are_ignored_for_another_environment() -> None:
    env = {"id": "a/Own-v0", "module": "own", "kwargs": {"corpus": "kb.jsonl"}, "workers": 0}
    run = {"env": env, "seed": 3}
    told: list[str] = []
    assert of_env(run, "", told.append) == of_env(run, "a/Own-v0", told.append) == run
    assert of_env({}, "b/Other-v0", told.append) == {}
    assert not told
    other = {"env": {"id": "a/Own-v0", "module": "own", "workers": 0}, "seed": 3}
    assert of_env(run, "b/Other-v0", told.append) == other
    assert told == ["env.kwargs of the run are ignored: they belong to a/Own-v0, not to b/Other-v0"]


@pytest.mark.parametrize(
    ("keys", "reward"), [(None, 0.0), ({"kind": "layered", "reward": "answer"}, 1.0)]
)
async def test_the_quick_start_can_be_graded_by_another_grader(
    keys: dict[str, str] | None, reward: float, tmp_path: Path
) -> None:
    corpus = tmp_path / "kb.jsonl"
    corpus.write_text(json.dumps({"id": "1", "title": "t", "text": "t"}) + "\n")
    task = Task(id="1", env_id="agentenv/Quickstart-v0", question="?", answers=("World War II",))
    env = QuickstartEnv(task, corpus=str(corpus), allow_unsafe=True, grader=keys)
    await env.reset(seed=0)
    said = r"<think>So.</think><answer>\boxed{WWII}</answer>"
    _, given, terminated, _, _ = await env.step(Message("assistant", said))
    await env.close()
    await close_shared()
    assert terminated
    assert given == reward


@pytest.mark.parametrize(
    ("num_unreadable", "num_read", "share"), [(1, 19, "5.0%"), (2, 19, "9.5%"), (3, 0, "100.0%")]
)
def test_only_a_share_of_unreadable_verdicts_above_the_bound_is_a_warning(
    tmp_path: Path, num_unreadable: int, num_read: int, share: str
) -> None:
    parts = [{"rule": 0.0, "judge_unparsed": 1.0}] * num_unreadable
    parts += [{"rule": 0.0, "judge": 0.0, "judge_unparsed": 0.0}] * num_read
    folder = write_evaluation(
        tmp_path / "e", [row(str(n), success=False, parts=one) for n, one in enumerate(parts)]
    )
    assert evaluate.main(["report", str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert f"{num_unreadable} replies of the judge ({share}) contained no verdict" in text
    is_above = num_unreadable / len(parts) > MAX_UNREADABLE_SHARE
    assert ("unreadable: these scores" in text) is is_above
    assert ("judge.max\\_tokens" in text) is is_above
