"""A model with experts, as the learner writes and sends it, in a real vLLM server: its loader
expects experts under the names of published models, one tensor each, and packs them for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentenv.base.errors import ConfigError
from agentenv.contract.weights import read_layout
from agentenv.engines.vllm import VLLMServer
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.export import write_model as write_policy
from agentenv.learners.trees.policy import Policy
from tests.engines.broadcast_checks import bench, check_updates
from tests.engines.proxy import changed, proxy
from tests.engines.reference import SIZES, VOCAB, write_model
from tests.engines.vllm_server import EXTENSION, vllm_servers

pytestmark = pytest.mark.engine_vllm
BROADCAST = ("--weight-transfer-config", '{"backend": "agentenv_gloo"}')


def publish(root: Path, seed: int) -> Path:
    """Two layers of four experts, of which a token uses two, as a learner's rank writes them."""
    source, published = root / f"source-{seed}", root / f"v{seed}"
    write_model(source, seed)  # for the tokenizer
    torch.manual_seed(seed)
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**SIZES, **experts, head_dim=64, initializer_range=0.1)
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(source)
    write_policy(RankBackend(Policy(model), LearnerConfig(zero_stage=0)), source, published)
    return published


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("experts")
    return [publish(root, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def url(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    logs = tmp_path_factory.mktemp("vllm")
    with vllm_servers(paths[0], logs, 1, *EXTENSION, *BROADCAST) as (found,):
        yield found


@pytest.mark.parametrize("path", [0, 1], ids=["as started", "from another directory"])
async def test_experts_equal_those_of_the_learner_after_each_update(
    path: int, url: str, paths: list[Path], tmp_path: Path
) -> None:
    """Tokens and log-probs are those of transformers, after a directory and after a broadcast."""
    assert read_layout(paths[path]).has_experts
    async with bench([VLLMServer(url, vocab_size=VOCAB)], paths[path], tmp_path) as b:
        await check_updates(b, num_updates=1)


async def test_experts_without_the_repacking_extension_are_refused(url: str) -> None:
    plain = changed("vllm_config", "parallel_config", "worker_extension_cls", to="")
    async with proxy([url], answers={"/server_info": plain}) as server:
        client = VLLMServer(server.url, vocab_size=VOCAB)
        with pytest.raises(ConfigError, match="--worker-extension-cls"):
            await client.connect(0)
        await client.close()
