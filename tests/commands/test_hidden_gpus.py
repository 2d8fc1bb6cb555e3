"""Processes that do not compute on a GPU see none: opening one may take most of its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentenv.assembly.keys.cluster import SpreadCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving import gpus
from agentenv.base.config import load_config
from agentenv.processes.supervisor import Supervisor
from agentenv.processes.worker_group import Hello, WorkerGroup
from tests.support.warehouse import ROOT


def config_of(*keys: str) -> TrainConfig:
    return load_config(TrainConfig, ROOT / "configs" / "quickstart.toml", [*keys])


@pytest.fixture(params=["2,3", None], autouse=True)
def named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES; None: unset, on a machine with two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if request.param is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", request.param)
    devices = [Path("/dev/nvidia0"), Path("/dev/nvidia1"), Path("/dev/nvidiactl")]
    monkeypatch.setattr("agentenv.assembly.serving.gpus.Path.glob", lambda *_: devices)
    return request.param


ENCODER = "search.backend={name='faiss', index='i', corpus='c', encoder='m', device='cuda:0'}"


@pytest.mark.parametrize(
    ("keys", "hides"),
    [
        (("engine.name=vllm",), True),
        (("engine.name=vllm", 'engine.urls=["http://127.0.0.1:1"]'), True),
        (("engine.name=embedded",), False),
        (("engine.name=vllm", ENCODER), False),
    ],
)
def test_a_controller_without_a_model_hides_all_gpus_and_passes_them_on(
    keys: tuple[str, ...], hides: bool, named: str | None
) -> None:
    theirs = named.split(",") if named else ["0", "1"]
    with gpus.gpus_for_others(config_of(*keys)):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if hides else named)
        assert gpus.gpus_of_ranks() == (theirs if hides else [])
        assert not hides or gpus.visible_gpus() == gpus.GpuPlan().visible == theirs
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == named
    assert gpus.gpus_of_ranks() == []


@pytest.mark.parametrize(("keys", "hides"), [((), True), ((ENCODER,), False)])
def test_rollout_workers_see_no_gpus_unless_they_encode(
    keys: tuple[str, ...], hides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("cluster.kind=processes", *keys)
    assert isinstance(config.cluster, SpreadCluster)
    spec = config.cluster.processes()._replace(sees_gpus=gpus.encodes_on_gpu(config))
    started = Supervisor(spec, WorkerGroup(print), Hello("", 0, 0), tmp_path, print)
    monkeypatch.setattr(Supervisor, "address", "here")
    assert ("CUDA_VISIBLE_DEVICES" in started._process(0).env) is hides
