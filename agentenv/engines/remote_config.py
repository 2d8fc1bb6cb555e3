"""Settings of engines that are servers, apart from their clients so that reading them is cheap."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from agentenv.engines.launch_config import ServersConfig
from agentenv.engines.pool_config import PoolConfig
from agentenv.errors import ConfigError

SGLANG_RESERVED = 2  # tokens of its context length that an SGLang server never fills


class TimeoutsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines of calls to a server."""

    connect_s: Annotated[float, Meta(gt=0, description="to open a connection")] = 10.0
    call_s: Annotated[float, Meta(gt=0, description="of a short call")] = 30.0
    idle_s: Annotated[
        float,
        Meta(gt=0, description="without a token from a running request; more than a load takes"),
    ] = 600.0
    load_s: Annotated[float, Meta(gt=0, description="of one load of weights")] = 600.0


class RemoteConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys that all served engines have."""

    urls: Annotated[
        list[str],
        Meta(description="servers that run already, http://HOST:PORT; empty: start [servers]"),
    ] = field(default_factory=list)
    urls_file: Annotated[
        str,
        Meta(
            description="file with one URL a line, looked at all the time: servers may be added "
            "and taken away during the run; in place of urls"
        ),
    ] = ""
    control_urls: Annotated[
        list[str],
        Meta(
            description="when the one URL is a router (sglang-router): the workers behind it, "
            "which get weights and aborts directly"
        ),
    ] = field(default_factory=list)
    servers: Annotated[ServersConfig | None, Meta(description="servers to start for the run")] = (
        None
    )
    api_key_env: Annotated[
        str, Meta(description="environment variable that holds the servers' API key; empty: none")
    ] = ""
    max_model_len: Annotated[
        int, Meta(ge=0, description="most tokens of prompt and output; 0: the model's")
    ] = 0
    entropy_top_k: Annotated[
        int,
        Meta(
            ge=-1,
            description="log-probs a token from which its entropy is bounded below, the rest taken "
            "as one token; each costs the server time; -1: the whole vocabulary, exact",
        ),
    ] = 10
    weights: Annotated[
        Literal["directory", "broadcast"],
        Meta(
            description="how new weights reach the servers: through files that they can see, or "
            "from the learner's rank 0 over NCCL (GPUs) or gloo (CPU)"
        ),
    ] = "directory"
    lora: Annotated[
        Literal["merged", "adapter"],
        Meta(
            description="how a policy with learner.lora reaches the servers: as a whole model, or "
            "(vLLM) as an adapter of the model that they were started with, which is small; "
            "running requests then have their prefixes computed again at each update"
        ),
    ] = "merged"
    timeouts: TimeoutsConfig = TimeoutsConfig()
    pool: PoolConfig = PoolConfig()

    def __post_init__(self) -> None:
        given = [name for name in ("urls", "urls_file", "servers") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"engine: give only one of urls, urls_file and servers, not {given}")
        if self.lora == "adapter" and self.weights == "broadcast":
            raise ConfigError(
                'engine.lora = "adapter" goes through a directory; remove engine.weights'
            )
        if self.control_urls and len(self.urls) != 1:
            raise ConfigError(
                f"engine.control_urls are the workers behind one URL; engine.urls has "
                f"{len(self.urls)}"
            )


class VLLMConfig(
    RemoteConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="vllm",
    tag_field="name",
):
    """vLLM servers."""


class SGLangConfig(
    RemoteConfig,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="sglang",
    tag_field="name",
):
    """SGLang servers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora == "adapter":
            raise ConfigError('engine.lora = "adapter" is for vLLM; to SGLang adapters go "merged"')
