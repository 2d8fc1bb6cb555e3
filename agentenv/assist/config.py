"""The keys of the inference-time tools, the table [assist]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field


class HelperConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that helps, behind an OpenAI-compatible server, and how it is asked."""

    url: Annotated[
        str, Meta(description='base URL, e.g. "http://HOST:8000/v1" or "{role:debugger}/v1"')
    ]
    model: Annotated[
        str, Meta(description="its name there; empty: the only one that the server lists")
    ] = ""
    api_key_env: Annotated[
        str, Meta(description="environment variable that holds the key; empty: none")
    ] = ""
    max_uses: Annotated[int, Meta(ge=1, description="times in one trajectory")] = 1
    temperature: Annotated[float, Meta(ge=0, description="0 is greedy")] = 0.0
    max_tokens: Annotated[int, Meta(ge=1, description="of a reply, thoughts included")] = 4096
    max_input_chars: Annotated[
        int, Meta(ge=100, description="of a text that it reads; longer ones lose their middle")
    ] = 60_000
    timeout_s: Annotated[
        float, Meta(gt=0, description="for one use, retries included; then there is no help")
    ] = 120.0
    num_retries: Annotated[
        int, Meta(ge=0, description="after 429, 5xx, lost connections, malformed replies")
    ] = 3
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in flight")] = 64
    extra_body: Annotated[
        dict[str, Any], Meta(description="more keys of each request, e.g. chat_template_kwargs")
    ] = field(default_factory=dict)


class DebuggerConfig(HelperConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Corrects code that failed. `max_uses` are calls that it was asked about."""

    tool: Annotated[str, Meta(description="the tool that runs code")] = "python"


class BacktracerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Takes a turn again whose call failed, and that the debugger could not help."""

    max_uses: Annotated[int, Meta(ge=1, description="times in one trajectory")] = 1
    tools: Annotated[
        tuple[str, ...], Meta(description="whose errors count; empty: those of all tools")
    ] = ()
    min_temperature: Annotated[
        float,
        Meta(
            ge=0,
            description="of the turn that is taken again, where sampling.temperature is lower: "
            "a greedy policy would write the same once more",
        ),
    ] = 0.6


class RefinerConfig(HelperConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compresses a long chain of reasoning; the rollout goes on from question and summary."""

    min_response_tokens: Annotated[
        int,
        Meta(ge=1, description="tokens after the prompt, tool results included, that call for it"),
    ] = 8192
    count_tokens: Annotated[
        Literal["anew", "total"],
        Meta(
            description="towards limits.max_response_tokens afterwards: those of the summary and "
            "what follows it, or those of the whole trajectory"
        ),
    ] = "anew"


class AssistConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of them an evaluation has."""

    debugger: Annotated[DebuggerConfig | None, Meta(description="the code debugger")] = None
    backtracer: Annotated[BacktracerConfig | None, Meta(description="the tool-use backtracer")] = (
        None
    )
    refiner: Annotated[RefinerConfig | None, Meta(description="the reasoning-chain refiner")] = None
