"""Metrics beyond metrics.jsonl: the records of TensorBoard and Weights & Biases, on which a run
does not depend."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.reports import monitors as module
from agentenv.assembly.reports.monitors import (
    Axis,
    MonitorConfig,
    Monitors,
    RolloutMonitorConfig,
    Row,
    WandbConfig,
    wandb_mode,
)
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError
from agentenv.base.installation import install_hint
from tests.commands.wandb_file import history, records
from tests.support.warehouse import ROOT

SAMPLE: Row = {
    "kind": "calc", "question": "6 * 7?", "answers": ["42"],
    "segments": [{"env": "prompt"}, {"policy": "<python>6 * 7</python>"}, {"env": "42"}],
    "reward": 1.0, "success": True, "tool_calls": [{}], "end": "terminated", "limit": None,
}  # fmt: skip
OFFLINE = WandbConfig(project="p", name="shown", tags=["a", "b"], mode="offline")


class Listener:
    """A monitor that keeps its records."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        self.heard.append((axis, metrics))

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        self.heard.append((axis, name, len(rows)))

    def finish(self, exit_code: int) -> None:
        self.heard.append(exit_code)


def test_a_monitor_receives_numbers_in_order_and_the_end(tmp_path: Path) -> None:
    monitors, listener = Monitors(MonitorConfig(), tmp_path, {}), Listener()
    monitors.working["one"] = listener
    monitors.log({"step": 0, "sft/step": 7, "sft/loss": 0.5})
    monitors.log({"step": 1, "reward/mean": 1, "phase": "text"})
    monitors.finish(3)
    heard = [(("sft/step", 7), {"sft/loss": 0.5}), (("step", 1), {"reward/mean": 1.0}), 3]
    assert listener.heard == heard


def test_a_monitor_that_raises_is_disabled_with_a_warning_and_the_others_continue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Listener):
        error = RuntimeError("no such host")

        def log(self, metrics: dict[str, float], axis: Axis) -> None:
            super().log(metrics, axis)
            raise self.error

    monitors, broken, listener = Monitors(MonitorConfig(), tmp_path, {}), Broken(), Listener()
    monitors.working["Elsewhere"] = broken
    monitors.working["one"] = listener
    for step in range(3):
        monitors.log({"step": step, "x": 1})
    with caplog.at_level(logging.WARNING):
        monitors.finish(0)
    assert len(broken.heard) == 1
    assert len(listener.heard) == 4
    (record,) = caplog.records
    assert record.args == ("Elsewhere", "RuntimeError", broken.error)


def test_a_monitor_that_hangs_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "MAX_WAITING", 5)

    class Hanging(Listener):
        def log(self, metrics: dict[str, float], axis: Axis) -> None:
            time.sleep(2)

    monitors = Monitors(MonitorConfig(), tmp_path, {})
    monitors.working["slow"] = Hanging()
    for step in range(20):
        monitors.log({"step": step, "x": 1})
    monitors.finish(0)
    assert "were not delivered" in caplog.text


def test_samples_are_shown_of_evaluations_and_of_every_nth_step(tmp_path: Path) -> None:
    config = RolloutMonitorConfig(num_trajectories=3, trajectories_every=2)
    monitors, listener = Monitors(config, tmp_path, {}), Listener()
    assert monitors.num_wanted("eval-held-after_rl") == 0  # not shown
    monitors.working["one"] = listener
    monitors.log({"step": 1})
    assert (monitors.num_wanted("step-000001"), monitors.num_wanted("eval-held-x")) == (0, 3)
    monitors.log({"step": 2})
    assert monitors.num_wanted("step-000002") == 3
    monitors.trajectories("step-000002", [SAMPLE])
    monitors.trajectories("eval-held-step-000002", [SAMPLE, SAMPLE])
    monitors.finish(0)
    assert listener.heard[2:4] == [(("step", 2), "train", 1), (("step", 2), "held", 2)]


def test_tensorboard_has_scalars_and_samples_and_a_resume_replaces_repeated_steps(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((1, 0.0), (2, 1.0)):
        monitors = Monitors(RolloutMonitorConfig(tensorboard=True), tmp_path, {})
        monitors.log({"step": 0, "sft/step": 100, "sft/loss": value})
        for step in range(first, first + 3):
            monitors.log({"step": step, "reward/mean": value})
        monitors.trajectories("eval-held-x", [SAMPLE])
        monitors.finish(0)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    points = [(point.step, point.value) for point in found.Scalars("reward/mean")]
    assert points == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    text = found.Tensors("trajectories/held/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "<python>6 * 7</python>" in text
    cold = EventAccumulator(str(tmp_path / "tensorboard" / "cold_start"))
    cold.Reload()
    assert [point.step for point in cold.Scalars("sft/loss")][-1] == 100


def test_a_resumed_run_continues_its_id_and_step_axis_in_weights_and_biases(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    for first in (1, 3):
        config = RolloutMonitorConfig(wandb=OFFLINE)
        monitors = Monitors(config, tmp_path, {"run": {"seed": 5}})
        for step in range(first, first + 2):
            monitors.log({"step": step, "reward/mean": step / 10})
        monitors.trajectories("eval-held-x", [SAMPLE])
        monitors.finish(0)
    wandb.teardown()  # its service process outlives a run
    found = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    files = sorted(found, key=lambda path: path.stat().st_mtime)
    assert len(files) == 2
    runs = [r.run for f in files for r in records(f) if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {runs[0].run_id}
    assert (runs[0].project, runs[0].display_name, list(runs[0].tags)) == ("p", "shown", ["a", "b"])
    axes = [r.metric for r in records(files[0]) if r.WhichOneof("record_type") == "metric"]
    assert ("*", "step") in [(axis.glob_name, axis.step_metric) for axis in axes]
    rows = [row for path in files for row in history(path)]
    assert [row["step"] for row in rows if "reward/mean" in row] == ["1", "2", "3", "4"]
    assert [row["_step"] for row in rows] == [str(number) for number in range(6)]
    assert [row["trajectories/held/nrows"] for row in rows if "reward/mean" not in row] == ["1"] * 2


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a user who is not logged in."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "mode"), [("offline", "offline"), ("disabled", "disabled"), ("", "online")]
)
def test_the_mode_of_the_environment_takes_precedence(
    variable: str, mode: str, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode("online") == mode
    if mode != "online":
        WandbConfig().check_login()
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match=r"WANDB_MODE.*'sometimes'"):
        WandbConfig().check_login()


def test_the_api_key_is_never_read_from_a_configuration(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    with pytest.raises(ConfigError, match=r"monitor\.wandb: .*WANDB_API_KEY"):
        MonitorConfig(wandb=WandbConfig())
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert MonitorConfig(wandb=WandbConfig()).wandb is not None
    wandb.teardown()  # else the key stays
    raw = {"monitor": {"wandb": {"api_key": "secret"}}}
    with pytest.raises(ConfigError, match=r"monitor\.wandb\.api_key: unknown key"):
        build_config(TrainConfig, raw, "run.toml")


def test_a_missing_package_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=rf"monitor\.tensorboard.*{re.escape(install_hint('monitor'))}"
    ):
        MonitorConfig(tensorboard=True)


def test_the_dashboard_shows_metrics_that_a_run_sends(finished: Path) -> None:
    sent: set[str] = set()
    for line in (finished / "metrics.jsonl").read_text().splitlines():
        sent |= {f"agentenv_{re.sub(r'[^A-Za-z0-9_]', '_', name)}" for name in json.loads(line)}
    board = json.loads((ROOT / "configs" / "observability" / "dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {re.match(r"\w+", expression)[0] for expression in shown}  # type: ignore[index]
    assert len(names) > 15
    assert names <= sent | {"agentenv_engine_outage_s"}  # of servers
    variable = board["templating"]["list"][1]["query"]
    assert re.findall(r"agentenv_\w+", variable)[0] in sent
