"""GPUs are divided between servers and learner before anything starts; colocated they claim the
same ones, and servers are started so that they can."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.keys.cluster import ResourcesConfig
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import Assembly
from agentenv.assembly.serving import server_command
from agentenv.assembly.serving.gpus import GIB, GpuPlan, learner_gpus
from agentenv.assembly.serving.server_command import command, environment
from agentenv.assembly.serving.servers import ServerFactory, ServerProcess
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError
from agentenv.contract.engine import EngineConfig, Served
from agentenv.contract.server_config import ServersConfig
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.sglang import SGLangConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.learners.keys import LearnerConfig
from agentenv.processes.supervisor import ProcessSpec

TWO = LearnerConfig(num_ranks=2)
SERVERS = VLLMConfig(servers=ServersConfig(num_servers=2))
COLOCATED = ResourcesConfig(colocated=True)


def on(*gpus: int) -> VLLMConfig:
    return VLLMConfig(servers=ServersConfig(num_servers=2, gpus=list(gpus)))


def test_the_learner_takes_the_first_gpus_and_leaves_the_rest() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    assert learner_gpus(ResourcesConfig(), on(), TWO, plan) == ["a", "b"]
    assert plan.assign("engine.servers.gpus", [], 2) == ["c", "d"]


def test_gpus_of_both_are_named() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    resources = ResourcesConfig(learner_gpus=[3, 1])
    assert learner_gpus(resources, on(0, 2), TWO, plan) == ["d", "b"]
    assert plan.assign("engine.servers.gpus", [0, 2], 2) == ["a", "c"]


def test_the_learner_avoids_the_gpus_of_the_servers() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    assert learner_gpus(ResourcesConfig(), on(0, 1), TWO, plan) == ["c", "d"]


def test_without_gpus_or_servers_nothing_is_divided() -> None:
    assert learner_gpus(ResourcesConfig(), on(), TWO, GpuPlan([])) == []
    assert learner_gpus(ResourcesConfig(), EmbeddedConfig(), TWO, GpuPlan(["a"])) == []
    running = VLLMConfig(urls=["http://127.0.0.1:1"])
    assert learner_gpus(ResourcesConfig(), running, TWO, GpuPlan(["a"])) == []


def test_external_ranks_get_no_gpus() -> None:
    elsewhere = LearnerConfig(num_ranks=2, launch="external", address="0.0.0.0:29400")
    with pytest.raises(ConfigError, match="are started externally"):
        learner_gpus(ResourcesConfig(learner_gpus=[0]), on(), elsewhere, GpuPlan(["a"]))


AT_ONCE = ResourcesConfig(colocated="at_once")


@pytest.mark.parametrize(
    ("resources", "engine", "visible", "learner", "servers"),
    [
        (COLOCATED, SERVERS, "abcd", "ab", "ab"),
        (ResourcesConfig(colocated=True, learner_gpus=[3, 2]), on(2, 3), "abcd", "dc", "cd"),
        (COLOCATED, on(1, 3), "abcd", "bd", "bd"),  # those named for the servers
        (COLOCATED, EmbeddedConfig(), "", "", ""),
        (AT_ONCE, SERVERS, "abc", "ab", "ab"),
    ],
)
def test_learner_and_servers_get_the_same_gpus(
    resources: ResourcesConfig, engine: EngineConfig, visible: str, learner: str, servers: str
) -> None:
    plan = GpuPlan([*visible])
    assert learner_gpus(resources, engine, TWO, plan) == [*learner]
    named = [] if engine.launched is None else engine.launched.gpus
    assert plan.assign("engine.servers.gpus", named, len(servers), borrows=True) == [*servers]


def test_only_the_engine_shares_the_learners_gpus() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    assert learner_gpus(COLOCATED, SERVERS, TWO, plan) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"resources\.learner_gpus"):
        plan.assign("roles.judge.gpus", [1], 1)
    assert plan.assign("roles.judge.gpus", [], 1) == ["c"]
    assert plan.assign("engine.servers.gpus", [], 3, borrows=True) == ["a", "b", "d"]
    assert (COLOCATED.in_turn, AT_ONCE.in_turn) == (True, False)
    for one in (EmbeddedConfig(), VLLMConfig(urls=["http://127.0.0.1:1"])):
        with pytest.raises(ConfigError, match="'at_once'"):
            learner_gpus(AT_ONCE, one, TWO, GpuPlan(["a", "b"]))


async def test_servers_that_share_a_gpu_get_separate_caches(
    quickstart_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is computed, since no server can measure what is free while others start."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8")
    monkeypatch.setattr(server_command, "memory_of", lambda gpu: {"7": 100 * GIB}[gpu])
    started: list[ProcessSpec] = []
    monkeypatch.setattr(
        ServerProcess, "start", lambda process: asyncio.sleep(0, started.append(process.spec))
    )
    config = ServersConfig(
        num_servers=3, servers_per_gpu=2, gpu_memory_share=0.25, python=sys.executable
    )
    async with AsyncExitStack() as stack:
        factory = ServerFactory(tmp_path, stack, lambda text: None)
        served = Served("vllm", quickstart_model, "policy", trained=True)
        await factory.start(served, config, "engine.servers")
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in started] == ["7", "7", "8"]
    for one in started:
        size = int(one.command[one.command.index("--kv-cache-memory-bytes") + 1])
        assert 22.9 * GIB < size < 23 * GIB  # a quarter, less weights, activations and graphs
    with pytest.raises(ConfigError, match="only vLLM's servers"):
        await factory.start(Served("sglang", quickstart_model, "policy"), config, "engine.servers")


def test_weights_through_the_learners_memory_need_its_gpus() -> None:
    engine = VLLMConfig(servers=ServersConfig(num_servers=2), weights="ipc")
    for how in (True, "at_once"):
        resources = ResourcesConfig(colocated=how)
        assert learner_gpus(resources, engine, TWO, GpuPlan(["a", "b"])) == ["a", "b"]
    with pytest.raises(ConfigError, match=r'engine.weights.*"ipc".*resources.colocated'):
        learner_gpus(ResourcesConfig(), engine, TWO, GpuPlan(["a", "b", "c", "d"]))
    elsewhere = LearnerConfig(num_ranks=2, launch="external", address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="with ranks that"):
        learner_gpus(COLOCATED, engine, elsewhere, GpuPlan(["a", "b"]))
    with pytest.raises(ConfigError, match="is for vLLM"):
        SGLangConfig(weights="ipc")
    with pytest.raises(ConfigError, match="through a directory"):
        VLLMConfig(weights="ipc", lora="adapter")


def test_flags_of_servers_that_sleep_or_take_adapters(quickstart_model: Path) -> None:
    gpu, cpu = {"gpus": ["0"]}, {"on_cpu": True}

    def flags(engine: str, place: dict[str, object], **keys: object) -> list[str]:
        served = Served(engine, quickstart_model, "policy", 512, True, **place, **keys)  # type: ignore[arg-type]
        return command("python", served, ServersConfig())

    assert "--enable-sleep-mode" in flags("vllm", gpu, colocated=True)
    assert "--enable-memory-saver" in flags("sglang", gpu, colocated=True)
    assert "--enable-sleep-mode" not in flags("vllm", gpu, colocated="at_once")
    # On the CPU vLLM refuses the flag, but pauses as if it slept; SGLang would die of the route.
    assert "--enable-sleep-mode" not in flags("vllm", cpu, colocated=True)
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        flags("sglang", cpu, colocated=True)
    for place in (gpu, cpu):
        assert '{"backend": "agentenv_ipc"}' in flags("vllm", place, weights="ipc")
    for rank, known in ((1, "1"), (4, "8"), (16, "16"), (100, "128")):
        found = flags("vllm", gpu, lora_rank=rank)
        assert found[found.index("--max-lora-rank") + 1] == known
    with pytest.raises(ConfigError, match="to rank 512"):
        flags("vllm", gpu, lora_rank=513)
    served = Served("vllm", quickstart_model, "policy", 512, True, gate=Path("/ready"))
    assert environment(served, ServersConfig())["AGENTENV_LEARNER_READY"] == "/ready"
    served = Served("vllm", quickstart_model, "policy", 512, True, lora_rank=4)
    assert environment(served, ServersConfig())["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


async def test_an_adapter_needs_a_learner_that_trains_one() -> None:
    raw = {
        "model": {"path": "m"},
        "env": {"id": "e"},
        "data": {"train": "t"},
        "train": {"num_steps": 1},
        "algorithm": {"name": "grpo"},
        "engine": {"name": "vllm", "lora": "adapter"},
    }
    assembly = Assembly(build_config(TrainConfig, raw, "test"), Path(), AsyncExitStack(), print)
    with pytest.raises(ConfigError, match=r"requires \[learner\.lora\]"):
        await refuse(assembly, "configuration")
    raw["learner"] = {"lora": {"r": 8}, "optimizer": "adamw"}
    assert build_config(TrainConfig, raw, "test").adapter_rank == 8
    with pytest.raises(ConfigError, match="through a directory"):
        VLLMConfig(lora="adapter", weights="broadcast")
    with pytest.raises(ConfigError, match="is for vLLM"):
        SGLangConfig(lora="adapter")
