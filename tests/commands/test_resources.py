"""GPUs are divided between servers and learner before anything starts."""

from __future__ import annotations

import pytest

from agentenv.assembly.keys.cluster import ResourcesConfig
from agentenv.assembly.serving.gpus import GpuPlan, learner_gpus
from agentenv.base.errors import ConfigError
from agentenv.contract.server_config import ServersConfig
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.learners.keys import LearnerConfig

TWO = LearnerConfig(num_ranks=2)


def servers(*gpus: int) -> VLLMConfig:
    return VLLMConfig(servers=ServersConfig(num_servers=2, gpus=list(gpus)))


def test_the_learner_takes_the_first_gpus_and_leaves_the_rest() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    assert learner_gpus(ResourcesConfig(), servers(), TWO, plan) == ["a", "b"]
    assert plan.assign("engine.servers.gpus", [], 2) == ["c", "d"]


def test_gpus_of_both_are_named() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    resources = ResourcesConfig(learner_gpus=[3, 1])
    assert learner_gpus(resources, servers(0, 2), TWO, plan) == ["d", "b"]
    assert plan.assign("engine.servers.gpus", [0, 2], 2) == ["a", "c"]


def test_the_learner_avoids_the_gpus_of_the_servers() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    assert learner_gpus(ResourcesConfig(), servers(0, 1), TWO, plan) == ["c", "d"]


def test_without_gpus_or_servers_nothing_is_divided() -> None:
    assert learner_gpus(ResourcesConfig(), servers(), TWO, GpuPlan([])) == []
    assert learner_gpus(ResourcesConfig(), EmbeddedConfig(), TWO, GpuPlan(["a"])) == []
    running = VLLMConfig(urls=["http://127.0.0.1:1"])
    assert learner_gpus(ResourcesConfig(), running, TWO, GpuPlan(["a"])) == []


def test_external_ranks_get_no_gpus() -> None:
    elsewhere = LearnerConfig(num_ranks=2, launch="external", address="0.0.0.0:29400")
    with pytest.raises(ConfigError, match="are started externally"):
        learner_gpus(ResourcesConfig(learner_gpus=[0]), servers(), elsewhere, GpuPlan(["a"]))
