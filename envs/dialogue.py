"""Dialogues: an environment in which the policy talks to a user, and simulated users.

    class DeskEnv(DialogueEnv):
        def __init__(self, task: Task) -> None:
            super().__init__(task, tools=[track], grader=ExactMatch(), user=customer)

    def customer(task: Task, dialogue: Sequence[Message]) -> str | None:
        return task.metadata["number"] if "number" in dialogue[-1].content else "I do not know."

A turn without a tool call and without an answer goes to the user. The user's reply is a message of
the role `user`: context, never trained, and a place where plans may fork. The user receives only
the policy's text, neither thoughts nor tool results.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

import msgspec

from agentenv.base.config import about, build_config
from agentenv.base.errors import ConfigError, EngineError, EnvError, InfraError
from agentenv.base.result_cache import ResultCache
from agentenv.base.types import Info, Message, Task, ToolResult
from agentenv.base.untrusted import decode_text
from agentenv.contract.env import Grader, StepResult, shared
from agentenv.contract.server_config import ChatModelConfig
from agentenv.contract.tool_env import ToolEnv, call_in_time, printable_text
from agentenv.contract.tools import StatelessTool, Tool, ToolSource
from agentenv.text.call_syntax import without_thoughts

ANSWER = "<answer>"
GREETING = "Hello! How can I help you?"  # a model's first turn, which the question answers
MAX_KNOWN = 20_000  # cached replies of a model
OTHER = {"user": "assistant", "assistant": "user"}

_COLUMN = re.compile(r"\{(\w+)\}")

Reply = str | None
Function = Callable[[Task, Sequence[Message]], Reply | Awaitable[Reply]]


class User(Protocol):
    """The user of a dialogue. One object serves all episodes concurrently."""

    async def reply(self, task: Task, dialogue: Sequence[Message]) -> Reply:
        """The next message; None: the user leaves, and the episode is graded.

        `dialogue` begins with the question and ends with the policy's last text. Equal dialogues
        should get equal replies, since branches may be replayed. Raises InfraError, after which the
        call is retried. A user may have a method `async def start(self)`, awaited before each
        episode, that raises ConfigError if the user cannot work.
        """


class ScriptedUser:
    """Replies with its lines in order, regardless of the policy's text, and then leaves."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)

    async def reply(self, task: Task, dialogue: Sequence[Message]) -> Reply:
        number = sum(message.role == "assistant" for message in dialogue)
        return self.lines[number - 1] if number <= len(self.lines) else None


class FunctionUser:
    """Replies by a function of task and dialogue, sync (and fast) or async."""

    def __init__(self, function: Function) -> None:
        self.function = function

    async def reply(self, task: Task, dialogue: Sequence[Message]) -> Reply:
        found = self.function(task, dialogue)
        return await found if inspect.isawaitable(found) else found


class ModelUserConfig(ChatModelConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that plays the user: `user = {url = "{role:user}/v1", model = "user", ...}`."""

    instruction: Annotated[
        str, about("persona and goal of the user; {NAME} is replaced by a column of the row")
    ]
    temperature: Annotated[float, about("0: equal dialogues get equal replies", ge=0)] = 0.0
    leaves: Annotated[
        str, about("the user ends the dialogue with a reply that contains this text", min_length=1)
    ] = "###STOP###"


class ModelUser:
    """A model on an OpenAI-compatible server, separate from the policy. Equal requests get equal
    replies within a process."""

    def __init__(self, config: ModelUserConfig) -> None:
        from agentenv.text.chat_model import ChatModel

        self.config = config
        self._model = ChatModel(config, "env.kwargs.user", temperature=config.temperature)
        self._started = False
        self._cache = ResultCache(max_memory_entries=MAX_KNOWN)

    async def start(self) -> None:
        """Raises ConfigError if the server does not have the model."""
        if not self._started:
            await self._model.endpoint.start()
            self._started = True

    async def reply(self, task: Task, dialogue: Sequence[Message]) -> Reply:
        body = self.body(task, dialogue)
        key = hashlib.sha256(msgspec.json.encode(body)).hexdigest()
        reply = await self._cache.through(key, partial(self._request, body), decode_text)
        return None if self.config.leaves in reply else reply

    def body(self, task: Task, dialogue: Sequence[Message]) -> dict[str, Any]:
        """The request, with the roles swapped: for the model, the policy is the user."""
        columns = {"question": task.question, **task.metadata}
        system = _COLUMN.sub(
            lambda found: str(columns.get(found[1], found[0])), self.config.instruction
        )
        body = self._model.body(system, GREETING)
        body["messages"] += [{"role": OTHER[one.role], "content": one.content} for one in dialogue]
        return body

    async def _request(self, body: dict[str, Any]) -> bytes:
        from agentenv.contract.http_client import MalformedReplyError, RefusedError

        try:
            reply = await self._model.reply(body)
        except (RefusedError, MalformedReplyError) as error:
            raise EnvError(f"the user model failed: {error}") from error
        except EngineError as error:
            raise InfraError(f"the user model failed: {error}") from error
        return reply.text.encode("utf-8", "replace")

    def stats(self) -> dict[str, float]:
        """The number of requests to the model."""
        return self._model.stats()

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._cache.close()
        await self._model.close()


def make_user(user: User | Function | Sequence[str] | Mapping[str, Any]) -> User:
    """A user from a list of lines, a function, or the keys of a model. Raises ConfigError."""
    if isinstance(user, Mapping):
        config = build_config(ModelUserConfig, dict(user), "env.kwargs.user")
        return shared(("user", msgspec.json.encode(config)), lambda: ModelUser(config))
    if isinstance(user, Sequence):
        return ScriptedUser([user] if isinstance(user, str) else user)
    if callable(getattr(user, "reply", None)):
        return user  # type: ignore[return-value]
    if callable(user):
        return FunctionUser(user)
    raise ConfigError(
        f"user: expected lines, a function of task and dialogue, the keys of a model, or an object "
        f"with `reply`, got {type(user).__name__}"
    )


class DialogueEnv(ToolEnv):
    """A ToolEnv whose policy also talks to a user; further keywords are those of `ToolEnv`.

    Tools answer a turn with tool calls. A turn with an answer (`is_answer`), or one after which the
    user leaves, ends the episode, which is then graded. Any other turn goes to the user. A user
    with an infrastructure failure, or beyond `tool_timeout_s`, is retried like a tool; the policy
    is not informed.
    """

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool | ToolSource],
        grader: Grader | None = None,
        *,
        user: User | Function | Sequence[str] | Mapping[str, Any],
        **settings: Any,
    ) -> None:
        super().__init__(task, tools, grader, **settings)
        self.user = make_user(user)
        self._asked = _UserTool(self.user, task)
        self._dialogue: tuple[Message, ...] = ()

    def is_answer(self, action: Message) -> bool:
        """Whether a turn without a call ends the episode."""
        return ANSWER in without_thoughts(action.content)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        start = getattr(self.user, "start", None)
        if start is not None:
            await start()
        self._dialogue = (Message("user", self.task.question),)
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> StepResult:
        """See ToolEnv.step; the user's reply is the observation of a turn without a call."""
        self._open_states("step")
        if action.tool_calls or self.is_answer(action):
            return await super().step(action)
        message = Message("assistant", without_thoughts(action.content).strip())
        dialogue = (*self._dialogue, message)
        call = partial(call_in_time, self.tool_timeout_s, self._asked, {}, dialogue)
        found = await self._through_outage("the user", call, self.num_retries, self.outage_s)
        if found.info:
            return await super().step(action)
        reply = Message("user", await printable_text(found.text))
        self._written.append(action)
        self._dialogue = (*dialogue, reply)
        return [reply], 0.0, False, False, {}


class _UserTool(StatelessTool):
    """A user as an internal tool; its state is the dialogue."""

    name = "user"
    description = ""

    def __init__(self, user: User, task: Task) -> None:
        self.schema: dict[str, Any] = {}
        self._user, self._task = user, task

    async def call(self, arguments: dict[str, Any], state: Sequence[Message]) -> ToolResult:
        reply = await self._user.reply(self._task, state)
        return ToolResult("", {"left": True}) if reply is None else ToolResult(reply)
