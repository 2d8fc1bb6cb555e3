"""Weights by broadcast over NCCL into vLLM's own receiver: `python -m pytest tests/gpu -m gpu`.

Skipped without two GPUs (NCCL refuses a rank more on a GPU that has one), and without an
interpreter with vLLM for GPUs, which AGENTENV_VLLM_PYTHON names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentenv.engines.vllm import VLLMServer
from agentenv.learners.keys import LearnerConfig
from tests.engines.broadcast_checks import Breaking, bench, check_failure, check_updates
from tests.engines.reference import MAX_LENGTH, VOCAB
from tests.engines.server_process import ServerProcess
from tests.engines.vllm_server import LOGPROBS, SCALE_OUT
from tests.engines.world import World

PYTHON = os.environ.get("AGENTENV_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two GPUs"),
    pytest.mark.skipif(not PYTHON, reason="AGENTENV_VLLM_PYTHON names no interpreter with vLLM"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("tied"), tied=True, num_models=2)


@pytest.fixture(scope="module")
def url(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on the second GPU; the learner takes the first."""
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--model", str(world.paths[0]), "--served-model-name", "policy"]
    command += ["--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--enforce-eager"]
    command += ["--gpu-memory-utilization", "0.2", "--enable-prompt-tokens-details"]
    command += [*SCALE_OUT, *LOGPROBS, "--weight-transfer-config", '{"backend": "nccl"}']
    environment = {
        "CUDA_VISIBLE_DEVICES": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = tmp_path_factory.mktemp("vllm") / "log"
    process = ServerProcess(command, log, environment)
    try:
        process.wait_ready()
        yield process.url
    finally:
        process.kill()


async def test_vllm_receives_packed_updates_over_nccl(
    url: str, world: World, tmp_path: Path
) -> None:
    """Greedy tokens and log-probs are those of transformers after each; after a trainer disappears
    during a transfer, the server loads a directory, then takes broadcasts again."""
    config = LearnerConfig(zero_stage=0, optimizer="muon_adamw", learning_rate=0.02)
    servers = [VLLMServer(url, vocab_size=VOCAB)]
    async with bench(servers, world.paths[1], tmp_path, config) as b:
        await check_updates(b)
        await check_failure(b, Breaking, max_s=120)
