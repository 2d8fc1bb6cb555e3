"""The list of checks, as a start makes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agentenv import tool
from agentenv.config import load_config
from agentenv.launchers import train
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.diagnosis.doctor import CHECKS
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.run.rundir import RunDirectory
from agentenv.pipelines.setup.assembly import Assembly, once
from agentenv.pipelines.setup.checks import START, Check, CheckResult, Runner, select


async def found(
    warehouse: Path, folder: Path, overrides: Sequence[str] = ()
) -> dict[str, CheckResult]:
    config = load_config(TrainConfig, warehouse, overrides)
    async with AsyncExitStack() as stack:
        run = RunDirectory(folder / "run", resume=False)
        assembly = TrainingAssembly(config, run.path, None, stack, lambda text: None)
        checks = select(START, config, "configuration", "parts")
        return {one.name: one async for one in Runner().run(checks, assembly)}


def failed(results: dict[str, CheckResult]) -> list[str]:
    return [name for name, one in results.items() if one.state == "failed"]


async def test_a_run_that_can_start_passes_each_check_of_training(
    warehouse: Path, tmp_path: Path
) -> None:
    results = await found(warehouse, tmp_path)
    assert [*results] == [check.name for check in START if TrainConfig in check.configs]
    assert {one.state for one in results.values()} == {"passed"}


def test_check_names_are_unique() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


LACKING = """
from agentenv import ToolEnv, register


class LackingEnv(ToolEnv):
    def __init__(self, task):
        import no_such_scales


register("me/Lacking-v0", "lacking_env:LackingEnv")
"""


async def test_dependents_of_a_failed_check_are_skipped_and_an_exception_is_a_failure(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that cannot be created: the doctor continues and prints a summary."""
    (tmp_path / "lacking_env.py").write_text(LACKING)
    monkeypatch.syspath_prepend(tmp_path)
    results = await found(warehouse, tmp_path, ["env.module=lacking_env", "env.id=me/Lacking-v0"])
    assert failed(results) == ["first episodes"]
    for name in ("callable tools", "observations", "graders", "prompts"):
        assert results[name].state == "skipped"
        assert results[name].message == "requires 'first episodes', which failed"

    async def broken(_: object) -> None:
        raise KeyError("no such part")

    (result,) = [
        one async for one in Runner(catches=True).run([Check("a", "parts", (), broken)], None)
    ]
    assert result.state == "failed"
    assert "raised KeyError: 'no such part' (test_checks.py, line" in result.message


@pytest.mark.parametrize(
    ("override", "names", "problem", "remedy"),
    [
        ("learner.groups_per_minibatch=4", ["sizes divide"],
         "does not divide queue.groups_per_step = 2", ""),
        ("limits.max_tree_seconds=1", ["time-outs"], "max_tree_seconds = 1 ends trees before",
         "an outer deadline must be longer than the inner one"),
        ("limits.max_response_tokens=2000", ["context"], "exceed the engine's context",
         "lower them, or choose an engine"),
        ("python={}", ["environments"], "[python]: not used by me/Warehouse-v0",
         "remove the table"),
        ("train={num_epochs=0.01,max_logprob_gap=1}", ["number of updates"],
         "train.num_epochs = 0.01 of 24 questions are less than one step", ""),
    ],
)  # fmt: skip
async def test_each_mistake_fails_exactly_one_check_with_its_remedy(
    warehouse: Path, tmp_path: Path, override: str, names: list[str], problem: str, remedy: str
) -> None:
    results = await found(warehouse, tmp_path, [override])
    assert failed(results) == names
    one = results[names[0]]
    assert problem in one.message
    assert one.remedy.startswith(remedy)


async def test_a_missing_part_fails_the_first_check_and_skips_its_dependents(
    warehouse: Path, tmp_path: Path
) -> None:
    results = await found(warehouse, tmp_path, [f"model.path={tmp_path}/none"])
    assert failed(results) == ["model"]
    assert "is not a model directory" in results["model"].message
    needing = {name: one.message for name, one in results.items() if one.state == "skipped"}
    assert [*needing] == [
        "context",
        "chat template",
        "end of a turn",
        "room for weights",
        "callable tools",
        "prompts",
        "number of updates",
    ]
    assert {*needing.values()} == {"requires 'model', which failed"}


async def test_a_part_is_built_once() -> None:
    class Counting(Assembly[TrainConfig]):
        num_built = 0

        @once
        async def model(self) -> Path:
            self.num_built += 1
            return Path("model")

    async with AsyncExitStack() as stack:
        assembly = Counting(None, Path(), stack, print)  # type: ignore[arg-type]
        assert await assembly.model() == await assembly.model() == Path("model")
        assert assembly.num_built == 1


@tool
def answer(text: str) -> str:
    """A tool whose tag is one of the protocol's own."""
    return text


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_a_tool_that_cannot_be_called_is_refused_with_a_remedy(
    warehouse: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tools = "env.tools=[{name='tests.pipelines.test_checks:answer'}]"
    assert train.main([str(warehouse), tools, f"run.dir={tmp_path}", *more]) == 2
    told = capsys.readouterr().err
    assert "me/Warehouse-v0: the tag protocol cannot call the tool 'answer'" in told
    assert "rename the tool, or choose renderer.name = 'native'" in told


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_template_that_ends_answers_where_no_engine_stops_is_refused(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dry: list[str]
) -> None:
    model = Path(shutil.copytree(warehouse.parent / "model", tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}<|turn|>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    keys = [f"model.path={model}", f"run.dir={tmp_path}/runs"]
    assert train.main([str(warehouse), *keys, *dry]) == 2
    told = capsys.readouterr().err
    assert "the chat template ends an answer with '<|turn|>'" in told
    assert f"set eos_token_id in {model}/generation_config.json" in told
    left = [str(p) for p in (tmp_path / "runs").rglob("*")]
    assert not (tmp_path / "runs").exists(), left
