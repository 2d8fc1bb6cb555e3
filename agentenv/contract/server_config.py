"""Settings of engine servers, without their clients so that importing them is cheap."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError
from agentenv.base.ports import check_key
from agentenv.base.retries import Backoff
from agentenv.base.secrets import SECRETS

# Settings of engine servers that a run starts by itself.

VLLM_IPC = "agentenv_ipc"  # our vLLM backend for weights in shared memory of the learner
SGLANG_RESERVED = 2  # tokens of its context length that an SGLang server does not use
# In addition to the policy, which is [engine].
TEACHER = "teacher"  # the role that scores tokens
ROLES = ("summarizer", "judge", "debugger", "refiner", "user", TEACHER)


KEY_ENV = "AGENTENV_SERVER_KEY"  # variable with the key of engine servers that a run starts


def read_key(variable: str, key: str, *, starts: bool = False) -> str:
    """The API key in this environment variable, which `key` of the configuration names; where it
    names none, of servers that this run `starts` a new one, which its processes inherit, else none.
    Raises ConfigError where the variable is not set."""
    found = os.environ.get(variable, "").strip() if variable else ""
    if variable and not found:
        raise ConfigError(f"{key}: {variable} is not set; export it before the start")
    if starts and not variable:
        found = os.environ.setdefault(KEY_ENV, secrets.token_urlsafe(24))
    SECRETS.add(found)
    return found


# of servers that clients ask: `agentenv serve`, `serve-env`, `retriever`
ListenHost = Annotated[str, about("address to listen on; beyond loopback with a key")]
ListenPort = Annotated[int, about("0: any free port", ge=0, le=65535)]
ClientKeyEnv = Annotated[
    str, about("environment variable with the clients' key; empty: none, or new (serve)")
]
# of servers that we ask
ServerKeyEnv = Annotated[
    str, about("environment variable with the server's key; empty: none; never logged")
]
ExtraBody = Annotated[
    dict[str, Any], about("extra keys of each request, e.g. chat_template_kwargs")
]

MAX_SHARE = 0.9  # of a GPU's memory, for servers, besides the CUDA contexts of others


class LaunchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Start settings of one server."""

    gpus: Annotated[
        list[int], about("GPUs by number among the visible ones; empty: free ones in order")
    ] = []
    port: Annotated[
        int, about("port of the first server, the others follow; 0: any free port", ge=0, le=65535)
    ] = 0
    host: Annotated[str, about("address to listen on")] = "127.0.0.1"
    tensor_parallel_size: Annotated[int, about("GPUs that share each layer", ESSENTIAL, ge=1)] = 1
    data_parallel_size: Annotated[int, about("copies of the model behind one server", ge=1)] = 1
    gpu_memory_share: Annotated[
        float, about("share of a GPU's memory for weights and cache", ESSENTIAL, gt=0, le=1)
    ] = 0.9
    max_num_seqs: Annotated[
        int, about("maximum number of running requests; 0: the engine's default", ge=0)
    ] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], about("auto: GPUs if available")] = "auto"
    dtype: Annotated[
        Literal["model", "float32", "bfloat16", "float16"],
        about("dtype of weights and cache; model: that of its config.json"),
    ] = "model"
    quantization: Annotated[str, about("method, by the engine's name for it; empty: none")] = ""
    python: Annotated[
        str,
        about(
            "interpreter of the engine's environment; empty: this one if the engine is "
            "installed in it, else .venv-vllm/bin/python or .venv-sglang/bin/python"
        ),
    ] = ""
    args: Annotated[
        list[str], about("extra arguments for the engine's command line, passed verbatim")
    ] = []
    env: Annotated[dict[str, str], about("extra environment variables of the server")] = {}
    start_timeout_s: Annotated[float, about("deadline for a server to become ready", gt=0)] = 900.0

    # one server, which shares no GPU; keys of the servers of the policy
    num_servers = 1
    servers_per_gpu = 1

    @property
    def gpus_each(self) -> int:
        """GPUs of one server; one that `servers_per_gpu` share."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def num_gpus(self) -> int:
        """GPUs of all servers together."""
        return ceil(self.num_servers * self.gpus_each / self.servers_per_gpu)

    def gpus_of(self, index: int, gpus: Sequence[str]) -> Sequence[str]:
        """The GPUs of one server, among the `num_gpus` of all servers."""
        return gpus[index * self.gpus_each // self.servers_per_gpu :][: self.gpus_each]


class ServersConfig(LaunchConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers of the policy."""

    num_servers: Annotated[int, about("servers to start", ESSENTIAL, ge=1)] = 1
    servers_per_gpu: Annotated[
        int,
        about(
            "vLLM servers that share a GPU, each with its gpu_memory_share; with a "
            "small model the server's single thread is the bottleneck, not the GPU",
            ge=1,
        ),
    ] = 1

    def __post_init__(self) -> None:
        if self.servers_per_gpu == 1:
            return
        if self.gpus_each > 1:
            raise ConfigError(
                "engine.servers.servers_per_gpu: a server that shares a GPU cannot use several; "
                "remove tensor_parallel_size and data_parallel_size, or servers_per_gpu"
            )
        if self.servers_per_gpu * self.gpu_memory_share > 1:
            raise ConfigError(
                f"engine.servers: {self.servers_per_gpu} servers on a GPU (servers_per_gpu) with "
                f"gpu_memory_share = {self.gpu_memory_share:g} exceed its memory; "
                f"lower the share to {MAX_SHARE / self.servers_per_gpu:.2g} or less"
            )


class RoleConfig(LaunchConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model in addition to the policy, for environments and graders: OpenAI routes at
    `{role:NAME}/v1`, model name NAME. The run starts it, or it already runs at `url`."""

    url: Annotated[
        str,
        about(
            "http://HOST:PORT of a running server; empty: start one. NAME is summarizer, judge, "
            "debugger, refiner or user; {role:NAME} in texts of [env], [grader], [search] and "
            "[python] stands for the URL, e.g. grader.judge.url = '{role:judge}/v1'"
        ),
    ] = ""
    model: Annotated[str, about("Hugging Face directory; required to start a server")] = ""
    engine: Annotated[
        Literal["vllm", "sglang", "learner"],
        about("engine that serves it; learner: roles.teacher is a model on the learner's ranks"),
    ] = "vllm"
    max_model_len: Annotated[int, about("tokens of prompt and answer; 0: the model's", ge=0)] = 0
    api_key_env: ClientKeyEnv = ""

    def __post_init__(self) -> None:
        check_key(self.host, has_key=bool(self.api_key_env))

    @property
    def is_launched(self) -> bool:
        """Whether the run starts a server for it."""
        return not self.url and self.engine != "learner"


class Served(Struct, frozen=True):
    """The model that one server serves, as `name`. `trained`: its weights are replaced during the
    run, through `weights`, or as LoRA adapters of rank `lora_rank` if that is not 0. `colocated`:
    the learner uses the same GPUs, "at_once" or while the server sleeps; the server measures their
    memory once the file `gate` exists. Its clients send the `key`, if any. The starter sets the
    last four, its placement; `cache_bytes` is the size of the KV cache, 0 if the server measures
    the free memory, which is not possible next to other processes."""

    engine: str
    model: Path
    name: str
    max_model_len: int = 0
    trained: bool = False
    weights: Literal["directory", "broadcast", "ipc"] = "directory"
    colocated: bool | str = False
    lora_rank: int = 0
    gate: Path | None = None
    key: str = ""
    port: int = 0
    gpus: Sequence[str] = ()
    on_cpu: bool = False
    cache_bytes: int = 0

    @property
    def sleeps(self) -> bool:
        """Whether the learner uses the server's GPUs while it sleeps."""
        return self.colocated is True


# Settings of the engine pool: budgets, deadlines, concurrency.


class PoolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a pool for its servers and their requests."""

    # Constants, since no one needed to set them.
    poll_interval_s: ClassVar[float] = 1.0  # between polls of a server's health and load
    load_timeout_s: ClassVar[float] = 600.0  # of one server's weight update
    max_outage_s: ClassVar[float] = 600.0  # of all servers; then the run ends
    poll_timeout_s: ClassVar[float] = 60.0  # a server without a load report for this long is lost
    initial_concurrency: ClassVar[int] = 64  # of a server with unknown load; it doubles
    broadcast_timeout_s: ClassVar[float] = 60.0  # to form a group, and of each 512 MiB
    backoff: ClassVar[Backoff] = Backoff(0.25, 20.0)  # of turns, loads and connections

    max_retries: Annotated[int, about("retries of a turn after its server was lost", ge=0)] = 5
    first_token_s: Annotated[
        float,
        about(
            "a server that returns no token of a request for this long is lost; after "
            "silence_s if it returns none for any request, and the trajectory has no time left; "
            "pauses for new weights do not count",
            gt=0,
        ),
    ] = 300.0
    silence_s: Annotated[
        float,
        about(
            "the same after the first token: maximum time between two events, unless "
            "requests queue in the server while it serves others",
            gt=0,
        ),
    ] = 30.0
    max_concurrency: Annotated[
        int,
        about("maximum number of requests in flight on one server, regardless of its load", ge=1),
    ] = 2048


class ChatModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on an OpenAI-compatible server, and its request settings."""

    url: Annotated[str, about('base URL, e.g. "http://HOST:8000/v1" or "{role:summarizer}/v1"')]
    model: Annotated[str, about("name of the model at that server")]
    api_key_env: ServerKeyEnv = ""
    max_tokens: Annotated[int, about("maximum length of a reply, reasoning included", ge=1)] = 4096
    timeout_s: Annotated[float, about("deadline of one request, seconds", gt=0)] = 120.0
    num_retries: Annotated[
        int, about("retries after 429, 5xx, lost connections, malformed replies", ge=0)
    ] = 5
    max_concurrency: Annotated[int, about("requests in flight", ge=1)] = 64
    extra_body: ExtraBody = {}
