"""The limits of a rollout, each separate, each with its unit."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of one trajectory, and deadlines of what its coroutine awaits."""

    max_prompt_tokens: Annotated[int, Meta(ge=1, description="tokens of the rendered prompt")] = (
        2048
    )
    max_response_tokens: Annotated[
        int, Meta(ge=1, description="tokens after the prompt, policy and tool results together")
    ] = 4096
    max_turn_tokens: Annotated[int, Meta(ge=1, description="tokens sampled in one turn")] = 4096
    max_tool_result_tokens: Annotated[
        int, Meta(ge=1, description="tokens of one tool result; longer ones keep head and tail")
    ] = 1024
    max_turns: Annotated[int, Meta(ge=1, description="turns of the policy")] = 16
    max_tool_calls: Annotated[int, Meta(ge=0, description="tool calls")] = 8
    on_limit: Annotated[
        Literal["end", "result"],
        Meta(
            description="at the end of tool calls, of all or of one tool: the rollout ends, or the "
            "policy reads a result that says so"
        ),
    ] = "end"
    max_seconds: Annotated[float, Meta(gt=0, description="wall time of one trajectory")] = 600.0
    engine_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline of one turn's sampling")
    ] = 300.0
    env_timeout_s: Annotated[
        float, Meta(gt=0, description="deadline of one reset, fork, finish or close of an env")
    ] = 60.0
    max_failures: Annotated[
        int,
        Meta(ge=0, description="failed trajectories of one tree that are replaced by fresh ones"),
    ] = 4
