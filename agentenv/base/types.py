"""The common types: messages, tasks, limits, sampling parameters, completions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, NewType

from msgspec import Meta, Struct

from agentenv.base.config import ESSENTIAL, about

SYSTEM_KEY = "system_prompt"  # in Task.metadata: the system prompt of a row


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of one trajectory, and deadlines of its waits."""

    max_prompt_tokens: Annotated[int, about("tokens of the rendered prompt", ESSENTIAL, ge=1)] = (
        2048
    )
    max_response_tokens: Annotated[
        int, about("tokens after the prompt: policy and tool results together", ESSENTIAL, ge=1)
    ] = 4096
    max_turn_tokens: Annotated[int, about("tokens sampled in one turn", ESSENTIAL, ge=1)] = 4096
    max_tool_result_tokens: Annotated[
        int, about("tokens of one tool result; longer ones keep head and tail", ESSENTIAL, ge=1)
    ] = 1024
    max_turns: Annotated[int, about("turns of the policy", ESSENTIAL, ge=1)] = 16
    max_tool_calls: Annotated[int, about("tool calls", ESSENTIAL, ge=0)] = 8
    on_limit: Annotated[
        Literal["end", "result"],
        about(
            "when the tool-call limit, total or of one tool, is reached: the rollout "
            "ends, or the policy reads a result that reports it"
        ),
    ] = "end"
    max_seconds: Annotated[
        float,
        about(
            "working time of servers and tools for one trajectory; waits for a slot, a "
            "rate limit, a pause or an outage do not count",
            ESSENTIAL,
            gt=0,
        ),
    ] = 600.0
    max_tree_seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        about(
            "working time of one tree (any of its trajectories); then live "
            "trajectories are truncated and none is retried; default four times max_seconds"
        ),
    ] = None
    env_timeout_s: Annotated[
        float, about("deadline of one reset, fork, finish or close of an env", gt=0)
    ] = 60.0
    outage_s: Annotated[
        float,
        about(
            "wait for a tool, a grader or an environment whose infrastructure is down, "
            "before its trajectory restarts; does not count against other limits",
            ge=0,
        ),
    ] = 300.0
    max_failures: Annotated[
        int, about("failed trajectories of one tree that fresh ones replace", ge=0)
    ] = 4
    max_turn_retries: Annotated[
        int,
        about(
            "retries of a turn after an engine failure, or of a step after an "
            "environment failure, before the trajectory fails",
            ge=0,
        ),
    ] = 3

    max_failed_share: Annotated[
        float,
        about(
            "end the run when more than this share of the last 200 trajectories "
            "failed, of any kind; failures by an outage within outage_s do not count; at the end "
            "of an evaluation: exit code 1 when more than this share of a set failed; below 1, the "
            "run also ends before a step in which every call of a tool that worked fails alike",
            ge=0,
            le=1,
        ),
    ] = 0.25
    strict: Annotated[
        bool,
        about(
            "end the run at the first bug: any exception but an AgentEnvError from a "
            "tool, an environment or a grader"
        ),
    ] = False

    @property
    def seconds_of_tree(self) -> float:
        """`max_tree_seconds` or its default."""
        return 4 * self.max_seconds if self.max_tree_seconds is None else self.max_tree_seconds


TIMES = ("max_seconds", "max_tree_seconds", "env_timeout_s", "outage_s")  # keys of Limits

Role = Literal["system", "user", "assistant", "tool"]
Info = dict[str, Any]


UNKNOWN_TOOL = "unknown"  # replaces the names of tools that do not exist
MALFORMED_CALL = "<malformed>"  # name of an invalid call; arguments["problem"] has the reason


class ToolCall(Struct, frozen=True):
    """One tool call of the policy, e.g. ToolCall("search", {"query": "capital of Peru"})."""

    name: str
    arguments: dict[str, Any]


class Turn(Struct, frozen=True, omit_defaults=True):
    """A sampled turn, for an environment that passes it to an agent program: its reasoning, its
    text without reasoning and calls, its finish reason, and its token counts. `kept`: why calls
    remain in the text.
    """

    thoughts: str
    text: str
    finish_reason: Literal["stop", "length"]
    num_prompt_tokens: int
    num_tokens: int
    stop: str | None = None
    kept: tuple[str, ...] = ()


class Message(Struct, frozen=True, omit_defaults=True):
    """A message between envs and the policy; tokens exist only in the actor and its renderer.

    An assistant message has the policy's text in `content` (tags included) and the parsed calls in
    `tool_calls`. A tool result has role "tool" and the tool's `name`. `turn` is set in actions for
    an environment that returned a `NextTurn`.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    turn: Turn | None = None


Kind = Literal["retry", "repeated", "parallel", "compaction", "sub_agent", "altered", "edited"]


# In a prompt: the tokens of one of the branch's turns, which are numbered from 0.
PastTurn = NewType("PastTurn", int)


# The requirements of a program that the engine enforces: none, its calls, calls and replies.
Constraints = Literal["none", "calls", "all"]


class NextTurn(Struct, frozen=True, omit_defaults=True):
    """The start of the next turn, from an environment that relays the calls of a program
    (agentenv/endpoint), in `info["turn"]` of `reset` and `step`.

    By default it continues the previous turn, after the messages of the step. Otherwise `prompt`
    is its whole context, messages and turns as they were sampled. If these tokens extend those of
    an earlier unanswered turn, it continues there; otherwise they open a context of the `kind`, for
    the `cause`. `discards` lists turns whose answers were lost: they are stored, but not trained.
    `tools`: those of the call, if they changed. `stop`, `max_tokens` (0: no own limit), `forced`
    (it must call one of these tools), `single` (at most one call) and `schema` (its text is JSON
    that matches) are the program's requirements for the turn.
    """

    prompt: tuple[Message | PastTurn, ...] = ()
    kind: Kind | None = None
    cause: str = ""
    discards: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int = 0
    forced: tuple[str, ...] = ()
    single: bool = False
    schema: dict[str, Any] | None = None


class Task(Struct, frozen=True):
    """One dataset row. `kind` groups questions in reports; `metadata` is free for envs."""

    id: str
    env_id: str
    question: str
    answers: tuple[str, ...] = ()
    kind: str = "all"
    metadata: dict[str, Any] = {}


class Limit(StrEnum):
    """Limits that end a trajectory as truncated. Units: tokens, turns, calls, seconds."""

    TURN_TOKENS = "turn_tokens"
    RESPONSE_TOKENS = "response_tokens"
    TURNS = "turns"
    TOOL_CALLS = "tool_calls"
    SECONDS = "seconds"
    ENV = "env"  # the env itself truncated the episode


# parameters with the same names here, in keys, in vLLM and in SGLang
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingParams(Struct, frozen=True):
    """Sampling parameters of one turn. `stop` strings stay in the output; `seed` makes a turn
    reproducible.

    temperature 0 is greedy. top_p 1, top_k -1 and min_p 0 switch truncation off, and
    repetition_penalty 1 the penalty. In order: the penalty divides the positive
    logits of tokens seen in prompt and output and multiplies the negative ones (CTRL, Keskar et
    al. 2019); temperature; min_p drops tokens less likely than min_p times the likeliest one;
    top_k; top_p. `guide`: the grammar of the turn, see agentenv/text/guides.py; only for engines
    that `can_guide`. `returns_kept`: the completion has the ids that truncation kept; only for
    engines that `has_kept`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    guide: str = ""
    returns_kept: bool = False


class VersionSpan(Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a completion were sampled by policy `version`."""

    version: int
    start: int
    end: int


class Chunk(Struct, frozen=True):
    """New tokens of a running request; lists of equal length. `kept`: by token the ids that could
    be sampled, if the request `returns_kept`."""

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    kept: list[list[int]] = []


class Completion(Struct):
    """One sampled turn; the first three lists have one entry per sampled token.

    logprobs and entropies are in nats, of the sampling distribution (after temperature).
    `entropy_kind` states whether entropies are exact over the vocabulary, or a lower bound from the
    top-k log-probabilities plus the remainder. `stop` is the stop string that ended the turn; with
    finish_reason "stop" and `stop` None, an end-of-sequence token ended it, which is the last of
    `token_ids`. `num_cached_tokens` counts prompt tokens whose keys and values came from a prefix
    cache of the same policy version. Log-probs that a grammar has changed are nan. `num_kept`: by
    sampled token the number of ids that could be sampled, `kept_ids`: these ids, token after token;
    empty unless requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    version_spans: list[VersionSpan]
    stop: str | None = None
    entropy_kind: Literal["exact", "top_k"] = "exact"
    num_cached_tokens: int = 0
    num_kept: list[int] = []
    kept_ids: list[int] = []


class ToolResult(Struct, frozen=True):
    """The result of a tool: the text for the policy, and info for the metrics."""

    text: str
    info: Info = {}
