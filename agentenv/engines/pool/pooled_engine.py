"""Engines that are a pool over servers: their keys, and how such a pool starts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from msgspec import field

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import num_stretched_positions, read_eos_ids, vocab_size
from agentenv.base.offload import in_thread
from agentenv.base.urls import checked_url
from agentenv.contract.engine import EngineCapabilities, EngineConfig, EngineStart, check_context
from agentenv.contract.http_client import why_unreachable
from agentenv.contract.request import ServerLostError
from agentenv.contract.server_config import MAX_SHARE, PoolConfig, Served, ServersConfig, read_key
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.weight_sync import Server

SERVERS = EngineCapabilities(has_temperature=True, can_sleep=True, can_guide=True)


class PooledEngineConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of an engine that is a pool over servers."""

    urls: Annotated[
        list[str], about("running ones, http://HOST:PORT; empty: start [servers]", ESSENTIAL)
    ] = field(default_factory=list)
    servers: Annotated[ServersConfig | None, about("servers to start for the run")] = None
    api_key_env: Annotated[
        str, about("environment variable that holds the servers' API key; empty: none")
    ] = ""
    entropy_top_k: Annotated[
        int,
        about(
            "log-probs per token from which a lower bound of its entropy is computed, "
            "the rest taken as one token; each costs server time; -1: the whole vocabulary, exact",
            ge=-1,
        ),
    ] = 10
    weights: Annotated[
        Literal["directory", "broadcast", "ipc"],
        about(
            "transport of new weights to the servers: through files on a shared path, "
            "from the learner's rank 0 over NCCL (GPUs) or gloo (CPU), or from its memory on the "
            "same GPUs (CUDA IPC; vLLM with resources.colocated)",
            ESSENTIAL,
        ),
    ] = "directory"
    lora: Annotated[
        Literal["merged", "adapter"],
        about(
            "form in which a policy with learner.lora is sent to servers: a merged model, or "
            "(vLLM) a small adapter of their model, for which running requests are prefilled again"
        ),
    ] = "merged"
    entropies: Annotated[
        Literal["all", "window"],
        about(
            "tokens with costly top-k log-probs: those that decide forks (two requests "
            "per turn; trained tokens get the learner's entropies, others none), or all (entropies "
            "are bounds); vLLM servers that the run starts return exact entropies of all tokens at "
            "no cost"
        ),
    ] = "window"
    update_kv: Annotated[
        Literal["recompute", "keep"],
        about(
            "KV cache of running requests at an update: recomputed with the new "
            "weights (a prefill of all running requests), or (vLLM) kept: their next tokens then "
            "belong to neither version, which their ratios show"
        ),
    ] = "recompute"
    pool: PoolConfig = PoolConfig()

    client: ClassVar[Callable[..., Server]]  # of one server; for options see RemoteServer

    def __post_init__(self) -> None:
        if self.urls and self.servers is not None:
            raise ConfigError("engine: give only one of urls and servers, not both")
        for url in self.urls:
            checked_url(url, "engine.urls")
        able = self.capabilities
        for key, text, is_able, remedy in (
            ("weights", "ipc", able.can_map, "directory"),
            ("lora", "adapter", able.has_adapters, "merged"),
            ("update_kv", "keep", able.keeps_cache, "recompute"),
        ):
            if getattr(self, key) == text and not is_able:
                raise ConfigError(
                    f'engine.{key} = "{text}" is for vLLM; use "{remedy}" with {self.kind} servers'
                )
        if self.lora == "adapter" and self.weights != "directory":
            raise ConfigError(
                'engine.lora = "adapter" goes through a directory; remove engine.weights'
            )
        if self.servers is not None and self.servers.quantization:
            raise ConfigError(
                "engine.servers.quantization: the servers of a policy get the learner's weights, "
                "which are not quantized; remove it (roles may be quantized)"
            )

    @property
    def launched(self) -> ServersConfig | None:
        return None if self.runs_elsewhere else self.servers or ServersConfig()

    @property
    def runs_elsewhere(self) -> bool:
        return bool(self.urls)

    @property
    def new_weights(self) -> Literal["directory", "adapter", "broadcast", "ipc"]:
        return "adapter" if self.lora == "adapter" else self.weights

    @property
    def reports_entropies(self) -> bool:
        return self.entropies == "all"

    @property
    def is_shared(self) -> bool:
        # With the cache kept, and with adapters, the salt or adapter of a request changes with each
        # update, which workers would learn too late: their turns go through the controller.
        return self.update_kv == "recompute" and self.lora == "merged"

    def check_colocated(self, key: str, how: bool | str = True) -> None:
        super().check_colocated(key, how)
        if self.weights == "broadcast":
            raise ConfigError(
                f'{key}: engine.weights = "broadcast" needs servers that are awake while the '
                'learner sends, on their own GPUs; use "ipc" (vLLM) or "directory"'
            )
        if self.weights == "ipc" and self.launched is None:
            raise ConfigError(
                f'{key}: engine.weights = "ipc" needs servers that the run starts next to the '
                'learner; remove engine.urls, or use "directory"'
            )
        servers = self.servers or ServersConfig()
        most = MAX_SHARE / servers.servers_per_gpu
        if servers.gpu_memory_share > most:
            raise ConfigError(
                f"engine.servers.gpu_memory_share = {servers.gpu_memory_share:g}: next to an "
                f"offloaded learner on the same GPU at most {most:.2g} is available, since the "
                "learner's CUDA context stays there"
            )

    async def check_reachable(self) -> None:
        found = await asyncio.gather(*(why_unreachable(url, "engine.urls") for url in self.urls))
        if found and all(found):  # a run can start without some of them
            raise ConfigError(
                f"engine.urls: no engine server answers at {self.urls[0]} ({found[0]}); is it "
                "running and reachable from this machine?"
            ) from ServerLostError(found[0])

    async def start(self, given: EngineStart) -> EnginePool:
        """Start the servers, or connect to running ones; returns a pool that serves the model."""
        model = await in_thread(given.model.absolute)  # servers run in another folder
        vocabulary = await in_thread(vocab_size, model)
        make = self.server_maker(vocabulary)
        urls, launched = self.urls, self.launched
        if launched is not None:
            served = Served(
                self.kind,
                model,
                "policy",
                self.max_model_len,
                trained=True,
                weights=self.weights,
                colocated=given.colocated,
                lora_rank=given.lora_rank,
                gate=given.gate,
                key=self.key(),
            )
            urls = await given.servers.start(served, launched, "engine.servers")
        pool = EnginePool(
            [make(url) for url in urls],
            model,
            given.policy_version,
            vocab_size=vocabulary,
            eos_ids=read_eos_ids(model, given.tokenizer),
            config=self.pool,
            name=f"agentenv-{secrets.token_hex(6)}",
            seed=given.seed,
            adapter=given.adapter,
            entropies=self.entropies,
        )
        given.stack.push_async_callback(pool.close)
        await pool.start(fresh=launched is not None and given.adapter is None)
        if given.lora_rank:
            pool.require("adapters")
        if self.weights != "directory":
            pool.require(self.weights)
        if pool.max_model_len:
            check_context(given.limits, pool.max_model_len)
        if launched is not None:
            given.servers.follow(lambda url: pool.add_server(make(url)), pool.remove_server)
        return pool

    def key(self) -> str:
        """The servers' key: that in `api_key_env`, else of servers that the run starts, theirs."""
        return read_key(self.api_key_env, "engine.api_key_env", starts=self.launched is not None)

    def server_maker(self, vocabulary: int) -> Callable[[str], Server]:
        """Makes the client of a URL; `vocabulary` is the model's number of token ids."""
        return partial(
            type(self).client,
            entropy_top_k=self.entropy_top_k,
            load_s=self.pool.load_timeout_s,
            vocab_size=vocabulary,
            api_key=self.key(),
            update_kv=self.update_kv,
        )

    def _positions(self, model_config: dict[str, Any]) -> int:
        return num_stretched_positions(model_config)
