"""The seam between actors and whatever samples tokens, and the configuration that starts it: also
the settings of engines that are servers, apart from their clients so that reading them is cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from msgspec import Meta, Struct, field

from agentenv.config import ESSENTIAL
from agentenv.deadline import backoff_s
from agentenv.errors import ConfigError, EngineError
from agentenv.model_files import num_positions, read_model_config
from agentenv.types import Chunk, Completion, Limits, SamplingParams, VersionSpan


class Engine(Protocol):
    """Token ids in, token ids out. All methods are called on the event loop and never block it."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose the next token."""
        ...

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

        `session` names the tree: requests of one session share prefixes, so they should meet the
        same cache. `on_tokens` is called on the event loop with the tokens not yet reported each
        time at least `stream_interval` of them are known, and never after generate has returned;
        tokens of an incomplete last chunk appear only in the Completion. Entropies that cost an
        engine time may be NaN but for the tokens of the first chunk. Where turns wait for a slot,
        those of the smallest `order` go first: (1 for the first turn of a trajectory, else 0;
        number of the tree in start order), so that a tree goes on while its prefixes are still in
        the cache. While the turn waits the clock of its rollout stands still
        (agentenv/deadline.py). Cancelling the call aborts the request. Raises EngineError for a
        request the engine cannot serve (empty or too long prompt, ids outside the vocabulary,
        max_tokens < 1), and EngineDeadError when the engine is gone for good.
        """
        ...

    async def load_weights(self, source: Path, policy_version: int) -> None:
        """Replace the weights by those of a Hugging Face directory while requests are running.

        Running requests keep their tokens and go on under the new weights, their version spans
        say where. No new request meets a prefix cache of another version. Raises EngineError and
        keeps the old weights and version if the directory does not fit.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Counters since the start: sampled_tokens, prompt_tokens, cached_tokens, requests, ..."""
        ...

    async def close(self) -> None:
        """Stop; requests still running raise EngineDeadError. Idempotent."""
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can give the memory of its device back for a while."""

    @property
    def outage_s(self) -> float:
        """Seconds so far in which the engine could not sample, asleep or gone. They count for no
        deadline of a rollout (agentenv/deadline.py)."""
        ...

    async def sleep(self) -> None:
        """Give back cache and weights. Requests that run keep their tokens and go on after
        `wake`, or after `load_weights`, which wakes it up too; so do those that come meanwhile."""
        ...

    async def wake(self) -> None:
        """Serve again, with the weights from before the sleep. An engine that is awake stays so."""
        ...


class ServerStarter(Protocol):
    """Starts engine servers for a run, and stops them with it."""

    async def start(self, served: Served, config: LaunchConfig, key: str) -> list[str]:
        """URLs of the servers, which answer. `key` is the setting that errors name. Raises
        ConfigError and EngineError."""
        ...

    def follow(self, added: Callable[[str], None], removed: Callable[[str], None]) -> None:
        """Tell from now on which URLs come and go, of servers that may move."""
        ...


class EngineStart(Struct, frozen=True, kw_only=True):
    """What an engine is started with: the engine serves `model` as `policy_version`, `stack` closes
    it. With an `adapter`, the policy is that LoRA adapter on top of `model`."""

    model: Path
    tokenizer: Any
    policy_version: int
    limits: Limits
    stack: AsyncExitStack
    servers: ServerStarter
    seed: int = 0
    use: str = "policy"  # names the servers that are started
    colocated: bool = False  # the engine and the learner have the same GPUs in turn
    lora_rank: int = 0  # of the adapters that the engine gets as new weights; 0: whole models
    adapter: Path | None = None


class LocalModel(Struct, frozen=True):
    """The model that an engine holds in the controller's process, with a KV cache for so many
    sequences of full length."""

    dtype: str
    num_sequences: int
    device: str


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of an engine, tagged with the engine's name. Besides keys, an engine's
    configuration answers what the rest of the system asks about the engine before it runs."""

    max_model_len: Annotated[
        int,
        Meta(ge=0, description="most tokens of prompt and output; 0: the model's", extra=ESSENTIAL),
    ] = 0

    has_weights: ClassVar[bool] = True  # False: it is only asked, whatever weights it has
    is_exact: ClassVar[bool] = False  # its log-probs and entropies are those of the learner's model
    can_sleep: ClassVar[bool] = False  # its memory can be given back while the learner works
    _reserved: ClassVar[int] = 0  # tokens of the context that are never filled

    @property
    def kind(self) -> str:
        """The engine's name in configurations."""
        return str(self.__struct_config__.tag)

    @property
    def launched(self) -> ServersConfig | None:
        """The servers that a run starts for this engine; None: none."""
        return None

    @property
    def starts_servers(self) -> bool:
        return self.launched is not None

    @property
    def runs_elsewhere(self) -> bool:
        """Whether servers that run already are used."""
        return False

    @property
    def new_weights(self) -> Literal["directory", "adapter", "broadcast"]:
        """How new weights reach this engine."""
        return "directory"

    @property
    def tells_entropies(self) -> bool:
        """Whether entropies of all tokens are those of the engine; else the learner's take their
        place once forks are decided."""
        return True

    @property
    def local_model(self) -> LocalModel | None:
        """The model in the controller's process; None: there is none."""
        return None

    def check_colocated(self, key: str) -> None:
        """Raises ConfigError if engine and learner cannot have the same GPUs in turn; `key` is
        the setting that asks for it."""
        if not self.can_sleep:
            raise ConfigError(f"{key}: engine.name = {self.kind!r} has no memory to give back")

    def max_context(self, model: Path, key: str = "engine") -> int:
        """Tokens of prompt and response that the engine, configured in the table `key`, can hold
        with this model. Raises ConfigError for a max_model_len beyond what the model was made
        for."""
        of_model = self._positions(read_model_config(model))
        if of_model and self.max_model_len > of_model:
            raise ConfigError(
                f"{key}.max_model_len = {self.max_model_len}: {model} holds {of_model} tokens of "
                "prompt and response together; give at most that, or 0 for the model's own limit"
            )
        if not (of_model or self.max_model_len):
            raise ConfigError(f"{key}.max_model_len: must be given, since {model} does not say")
        of_model -= self._reserved if of_model else 0
        return min(filter(None, (self.max_model_len, of_model)))

    async def check_reachable(self, key: str = "engine") -> None:
        """Raises ConfigError if servers that should run already, named in the table `key`, do not
        answer."""

    async def start(self, given: EngineStart) -> Engine:
        """The engine, ready to sample. Raises ConfigError if it cannot serve that model."""
        raise NotImplementedError

    def _positions(self, model_config: dict[str, Any]) -> int:
        """Tokens that the model holds in this engine; 0: its config.json does not say."""
        return num_positions(model_config)


def check_context(limits: Limits, max_model_len: int) -> None:
    """Refuse limits that the engine's context cannot hold."""
    needed = limits.max_prompt_tokens + limits.max_response_tokens
    if needed > max_model_len:
        raise ConfigError(
            f"limits: max_prompt_tokens {limits.max_prompt_tokens} + max_response_tokens "
            f"{limits.max_response_tokens} = {needed} exceed the engine's context of "
            f"{max_model_len} tokens; lower them, or take an engine and a model that hold more"
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
    """Raises EngineError for a request that a server would clamp, cut short, silently change or die
    of."""
    if not len(prompt):
        raise EngineError("the prompt is empty; it needs at least one token id")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        raise EngineError(
            f"the prompt has token ids from {low} to {high}, the vocabulary those from 0 to "
            f"{vocab_size - 1}; do tokenizer and served model belong together?"
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
    """Append a span, as one with the last if both are of one version; empty ones vanish."""
    if span.start == span.end:
        return
    if spans and spans[-1].version == span.version:
        spans[-1] = VersionSpan(span.version, spans[-1].start, span.end)
    else:
        spans.append(span)


# Settings of engine servers that a run starts by itself.

SGLANG_RESERVED = 2  # tokens of its context length that an SGLang server never fills
ROLES = ("summarizer", "judge", "debugger", "refiner")  # besides the policy, which is [engine]


class LaunchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one server is started."""

    gpus: Annotated[
        list[int],
        Meta(description="GPUs by number, among those visible; empty: free ones in order"),
    ] = field(default_factory=list)
    port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port of the first server, the next ones follow; 0: free"),
    ] = 0
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="GPUs that share a layer", extra=ESSENTIAL)
    ] = 1
    data_parallel_size: Annotated[
        int, Meta(ge=1, description="copies of the model behind one server")
    ] = 1
    gpu_memory_share: Annotated[
        float,
        Meta(
            gt=0, le=1, description="share of a GPU's memory for weights and cache", extra=ESSENTIAL
        ),
    ] = 0.9
    max_num_seqs: Annotated[
        int, Meta(ge=0, description="requests that run at a time; 0: the engine's choice")
    ] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto: GPUs if there are any")
    ] = "auto"
    dtype: Annotated[
        Literal["model", "float32", "bfloat16", "float16"],
        Meta(description="of weights and cache; model: what its config.json says"),
    ] = "model"
    quantization: Annotated[str, Meta(description="method by the engine's name; empty: none")] = ""
    python: Annotated[
        str,
        Meta(
            description="interpreter of the engine's environment; empty: this one if the engine "
            "is installed in it, else .venv-vllm/bin/python or .venv-sglang/bin/python"
        ),
    ] = ""
    args: Annotated[
        list[str], Meta(description="more arguments of the engine's own command line, as they are")
    ] = field(default_factory=list)
    env: Annotated[dict[str, str], Meta(description="more environment variables of the server")] = (
        field(default_factory=dict)
    )
    start_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline for a server to come up")
    ] = 900.0

    @property
    def count(self) -> int:
        """Servers to start."""
        return 1


class ServersConfig(LaunchConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The servers of the policy."""

    num_servers: Annotated[int, Meta(ge=1, description="servers to start", extra=ESSENTIAL)] = 1

    @property
    def count(self) -> int:
        return self.num_servers


class RoleConfig(LaunchConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model beside the policy, for environments and graders: OpenAI routes at `{role:NAME}/v1`,
    model name NAME. Either started for the run, or there already at `url`."""

    url: Annotated[
        str,
        Meta(
            description="http://HOST:PORT of a server that runs already; empty: start one. NAME is "
            "summarizer, judge, debugger or refiner; {role:NAME} in texts of [env], [grader], "
            "[search] and [python] stands for the URL, e.g. grader.judge.url = '{role:judge}/v1'"
        ),
    ] = ""
    model: Annotated[str, Meta(description="Hugging Face directory; needed to start one")] = ""
    engine: Annotated[Literal["vllm", "sglang"], Meta(description="what serves it")] = "vllm"
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens of prompt and answer; 0: the model's")
    ] = 0

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.model):
            raise ConfigError("roles.NAME: give exactly one of url and model")


class Served(Struct, frozen=True):
    """What one server is to serve, under `name`. `trained`: its weights are replaced during the
    run, through a directory or by `broadcast`, or as LoRA adapters of rank `lora_rank` if that is
    not 0. `colocated`: it sleeps while the learner has its GPUs. The last three are where it runs,
    which the one who starts it says."""

    engine: str
    model: Path
    name: str
    max_model_len: int = 0
    trained: bool = False
    broadcast: bool = False
    colocated: bool = False
    lora_rank: int = 0
    port: int = 0
    gpus: Sequence[str] = ()
    on_cpu: bool = False


# Settings of the engine pool: budgets, deadlines, concurrency.


class PoolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a pool treats its servers and the requests on them."""

    # Not keys: nobody had a reason to set them.
    poll_interval_s: ClassVar[float] = 1.0  # between two looks at a server's health and load
    poll_timeout_s: ClassVar[float] = 60.0  # a server that does not say its load so long is lost
    initial_concurrency: ClassVar[int] = 64  # of a server whose load is not known; it doubles

    max_retries: Annotated[
        int, Meta(ge=0, description="times a turn is sent again after its server was lost")
    ] = 5
    max_outage_s: Annotated[
        float, Meta(gt=0, description="the run ends when all servers are gone for this long")
    ] = 600.0
    first_token_s: Annotated[
        float,
        Meta(
            gt=0,
            description="a server that has a request for this long and gives no token of it is "
            "lost; after silence_s if it gives none of any request, and the trajectory has no time "
            "left; pauses for new weights do not count",
        ),
    ] = 300.0
    silence_s: Annotated[
        float,
        Meta(
            gt=0,
            description="the same, after the first token: between two events, unless "
            "requests wait in the server and it speaks to others",
        ),
    ] = 30.0
    load_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="deadline of one server for one update of its weights, and of a request "
            "that gives no token meanwhile",
        ),
    ] = 600.0
    broadcast_timeout_s: Annotated[
        float,
        Meta(gt=0, description="deadline of a broadcast for its group, and for each 512 MiB"),
    ] = 60.0
    broadcast_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="port of the learner's machine at which SGLang servers meet it for a "
            "broadcast; 0: any that is free (NCCL itself chooses its ports, as with vLLM)",
        ),
    ] = 0
    broadcast_interface: Annotated[
        str,
        Meta(
            description="network interface of the learner's machine for broadcasts, e.g. eth1; "
            "empty: NCCL's choice, and the address by which the controller knows the machine"
        ),
    ] = ""
    max_concurrency: Annotated[
        int, Meta(ge=1, description="most requests in flight on one server, whatever its load")
    ] = 2048

    def backoff_s(self, retry: int, key: str) -> float:
        """Seconds before a retry, from 1: at most 30."""
        return backoff_s(retry - 1, key, first_s=0.25, max_s=20.0)


class ChatModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model behind an OpenAI-compatible server, and how it is asked."""

    url: Annotated[
        str, Meta(description='base URL, e.g. "http://HOST:8000/v1" or "{role:summarizer}/v1"')
    ]
    model: Annotated[str, Meta(description="its name at that server")]
    api_key_env: Annotated[
        str, Meta(description="environment variable that holds the key; empty: no key; not logged")
    ] = ""
    max_tokens: Annotated[int, Meta(ge=1, description="of a reply, thoughts included")] = 4096
    timeout_s: Annotated[float, Meta(gt=0, description="limit of one request, seconds")] = 120.0
    num_retries: Annotated[
        int, Meta(ge=0, description="after 429, 5xx, lost connections, malformed replies")
    ] = 5
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in flight")] = 64
    extra_body: Annotated[
        dict[str, Any], Meta(description="more keys of each request, e.g. chat_template_kwargs")
    ] = field(default_factory=dict)
