"""The keys of an LLM judge."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field


class JudgeConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the judge is and how it is asked."""

    url: Annotated[
        str, Meta(description="base URL of an OpenAI-compatible server, e.g. http://host:8000/v1")
    ]
    model: Annotated[str, Meta(description="name of the model at that server")]
    api_key_env: Annotated[
        str, Meta(description="environment variable that holds the key; empty: no key; not logged")
    ] = ""
    when: Annotated[
        Literal["rules_wrong", "always"],
        Meta(
            description="asked when the rules find no right answer; or always, which changes no "
            "grade, but tells how far the two agree"
        ),
    ] = "rules_wrong"
    timeout_s: Annotated[float, Meta(gt=0, description="limit of one request, seconds")] = 60.0
    num_retries: Annotated[int, Meta(ge=0, description="after 429, 5xx, time-outs")] = 5
    max_concurrency: Annotated[int, Meta(ge=1, description="requests in flight")] = 64
    max_answer_chars: Annotated[
        int, Meta(ge=20, description="a longer answer keeps its head and tail")
    ] = 2000
    max_tokens: Annotated[
        int, Meta(ge=1, description="of the reply; more for a thinking model")
    ] = 16
    cache: Annotated[
        str, Meta(description='SQLite file of verdicts that processes share; "": in memory only')
    ] = ""
    extra_body: Annotated[
        dict[str, Any], Meta(description="more keys of the request, e.g. chat_template_kwargs")
    ] = field(default_factory=dict)
