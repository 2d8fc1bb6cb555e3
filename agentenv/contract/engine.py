"""The interface between actors and engines, and the configuration of engines; without the engines'
clients, so that importing it is cheap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from msgspec import Struct

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError, EngineError
from agentenv.base.model_files import num_positions, read_model_config
from agentenv.base.types import Chunk, Completion, Limits, SamplingParams, VersionSpan
from agentenv.contract.server_config import LaunchConfig, Served, ServersConfig

Feature = Literal["adapters", "broadcast", "ipc", "sleep"]  # of servers, not of all


class Engine(Protocol):
    """Token ids in, token ids out: the base of all engines. All methods are called on the event
    loop and never block it."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        """Sample one turn.

        `session` identifies the tree: requests of one session share prefixes and should reach the
        same cache. `on_tokens` is called on the event loop with new tokens, as soon as there are at
        least `stream_interval` of them, and never after generate has returned; tokens of an
        incomplete last chunk appear only in the Completion. Entropies that are expensive for an
        engine may be NaN after the first chunk. When turns wait for a slot, the smallest `order`
        goes first: (1 for the first turn of a trajectory, else 0; number of the tree in start
        order), so that a tree continues while its prefixes are cached. A rollout's clock stops
        while its turn waits (agentenv/base/deadline.py). Cancelling the call aborts the request.
        Raises EngineError for a request the engine cannot serve (empty or too long prompt, ids
        outside the vocabulary, max_tokens < 1), and EngineDeadError when the engine is permanently
        lost.
        """

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights by those of a Hugging Face directory while requests are running.
        Running requests keep their tokens and continue under the new weights, which their version
        spans record. New requests never use a prefix cache of another version. If the directory
        does not fit, raises EngineError and keeps the old weights and version.
        """
        raise EngineError(f"{type(self).__name__} does not load weights")

    def stats(self) -> dict[str, float]:
        """Counters since the start: sampled_tokens, prompt_tokens, cached_tokens, requests, ..."""
        return {}

    async def close(self) -> None:
        """Stop; requests still running raise EngineDeadError. Idempotent."""
        return

    # Engines with several servers, or with memory to release, override the rest.

    def has_room(self, num_live: int) -> bool:
        """Whether another tree should begin next to `num_live` trajectories."""
        return True

    async def generate_on_each(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, within_s: float
    ) -> dict[str, Completion]:
        """The completions of one request on every server, by the server's name; without those that
        fail or exceed the time. For measurements."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                session = f"probe{sampling.seed}"
                return {"": await self.generate(prompt_ids, sampling, session=session)}
        return {}

    def account(self) -> dict[str, Any]:
        """The part of a run's summary."""
        return dict(self.stats())

    def require(self, feature: Feature) -> None:
        """Raises ConfigError for a server without a feature that the configuration requires."""
        return

    async def sleep(self) -> None:
        """Release cache and weights. Running requests keep their tokens and resume after `wake`, or
        after `load_weights`, which also wakes the engine; so do requests that arrive meanwhile.
        The pause does not count against deadlines of rollouts (agentenv/base/deadline.py).
        """
        raise EngineError(f"{type(self).__name__} does not sleep")

    async def wake(self) -> None:
        """Serve again, with the weights from before the sleep. Idempotent."""
        raise EngineError(f"{type(self).__name__} does not sleep")


class ServerStarter(Protocol):
    """Starts engine servers for a run, and stops them when it ends."""

    async def start(self, served: Served, config: LaunchConfig, key: str) -> list[str]:
        """URLs of the ready servers. `key` is the setting for error messages. Raises
        ConfigError and EngineError."""

    def follow(self, added: Callable[[str], None], removed: Callable[[str], None]) -> None:
        """Call back with added and removed URLs of servers that may move."""


class EngineStart(Struct, frozen=True, kw_only=True):
    """Arguments of an engine's start: the engine serves `model` as `policy_version`; `stack` closes
    it. With an `adapter`, the policy is that LoRA adapter on top of `model`. Servers that share the
    learner's GPUs measure their memory once the file `gate` exists."""

    model: Path
    tokenizer: Any
    policy_version: int
    limits: Limits
    stack: AsyncExitStack
    servers: ServerStarter
    seed: int = 0
    colocated: bool | str = False  # shares the learner's GPUs: alternating, or "at_once"
    lora_rank: int = 0  # of adapters that are sent as new weights; 0: whole models
    adapter: Path | None = None
    gate: Path | None = None


class LocalModel(Struct, frozen=True):
    """The model of an engine in the controller's process, and the number of full-length sequences
    in its KV cache."""

    dtype: str
    num_sequences: int
    device: str


class EngineCapabilities(Struct, frozen=True, kw_only=True):
    """Properties of all engines of one kind. `has_weights`: no inference endpoint with any weights;
    `is_exact`: log-probs and entropies are those of the learner's model; `has_temperature`: they
    are those at the turn's temperature; `has_kept`: it returns the ids that truncation kept;
    `can_sleep`: memory can be released while the learner
    works; `can_guide`: a turn can follow a grammar; `can_map`: servers can read the learner's
    memory; `has_adapters`: a server can take a LoRA adapter as new weights; `keeps_cache`: running
    requests can keep their KV cache at an update; `num_reserved`: tokens of the context that are
    never filled."""

    has_weights: bool = True
    is_exact: bool = False
    has_temperature: bool = False
    has_kept: bool = False
    can_sleep: bool = False
    can_guide: bool = False
    can_map: bool = False
    has_adapters: bool = False
    keeps_cache: bool = False
    num_reserved: int = 0


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of an engine, tagged with the engine's name. The methods describe the engine before
    it runs.
    """

    max_model_len: Annotated[
        int, about("context length in tokens; 0: the model's", ESSENTIAL, ge=0)
    ] = 0

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities()

    @property
    def kind(self) -> str:
        """The engine's name in configurations."""
        return str(self.__struct_config__.tag)

    @property
    def launched(self) -> ServersConfig | None:
        """The servers that a run starts for this engine; None: none."""
        return None

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the engine uses servers that already run."""
        return False

    @property
    def is_shared(self) -> bool:
        """Whether rollout workers send requests to the engine's servers directly."""
        return False

    @property
    def new_weights(self) -> Literal["directory", "adapter", "broadcast", "ipc"]:
        """Transport of new weights to this engine."""
        return "directory"

    @property
    def reports_entropies(self) -> bool:
        """Whether the engine reports entropies of all tokens; otherwise the learner's replace them
        once forks are decided."""
        return True

    @property
    def local_model(self) -> LocalModel | None:
        """The model in the controller's process; None if there is none."""
        return None

    def check_colocated(self, key: str, how: bool | str = True) -> None:
        """Raises ConfigError if engine and learner cannot share GPUs in the way `how`: alternating,
        or "at_once". `key` is the setting that requests it."""
        if how == "at_once" and self.launched is None:
            raise ConfigError(
                f"{key} = 'at_once' shares GPUs between the learner and servers that the run "
                f"starts; engine.name = {self.kind!r} starts no server"
            )
        if not self.capabilities.can_sleep:
            raise ConfigError(f"{key}: engine.name = {self.kind!r} has no GPU memory to release")

    def check_model(self, model: Path) -> None:
        """Raises ConfigError for a model that the engine cannot serve."""

    def max_context(self, model: Path) -> int:
        """Context length (prompt and response, tokens) of the engine with this model. Raises
        ConfigError for a max_model_len above the model's context."""
        of_model = self._positions(read_model_config(model))
        if of_model and self.max_model_len > of_model:
            raise ConfigError(
                f"engine.max_model_len = {self.max_model_len}: {model} has a context of {of_model} "
                "tokens (prompt and response); set at most that, or 0 for the model's own limit"
            )
        if not (of_model or self.max_model_len):
            raise ConfigError(
                f"engine.max_model_len: must be set, since {model} does not state its limit"
            )
        of_model -= self.capabilities.num_reserved if of_model else 0
        return min(filter(None, (self.max_model_len, of_model)))

    async def check_reachable(self) -> None:
        """Raises ConfigError if a server that must already run does not answer."""

    async def start(self, given: EngineStart) -> Engine:
        """Start the engine, ready to sample. Raises ConfigError if it cannot serve that model."""
        raise NotImplementedError

    def _positions(self, model_config: dict[str, Any]) -> int:
        """The model's context length in this engine, tokens; 0 if config.json does not state it."""
        return num_positions(model_config)


def check_context(limits: Limits, max_model_len: int, reader: str = "the engine") -> None:
    """Reject limits that exceed the reader's context."""
    needed = limits.max_prompt_tokens + limits.max_response_tokens
    if needed > max_model_len:
        raise ConfigError(
            f"limits: max_prompt_tokens {limits.max_prompt_tokens} + max_response_tokens "
            f"{limits.max_response_tokens} = {needed} exceed {reader}'s context of "
            f"{max_model_len} tokens; lower them, or choose an engine and a model with a longer "
            "context"
        )


# Used by engines for each request.

MIN_TEMPERATURE = 1e-2  # vLLM raises smaller ones to it; 0 is greedy


def check_request(
    prompt: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
    max_model_len: int,
    min_temperature: float = MIN_TEMPERATURE,
) -> None:
    """Raises EngineError for a request that a server would clamp, truncate or change silently, or
    that would crash it.
    """
    if not len(prompt):
        raise EngineError("the prompt is empty; it needs at least one token id")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"the prompt has token ids from {low} to {high}, the vocabulary has 0 to "
            f"{vocab_size - 1}; does the tokenizer match the served model?"
        )
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens must be at least 1, found {sampling.max_tokens}")
    if len(prompt) + sampling.max_tokens > max_model_len:
        raise EngineError(
            f"{len(prompt)} prompt tokens and max_tokens {sampling.max_tokens} exceed "
            f"max_model_len {max_model_len} of the engine"
        )
    temperature, penalty = sampling.temperature, sampling.repetition_penalty
    if temperature != 0 and not min_temperature <= temperature < float("inf"):
        raise EngineError(
            f"temperature must be 0 (greedy) or at least {min_temperature}, found {temperature}"
        )
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p must be above 0 and at most 1, found {sampling.top_p}")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise EngineError(f"top_k must be -1 (off) or at least 1, found {sampling.top_k}")
    if not 0 <= sampling.min_p <= 1:
        raise EngineError(f"min_p must be from 0 to 1, found {sampling.min_p}")
    if not (isfinite(penalty) and penalty > 0):
        raise EngineError(f"repetition_penalty must be above 0, found {penalty}")
    if not all(sampling.stop):
        raise EngineError("a stop string is empty")


def extend_spans(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span; merge it with the last one if both have the same version. Empty spans are
    dropped."""
    if span.start == span.end:
        return
    if spans and spans[-1].version == span.version:
        spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
    else:
        spans.append(span)
