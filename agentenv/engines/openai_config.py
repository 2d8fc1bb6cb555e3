"""Settings of an OpenAI-compatible endpoint that answers in place of an engine of ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from agentenv.errors import ConfigError


class OpenAIConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="openai",
                   tag_field="name"):  # fmt: skip
    """An endpoint that is only asked: its weights never change. For evaluation."""

    url: Annotated[str, Meta(description="base URL, e.g. http://HOST:8000 or https://HOST/v1")]
    model: Annotated[
        str, Meta(description="model name there; empty: the only one that the endpoint lists")
    ] = ""
    tokenizer: Annotated[
        str,
        Meta(
            description="directory with the served model's tokenizer: token ids go in and out, as "
            "in training (vLLM, SGLang); empty: chat messages, for any endpoint"
        ),
    ] = ""
    api_key_env: Annotated[
        str, Meta(description="environment variable that holds the API key; empty: none")
    ] = ""
    continuation: Annotated[
        Literal["auto", "continue", "prefix", "turns"],
        Meta(
            description="how the tag protocol goes on behind a tool result in chat messages: "
            "'continue' the assistant's text (vLLM, SGLang), with 'prefix' = true (DeepSeek, "
            "Mistral), or results as 'turns' of the user; auto: 'continue' where it is known"
        ),
    ] = "auto"
    max_tokens_key: Annotated[
        Literal["max_tokens", "max_completion_tokens"],
        Meta(description="key of the turn's limit in chat requests, as the endpoint wants it"),
    ] = "max_tokens"
    max_model_len: Annotated[
        int, Meta(ge=0, description="tokens of prompt and response; 0: what it says, else no check")
    ] = 0
    timeout_s: Annotated[float, Meta(gt=0, description="deadline of one request")] = 300.0
    num_retries: Annotated[int, Meta(ge=0, description="after 429, 5xx, lost connections")] = 6
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in flight")] = 64
    extra_body: Annotated[
        dict[str, Any], Meta(description="more keys of each request, e.g. chat_template_kwargs")
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.url: expected http(s)://HOST, got {self.url!r}")
