"""--help shows the essential keys and --help-keys every key, once."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.help import describe, essential_keys
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.launchers import dpo, serve, sft, train
from tests.support.snippets import run_python
from tests.test_imports import COMMANDS


def printed(
    capsys: pytest.CaptureFixture[str], *arguments: str, main: Any = train.main, status: int = 0
) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    captured = capsys.readouterr()
    assert (exit_.value.code or 0) == status, captured.err
    return captured.out + captured.err


@pytest.mark.parametrize("main", [train.main, sft.main, dpo.main, serve.main])
def test_help_fits_on_a_screen_or_two(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["roles.toml"] if main is serve.main else []
    text = printed(capsys, *given, "--help", main=main)
    assert len(text.splitlines()) < 120
    assert "--help-keys" in text
    assert "--dry-run" in text


def test_help_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    for table in TrainConfig.__struct_fields__:
        assert f"\n  {table} " in text
    assert "embedded, scripted, vllm" in text


def test_help_shows_the_essential_keys_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [entry.name for entry in essential_keys(TrainConfig)]
    assert 40 <= len(keys) <= 60
    text = printed(capsys, "--help")
    for key in keys:
        assert f"\n    {key} " in text
    for key in ("algorithm.name", "limits.max_turns", "learner.learning_rate", "data.train"):
        assert key in keys
    assert "sft.optimizer.learning_rate" not in keys


def test_help_keys_shows_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help-keys")
    for key in (
        "queue.max_staleness  (int, default '1')",
        "algorithm[aepo].branch_penalty",
        "algorithm[arpo|aepo].beam_size",
        "algorithm.group_size",
        "engine[embedded].device",
        "engine[vllm|sglang].servers.num_servers",
        "sft.stages[n].num_steps",
        "eval.sets.NAME.every",
        "search.summarizer.url",
    ):
        assert f"\n{key}" in text
    for key in describe(TrainConfig):
        assert key.name.rpartition(".")[2] in text


def test_a_table_used_in_several_places_is_shown_once_and_in_full_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--help-keys")
    assert "\nsampling.eval  (table)\n    the keys of sampling.train\n" in text
    assert "env.variants.NAME.search.preset" not in text
    assert "sampling.eval.temperature" in printed(capsys, "--help-keys", "sampling.eval")


def test_no_key_is_shown_twice_with_one_default() -> None:
    shown = [(key.shown, key.default) for key in describe(TrainConfig)]
    assert len(shown) == len(set(shown))
    assert len({key.name for key in describe(TrainConfig)}) < len(shown)


MOST = 410  # keys of train.py; a key that nothing sets should be a constant next to its code


def test_the_number_of_keys_does_not_grow() -> None:
    """In a separate process: other tests register parts with keys."""
    code = (
        "from agentenv.assembly.keys.help import describe\n"
        "from agentenv.assembly.keys.rl import TrainConfig\n"
        "print(len(describe(TrainConfig, once=True)))"
    )
    assert int(run_python(code).stdout) <= MOST


@pytest.mark.parametrize(
    ("prefix", "there", "absent"),
    [
        ("learner.lora", "learner.lora.r", "learner.dtype"),
        ("algorithm.gspo", "algorithm[gspo].clip_low", "beam_size"),
        ("algorithm[gspo]", "algorithm.group_size", "beam_size"),
        ("engine", "engine[embedded].device", "learner"),
        ("run.seed", "run.seed", "run.dir"),
        ("learner.learning", "learner.learning_rate", "muon_learning_rate"),
    ],
)
def test_a_prefix_selects_keys(
    prefix: str, there: str, absent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "--help-keys", prefix)
    assert text.startswith(there) or f"\n{there}" in text
    assert f"\n{absent}" not in text
    assert f".{absent}" not in text


@pytest.mark.parametrize(
    ("prefix", "near"), [("learnr", "learner"), ("algorithm.arp", "algorithm.arpo")]
)
def test_an_unknown_prefix_names_the_nearest(
    prefix: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f" {near}?" in printed(capsys, "--help-keys", prefix, status=2)


@pytest.mark.parametrize("name", COMMANDS.split(", "))
def test_every_command_has_the_same_form_of_usage(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, main = name.rpartition(".")[2], importlib.import_module(name).main
    text = printed(capsys, "--help", main=main)
    usage = text.partition("\n\n")[0]
    assert usage.startswith(f"usage: agentenv {command.replace('_', '-')}")
    if command in ("train", "evaluate", "sft", "dpo", "synthesize", "serve", "retriever"):
        assert re.search(r"(CONFIG|SUBJECT)\]? \[key.sub=value \.\.\.\]", usage)
    assert ("--resume" in text) == (command in ("train", "sft", "dpo"))


def test_keys_of_a_class_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named on the command line, or in the prefix."""
    text = """
from agentenv.learners.algorithms.algorithm import Grouped

class Bounded(Grouped, frozen=True):
    bound: float = 2.0
"""
    (tmp_path / "own_keys.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for arguments in (
        ["x.toml", "algorithm.name=own_keys:Bounded", "--help-keys", "algorithm.bound"],
        ["--help-keys", "algorithm.own_keys:Bounded"],
    ):
        assert "default '2.0'" in printed(capsys, *arguments)
    told = printed(capsys, "--help-keys", "algorithm.own_key:Bounded", status=2)
    assert "own_key:Bounded cannot be" in told
