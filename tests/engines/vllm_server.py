"""A real vLLM server on the CPU for tests, in the environment that `.ci/engine-vllm` makes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentenv.assembly.serving.server_command import VLLM_PLUGIN
from tests.engines.reference import MAX_LENGTH
from tests.engines.server_process import FORKING, ServerProcess
from tests.support.forkserver import fork_server

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STAMP = ROOT / ".venv-vllm" / ".complete"
NUM_SEQS = 16  # requests that run at once; more of them wait
BLOCK = 32  # tokens of a block of the prefix cache; the CPU's default is 128
ARGUMENTS = (
    "--host", "127.0.0.1", "--served-model-name", "policy", "--dtype", "float32",
    "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(NUM_SEQS), "--block-size", str(BLOCK),
    "--enforce-eager", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill",
)  # fmt: skip
# Options that a client requires.
SCALE_OUT = ("--enable-scale-out",)
LOGPROBS = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")
NO_PLUGIN = {"VLLM_PLUGINS": "agentenv_broadcast"}  # environment of a server without ours
EXTENSION = ("--worker-extension-cls", "agentenv_vllm_cpu.WorkerExtension")
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise a large share of the memory
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([FORKING, str(VLLM_PLUGIN)]),
    "TORCHDYNAMO_DISABLE": "1",  # saves 15 s of compiling at the first request
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no worker process that spins
}
# imported before a server forks: all that one loads until its first request
MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm_models:inspect",  # of tests/support/forking
    # of the machine: asks a dozen programs, for 1.7 CPU seconds
    "vllm.entrypoints.serve.dev.server_info.api_router:_get_system_env_info_cached",
)


def require_vllm() -> None:
    """Skips the test where there is no environment for vLLM."""
    if not STAMP.is_file():
        pytest.skip("no vLLM here: make it with `sh .ci/engine-vllm` (2.5 GB)")


def forking_python() -> Path:
    """The Python of servers that a launcher starts, instead of PYTHON; they are forks too."""
    name = "vllm.entrypoints.openai.api_server"
    return fork_server(str(PYTHON), MODULES, os.environ | ENVIRONMENT).stand_in(name)


class VLLMProcess(ServerProcess):
    """A server in a separate process group, with its log in `log`."""

    modules, stop_s = MODULES, 10.0
    start_s = 300.0  # 15 s on an idle machine, mostly imports in three processes

    def __init__(
        self,
        model_path: Path,
        log: Path,
        arguments: Sequence[str] = (*SCALE_OUT, *LOGPROBS, *EXTENSION),
        environment: dict[str, str] | None = None,
    ) -> None:
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *ARGUMENTS]
        command += ["--model", str(model_path), *arguments]
        super().__init__(command, log, ENVIRONMENT | (environment or {}))

    def engine_pid(self) -> int:
        """The process that samples, a child of the one that serves."""
        (engine,) = self.processes()[0].children()
        return engine.pid


@contextmanager
def vllm_servers(
    model_path: Path, logs: Path, num: int, *arguments: str, **environment: str
) -> Iterator[list[str]]:
    """The URLs of so many servers, which have all that a client requires."""
    require_vllm()
    given = (*SCALE_OUT, *LOGPROBS, *arguments)
    found = [VLLMProcess(model_path, logs / f"{n}.log", given, environment) for n in range(num)]
    try:
        for process in found:
            process.wait_ready()
        yield [process.url for process in found]
    finally:
        for process in found:
            process.kill()
