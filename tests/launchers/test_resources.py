"""GPUs are divided between servers and learner before anything starts."""

from __future__ import annotations

import pytest

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.server_config import ServersConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.errors import ConfigError
from launchers.config import ResourcesConfig, divide
from launchers.serving.gpus import GpuPlan
from learners.learner import LearnerConfig

SERVERS = VLLMConfig(servers=ServersConfig(num_servers=2))
TWO = LearnerConfig(num_ranks=2)


def test_the_learner_takes_the_first_and_leaves_the_rest() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    engine, gpus = divide(ResourcesConfig(), SERVERS, TWO, plan)
    assert (engine, gpus) == (SERVERS, ["a", "b"])
    assert plan.assign("engine.servers.gpus", [], 2) == ["c", "d"]


def test_both_are_named() -> None:
    plan = GpuPlan(["a", "b", "c", "d"])
    resources = ResourcesConfig(engine_gpus=[0, 2], learner_gpus=[3, 1])
    engine, gpus = divide(resources, SERVERS, TWO, plan)
    assert engine.servers is not None
    assert (engine.servers.gpus, gpus) == ([0, 2], ["d", "b"])


def test_the_learner_avoids_what_the_servers_name() -> None:
    resources = ResourcesConfig(engine_gpus=[0, 1])
    assert divide(resources, SERVERS, TWO, GpuPlan(["a", "b", "c", "d"]))[1] == ["c", "d"]


def test_without_gpus_or_servers_nothing_is_divided() -> None:
    assert divide(ResourcesConfig(), SERVERS, TWO, GpuPlan([])) == (SERVERS, [])
    embedded = EmbeddedConfig()
    assert divide(ResourcesConfig(), embedded, TWO, GpuPlan(["a"])) == (embedded, [])
    running = VLLMConfig(urls=["http://127.0.0.1:1"])
    assert divide(ResourcesConfig(), running, TWO, GpuPlan(["a"])) == (running, [])


@pytest.mark.parametrize(
    ("resources", "engine", "visible", "text"),
    [
        (ResourcesConfig(engine_gpus=[0]), EmbeddedConfig(), 4, "starts no servers"),
        (ResourcesConfig(learner_gpus=[0, 1]), SERVERS, 0, "no GPU is visible"),
        (ResourcesConfig(engine_gpus=[0, 1], learner_gpus=[1, 2]), SERVERS, 4, "learner's"),
        (ResourcesConfig(learner_gpus=[0]), SERVERS, 4, "2 GPUs are needed, 1 are named"),
        (ResourcesConfig(engine_gpus=[0, 1, 2]), SERVERS, 4, "1 of 4 are left"),
        (
            ResourcesConfig(engine_gpus=[0]),
            VLLMConfig(servers=ServersConfig(gpus=[1])),
            4,
            "only one of resources.engine_gpus and engine.servers.gpus",
        ),
    ],
)
def test_what_cannot_be(
    resources: ResourcesConfig, engine: VLLMConfig | EmbeddedConfig, visible: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        divide(resources, engine, TWO, GpuPlan([str(number) for number in range(visible)]))
