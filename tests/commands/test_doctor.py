"""launchers/doctor.py: every check passes without a fault, and one fault fails exactly its check,
with a remedy."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from agentenv.assembly.checks.checks import Check, CheckResult, CheckRunner
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.gpus import PlannedMachine
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.base.types import Completion, Message
from agentenv.contract.env import Grade
from agentenv.envs.sandbox import sandbox as sandboxes
from agentenv.envs.search.keys import SearchConfig
from agentenv.envs.search.providers import WebConfig
from agentenv.lab.diagnosis import doctor as doctors
from agentenv.lab.diagnosis import doctor as machine
from agentenv.lab.diagnosis.contract import refuse_lost_call, respelled
from agentenv.lab.diagnosis.doctor import CHECKS, examine
from agentenv.launchers import doctor
from agentenv.learners.ranks import model_check
from agentenv.text.renderer import TagRenderer, TextCodec
from tests.commands.test_checks import found
from tests.support.toy import CharTokenizer


def failed(results: Sequence[CheckResult]) -> list[str]:
    return [one.name for one in results if one.state == "failed"]


# The machine.


def run_checks(of: Any, *names: str) -> list[CheckResult]:
    async def look() -> list[CheckResult]:
        runner = CheckRunner()
        return [await runner.run(check, of) for check in CHECKS if check.name in names]

    return asyncio.run(look())


def test_the_doctor_refuses_an_evaluation_and_names_the_command_that_checks_it() -> None:
    path = Path(__file__).parents[2] / "configs" / "eval_reasoning.toml"

    async def look() -> list[CheckResult]:
        found = examine(path, [], is_offline=True, is_quick=True, report=print)
        return [one async for one in found if one.name == "configuration"]

    (result,) = asyncio.run(look())
    assert result.state == "failed"
    assert "agentenv evaluate" in result.message
    assert "--dry-run" in result.remedy


LIGHT = ("versions", "free memory", "free disk", "descriptors")


def test_this_machine_passes_every_check(tmp_path: Path) -> None:
    results = run_checks(tmp_path, *LIGHT)
    assert [one.name for one in results] == list(LIGHT)
    assert failed(results) == []


class _Memory(NamedTuple):
    available: float
    total: float


class _Disk(NamedTuple):
    free: float


@pytest.mark.parametrize(
    ("source", "value", "name", "remedy"),
    [
        ("importlib.metadata.requires", ["torch>=99; extra == 'train'"], "versions", "pip install"),
        ("importlib.metadata.requires", ["none; extra == 'train'"], "versions", "pip install"),
        ("psutil.virtual_memory", _Memory(1e6, 1e9), "free memory", "end other"),
        ("shutil.disk_usage", _Disk(1e6), "free disk", "run.dir"),
        ("agentenv.lab.diagnosis.doctor.allowed_files", 100, "descriptors", "ulimit"),
    ],
)
def test_a_fault_of_the_machine_fails_exactly_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, value: Any, name: str, remedy: str
) -> None:
    monkeypatch.setattr(source, lambda *_: value)
    results = run_checks(tmp_path, *LIGHT)
    assert failed(results) == [name]
    (found,) = [one for one in results if one.state == "failed"]
    assert remedy in found.remedy


def test_an_escape_from_every_rung_of_the_sandbox_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def escape(zygote: object) -> str:
        return "read a file of the host"

    monkeypatch.setattr(sandboxes, "find_escape", escape)
    (found,) = run_checks(tmp_path, "sandbox")
    assert found.state == "failed"
    assert "read a file" in found.message + found.remedy
    assert "bubblewrap" in found.message + found.remedy


def test_a_lower_level_of_the_sandbox_is_named_with_its_reason_and_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no bubblewrap
    (found,) = run_checks(tmp_path, "sandbox")
    assert found.state == "passed"
    assert found.message.startswith("landlock: ")
    assert "sandbox needs bubblewrap" in found.message
    assert "programs as agents" in found.message


# A configuration.


def without_machine(monkeypatch: pytest.MonkeyPatch, *others: Check) -> None:
    """`others` take the place of the checks of the machine."""
    rest = [check for check in CHECKS if check.stage != "machine"]
    monkeypatch.setattr(doctors, "CHECKS", (*others, *rest))


def check_results(
    monkeypatch: pytest.MonkeyPatch, path: Path, *overrides: str, quick: bool = True
) -> dict[str, CheckResult]:
    """The results on a configuration by name, without those on the machine."""
    without_machine(monkeypatch)

    async def look() -> dict[str, CheckResult]:
        found = examine(path, overrides, is_offline=True, is_quick=quick, report=lambda text: None)
        return {one.name: one async for one in found}

    return asyncio.run(look())


EXTRA = (
    "room for rollouts", "room on the disk", "room in memory", "calls come back",
    "special tokens", "packed model", "services", "grader sanity", "log-prob parity",
)  # fmt: skip


def test_for_a_good_configuration_each_check_passes_or_is_skipped_with_a_reason(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check_results(monkeypatch, warehouse)
    assert failed(list(found.values())) == []
    assert set(EXTRA) <= found.keys()
    skipped = {name: one.message for name, one in found.items() if one.state == "skipped"}
    assert {name: why.split()[0] for name, why in skipped.items()} == {
        **dict.fromkeys(("servers", "teacher's server", "services"), "--offline"),
        **dict.fromkeys(("learner", "engine", *EXTRA[-1:]), "--quick"),
    }


async def _no_machine(*_: object) -> str:
    return ""


async def only(name: str, config: Path, folder: Path) -> CheckResult:
    """The result of one check of a training run."""
    checks = [check for check in CHECKS if check.name == name]
    return (await found(config, folder, (), checks))[name]


TINY = PlannedMachine(0, 0.0, 1e6, "tiny")


def _parse_nothing(self: object, completion: Completion, *_: object) -> Message:
    return Message("assistant", "")


@pytest.mark.parametrize(
    ("of", "name", "value", "expected", "remedy"),
    [
        (machine, "allowed_files", lambda: 100, "room for rollouts", "queue.max_rollouts"),
        (shutil, "disk_usage", lambda _: _Disk(1e3), "room on the disk", "keep_last"),
        (machine, "find_machine", lambda *_: TINY, "room in memory", "--gpus"),
        (TagRenderer, "parse", _parse_nothing, "calls come back", "renderer.name"),
        (TextCodec, "neutralise", lambda *given: given[1], "special tokens", "report"),
        (model_check, "distance", lambda config: 1.0, "packed model", ""),
    ],
)
async def test_a_fault_of_a_part_fails_its_check(
    warehouse: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: Any,
    name: str,
    value: Any,
    expected: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(of, name, value)
    result = await only(expected, warehouse, tmp_path)
    assert result.state == "failed"
    assert remedy in result.message + result.remedy


class Grades:
    """A grader that accepts an answer if `right` does for gold and answer."""

    def __init__(self, right: Any) -> None:
        self.right = right

    async def grade(self, task: Any, written: Sequence[Message], calls: Any) -> Grade:
        said = written[-1].content.partition("<answer>")[2].partition("</answer>")[0]
        said = said.removeprefix("\\boxed{").removesuffix("}")
        good = bool(self.right(task.answers[0], said))
        return Grade(reward=float(good), success=good)


@pytest.mark.parametrize(
    ("right", "problem"),
    [
        (lambda gold, said: False, "grades its own gold"),
        (lambda gold, said: True, "the gold answer of row"),
        (lambda gold, said: gold == said, "written as"),
        (lambda gold, said: gold in said, "name a second candidate"),
        (lambda gold, said: said.startswith(gold), "name a second candidate"),  # spelled too
        (lambda gold, said: gold == said.strip(" ."), ""),
    ],
)
async def test_a_grader_that_confuses_right_and_wrong_answers_is_found(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: Any, problem: str
) -> None:
    import my_env  # type: ignore[import-not-found]

    monkeypatch.setattr(my_env, "ExactMatch", lambda: Grades(right))
    result = await only("grader sanity", warehouse, tmp_path)
    assert result.state == ("failed" if problem else "passed")
    assert problem in result.message


def test_an_answer_is_reformatted_in_common_spellings() -> None:
    assert respelled("Lima") == ["  Lima ", "Lima.", "LIMA"]
    assert respelled("42") == ["  42 ", "42."]
    assert respelled(r"\frac{1}{2}") == ["  \\frac{1}{2} ", "\\frac{1}{2}."]


# Services.


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (WebConfig(provider="serper"), "SERPER_API_KEY"),
        (WebConfig(provider="searxng", url="http://127.0.0.1:9"), "search failed"),
    ],
)
def test_a_search_service_without_a_key_or_a_reply_is_reported(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, backend: WebConfig, problem: str
) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    monkeypatch.setattr("agentenv.lab.diagnosis.contract.SERVICE_S", 0.5)
    config = replace(load_config(TrainConfig, warehouse), search=SearchConfig(backend=backend))
    (found,) = run_checks(SimpleNamespace(config=config), "services")
    assert found.state == "failed"
    assert problem in found.message + found.remedy


# Learner and engine.


@pytest.fixture(scope="module")
def embedded(warehouse: Path) -> Iterator[dict[str, CheckResult]]:
    """The results with learner and embedded engine started, of which no gap is small enough."""
    gaps = ("train.max_logprob_gap=1e-15", "train.stop_logprob_gap=1e-15")
    with pytest.MonkeyPatch.context() as patch:
        yield check_results(patch, warehouse, "engine.name=embedded", *gaps, quick=False)


@pytest.mark.usefixtures("here")
def test_with_learner_and_engine_the_logprob_gap_is_measured_and_checked(
    embedded: dict[str, CheckResult],
) -> None:
    assert failed(list(embedded.values())) == ["log-prob parity"]
    assert "train.stop_logprob_gap" in embedded["log-prob parity"].message
    assert (embedded["learner"].state, embedded["engine"].state) == ("passed", "passed")


# The command.


def test_results_are_reported_as_json_and_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wrong(of: object) -> str:
        raise ConfigError("it is broken; mend it")

    given = {"good": _no_machine, "bad": wrong, "after it": wrong}
    checks = [Check(name, "machine", (), look) for name, look in given.items()]
    without_machine(monkeypatch, *checks)
    assert doctor.main(["--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in told] == ["passed", "failed", "skipped"]
    assert (told[1]["message"], told[1]["remedy"]) == ("it is broken", "mend it")
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "remedy: mend it" in said
    assert "requires 'bad', which" in said
    without_machine(monkeypatch, *checks[:1])
    assert doctor.main([]) == 0


def test_keys_without_a_configuration_and_missing_files_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_machine(monkeypatch)
    assert doctor.main(["limits.max_turns=3"]) == 2
    assert "--config" in capsys.readouterr().err
    assert doctor.main(["--config", "nowhere.toml"]) == 1
    assert "such configuration file" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("types", [("integer", "integer"), ("string", "array"), ("object",)])
def test_a_call_with_an_object_as_arguments_survives_the_round_trip(types: tuple[str, ...]) -> None:
    properties = {f"p{number}": {"type": kind} for number, kind in enumerate(types)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    schema = {"name": "mul", "description": "Multiply.", "parameters": parameters}
    refuse_lost_call(TagRenderer(CharTokenizer()), [], [schema], schema)
