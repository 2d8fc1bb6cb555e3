"""The calls of a program as the turns of one branch.

    extends the last turn      the messages behind it are the observation
    anything else              `NextTurn.prompt`: the whole context, in which a message that came
                               back exactly as it was served stands for the tokens of its turn

What is rendered and compared are token ids, by the rollout; here it is decided what is the same
message, and which `Kind` a context is, for which cause:

    retry        the same call again, whose answer was never returned: that answer is discarded
    parallel     it came while another call of the session was under way
    altered      a message of the policy came back changed: trimmed, json_rewritten, arguments,
                 thoughts_dropped, thoughts_changed, call_ids, calls, text
    compaction   it shares the beginning of a context, and what follows is shorter and quotes it
    edited       other messages of a context were changed: system, user, tool, tools, rewound,
                 assistant (one that was not served was put in)
    sub_agent    a conversation of its own

Where the program continues a turn that it continued before, or past a compaction, without
quoting what came of that, those turns are discarded: they are on the tree, and not trained.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from math import isfinite
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from agentenv.endpoint.messages import (
    Answer,
    ApiError,
    Finish,
    Given,
    Json,
    Request,
    alteration,
    as_message,
    served,
    with_thoughts,
)
from agentenv.endpoint.server import ApiServer, Delta
from agentenv.env import shared
from agentenv.errors import AgentEnvError, EnvError, OutageError
from agentenv.types import Kind, Message, NextTurn

ENDED = "the branch of this key has ended"
NUM_KEY_BYTES = 24
OUT_OF_ORDER_S = 20.0  # in which a replayed program with threads asks what it is to ask first
MIN_QUOTED = 8  # characters of a text that is looked for in another one

Same = Callable[[Json, Json], bool]
Thoughts = Literal["apart", "text"]


class DivergedError(OutageError):
    """A replayed program asked otherwise than the recorded one; `cause` names the difference."""

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause


class ProgramCall(NamedTuple):
    """A call as an observation: what is new, the tools, and how the turn begins. `body` is the JSON
    of the request."""

    messages: list[Message]
    tools: tuple[Json, ...]
    turn: NextTurn
    body: Json


class _Pending:
    """A call that waits for its answer. `beside`: it came while another one was under way."""

    def __init__(self, request: Request, *, beside: bool) -> None:
        self.request, self.beside = request, beside
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class _Turn(NamedTuple):
    """A call that was answered: `context` are its messages and the served one. `kind`: of the
    context that it opened."""

    context: tuple[Given, ...]
    request: Request
    kind: Kind | None
    answer: Answer


def _turn(before: tuple[Given, ...], request: Request, kind: Kind | None, answer: Answer) -> _Turn:
    """Messages that it shares with `before` are held once."""
    same = _num_common(before, request.messages)
    request.messages, request.body = (*before[:same], *request.messages[same:]), {}
    return _Turn((*request.messages, answer.message), request, kind, answer)


class Session:
    """The calls of one branch, one at a time in the order in which they came. `port` is that of the
    server. `after` and `same` are those of `Endpoint.open`."""

    def __init__(
        self,
        key: str,
        port: int,
        after: Session | None = None,
        same: Same | None = None,
        thoughts: Thoughts = "apart",
    ) -> None:
        self.key, self.port = key, port
        self.thoughts: Thoughts = thoughts if after is None else after.thoughts
        self.counts: Counter[str] = Counter()
        self._turns: list[_Turn] = []
        self._discarded: set[int] = set()
        self._waiting: deque[_Pending] = deque()
        self._current: _Pending | None = None
        self._opened: Kind | None = None  # by the current call
        self._came = asyncio.Event()
        self._closed, self._error = "", "ended"
        self._recorded: dict[int, _Turn] = {}  # that the replayed program has not asked for yet
        self._expected: list[Request] = []  # by it, behind those; the first one is to be answered
        self._stray: tuple[str, str] | None = None  # cause and text of a call that is none of them
        self._is_parallel = False  # its calls came while others were under way
        self._resumed: _Pending | None = None  # the call in which its program was copied
        if after is not None:
            self._follow(after)
        self._same: Same = same or (lambda recorded, now: recorded == now)
        self._diverged: DivergedError | None = None
        self.posted: Json | None = None  # the reward that the program gave itself
        self._rewarded = asyncio.Event()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that point the clients of both APIs here."""
        url = f"http://127.0.0.1:{self.port}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": self.key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": self.key,
        }  # fmt: skip

    # for the environment

    async def next(self) -> ProgramCall:
        """The next call; waits. Raises EnvError once the session is closed, DivergedError for a
        replay that is none."""
        self._current = None
        while True:
            self._check_open()
            while self._waiting:
                call = self._waiting.popleft()
                if not call.answer.cancelled():
                    self._current = call
                    return self._placed(call)
            self._came.clear()
            await self._came.wait()

    async def ready(self) -> None:
        """Return once the replay has come to the call that the recorded session has not answered
        yet. Raises DivergedError."""
        while True:
            self._check_open()
            if (found := self._led()) is not None:
                break
            self._came.clear()
            stray = self._stray
            try:
                async with asyncio.timeout(OUT_OF_ORDER_S if stray else None):
                    await self._came.wait()
            except TimeoutError:
                assert stray is not None
                raise self._diverge(*stray) from None
        self._waiting.remove(found)
        self._current, self._expected = found, []

    def _check_open(self) -> None:
        if self._diverged is not None:
            raise self._diverged
        if self._closed:
            raise EnvError(self._closed)

    def answer(self, action: Message) -> None:
        """Reply to the call that `next` gave, by the action that the rollout took."""
        call, turn = self._current, action.turn
        if call is None or turn is None:
            raise EnvError("no call of the program waits for an answer")
        number, thoughts, text = len(self._turns), turn.thoughts, turn.text
        if self.thoughts == "text" and thoughts:
            thoughts, text = "", with_thoughts(thoughts, text)
        message = served(
            thoughts,
            text,
            action.tool_calls,
            lambda place: f"call_{number}_{place}",
            compact=call.request.compact,
        )
        finish: Finish = "tool_calls" if message.calls else turn.finish_reason
        found = Answer(
            message=message,
            finish=finish,
            num_prompt_tokens=turn.num_prompt_tokens,
            num_tokens=turn.num_tokens,
            stop=turn.stop,
        )
        self._add(call, found, self._opened)

    async def reward(self) -> Json | None:
        """The reward that the program posts."""
        await self._rewarded.wait()
        return self.posted

    def close(self, why: str = ENDED, error: str = "ended") -> None:
        """Calls that wait, and those that come, get an error, by a name of ERRORS. Idempotent."""
        if not self._closed:
            self._closed, self._error = why, error
        for call in (*self._waiting, *filter(None, (self._current,))):
            if not call.answer.done():
                call.answer.set_exception(ApiError(self._error, self._closed))
                call.answer.exception()  # its client may be gone
        self._waiting.clear()
        self._came.set()

    # for the server

    def new_id(self) -> str:
        return f"{len(self._turns)}_{self.counts['calls']}"

    async def count(self, request: Request) -> int:
        raise ApiError("no_route", "tokens are not counted for a branch")

    async def asked(self, request: Request, delta: Delta | None) -> Sequence[Answer]:
        """The answer to a call, once the rollout has one. Raises ApiError."""
        if request.n > 1 or request.logprobs or request.raw:
            raise ApiError("unsupported", "n above 1, logprobs and raw are not supported in a run")
        if self._closed:
            raise ApiError(self._error, self._closed)
        self.counts["calls"] += 1
        is_led = bool(self._recorded or self._expected)
        if is_led and (replayed := self._replayed(request)) is not None:
            return [replayed]
        others = self._current is not None or bool(self._waiting) or bool(self._expected)
        call = _Pending(request, beside=others)
        self._is_parallel |= others
        self._waiting.append(call)
        self._came.set()
        return [await call.answer]

    def rewarded(self, body: Json) -> None:
        """The program posts its reward; the last one counts. Raises ApiError."""
        if self._closed and self._error == "ended":  # what was cut off may still be scored
            raise ApiError("ended", self._closed)
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not isfinite(reward):
            raise ApiError("bad_request", 'expected {"reward": NUMBER}', "reward")
        self.posted = body
        self._rewarded.set()

    # a copy of a program

    def continue_as(self, after: Session) -> bool:
        """Stand where another session stands, as the copy of its program does; False where that
        has several calls under way."""
        call = after._current
        if call is None or after._waiting:
            return False
        self._follow(after)
        self._recorded, self._expected, self.posted = {}, [], after.posted
        self.counts = after.counts.copy()
        self._current = self._resumed = _Pending(call.request, beside=call.beside)
        return True

    def resumed(self) -> tuple[Callable[..., Coroutine[Any, Any, Sequence[Answer]]], Request]:
        """The call in which its program was copied, and what waits for its answer. Raises
        ApiError."""
        call = self._resumed
        if call is None:
            raise ApiError("no_route", "only a copy of a program has a call to resume")

        async def answered(*_: Any) -> Sequence[Answer]:
            return [await call.answer]

        return answered, call.request

    # a replay

    def _follow(self, after: Session) -> None:
        """Stand where another session stands, as soon as the program has asked what it was asked
        there, in whatever order its threads come."""
        self._turns = list(after._turns)
        self._recorded = dict(enumerate(after._turns))
        self._discarded = set(after._discarded)
        self._opened, self._is_parallel = after._opened, after._is_parallel
        self.counts.update({name: n for name, n in after.counts.items() if "/" in name})
        current = (after._current,) if after._current else ()
        self._expected = [call.request for call in (*current, *after._waiting)]

    def _led(self) -> _Pending | None:
        """The call that is to be answered, once all before it have been."""
        if self._recorded or not self._expected:
            return None
        waiting = (call for call in self._waiting if not call.answer.cancelled())
        return next((call for call in waiting if self._is(self._expected[0], call.request)), None)

    def _is(self, recorded: Request, now: Request) -> bool:
        """Whether it is the same call, but for what is chance. Cheap where it is another one."""
        if len(recorded.messages) != len(now.messages) or len(recorded.tools) != len(now.tools):
            return False
        return self._same(_shown(recorded), _shown(now))

    def _replayed(self, request: Request) -> Answer | None:
        """The answer to the same call of the recorded session; None for one that is to wait."""
        for number, turn in self._recorded.items():
            if self._is(turn.request, request):
                del self._recorded[number]
                self.counts["replayed"] += 1
                self._turns[number] = _turn(turn.context, request, turn.kind, turn.answer)
                self._came.set()
                return turn.answer
        if any(self._is(expected, request) for expected in self._expected):
            return None
        number = len(self._turns) - len(self._recorded)
        stray = (
            "other" if self._recorded else "last",
            f"call {number} differs from the recorded one",
        )
        if not self._is_parallel:
            raise ApiError("ended", str(self._diverge(*stray)))
        self._stray = self._stray or stray  # or a thread that is ahead of the others
        return None

    def _diverge(self, cause: str, text: str) -> DivergedError:
        self.counts[f"diverged/{cause}"] += 1
        self._diverged = DivergedError(f"the replay failed: {text}", cause)
        self.close(str(self._diverged))
        return self._diverged

    def _add(self, call: _Pending, answer: Answer, kind: Kind | None) -> None:
        before = self._turns[-1].context if self._turns else ()
        self._turns.append(_turn(before, call.request, kind, answer))
        if not call.answer.done():
            call.answer.set_result(answer)

    # where a call goes on

    def _placed(self, call: _Pending) -> ProgramCall:
        """The call as an observation."""
        request = call.request
        given = request.messages
        asked = NextTurn(stop=request.stop, max_tokens=request.max_tokens)
        self._opened = None
        base = self._extended(request)
        if base is None and not self._turns:
            messages = [as_message(one, given[:place]) for place, one in enumerate(given)]
            return ProgramCall(messages, request.tools, asked, request.body)
        if base is not None and base == len(self._turns) - 1:
            start = len(self._turns[base].context)
            messages = [as_message(given[at], given[:at]) for at in range(start, len(given))]
            self.counts["context/extends"] += 1
            return ProgramCall(messages, request.tools, asked, request.body)
        kind, cause, discards = self._explained(call, base)
        self._opened = kind
        self.counts[f"context/{kind or 'resumed'}"] += 1
        if cause:
            self.counts[f"{kind}/{cause}"] += 1
        new = [turn for turn in discards if turn not in self._discarded]
        self._discarded.update(new)
        self.counts["discarded"] += len(new)
        turn = replace(
            asked,
            prompt=tuple(self._references(given)),
            kind=kind,
            cause=cause,
            discards=tuple(new),
            tools=request.tools,
        )
        return ProgramCall([], request.tools, turn, request.body)

    def _extended(self, request: Request) -> int | None:
        """The last turn whose context continues with messages that are not the policy's."""
        given, tools = request.messages, request.tools
        for number in range(len(self._turns) - 1, -1, -1):
            turn = self._turns[number]
            size = len(turn.context)
            if size >= len(given) or turn.request.tools != tools or given[:size] != turn.context:
                continue
            if all(one.role != "assistant" for one in given[size:]):
                return number
        return None

    def _references(self, given: tuple[Given, ...]) -> Iterable[Message | int]:
        """The messages; turns that came back as they were served by their numbers."""
        known = {turn.context[-1]: number for number, turn in enumerate(self._turns)}
        whole = {turn.context: number for number, turn in enumerate(self._turns)}
        for place, one in enumerate(given):
            if one.role == "assistant" and one in known:
                yield whole.get(given[: place + 1], known[one])
            else:
                yield as_message(one, given[:place])

    def _explained(self, call: _Pending, base: int | None) -> tuple[Kind | None, str, list[int]]:
        """Kind and cause of a context, and the turns that the program has discarded by it."""
        given = call.request.messages
        later = range((-1 if base is None else base) + 1, len(self._turns))
        if base is not None:
            size = len(self._turns[base].context)
            extended = [t for t in later if self._turns[t].context[:size] == given[:size]]
            tried = [t for t in later if self._turns[t].kind == "compaction"]
            left = [t for t in {*extended, *tried} if not _quotes(given, self._turns[t])]
            if not extended:
                return None, "", sorted(left)
            if call.beside:
                return "parallel", "", []
            again = [t for t in extended if self._turns[t].context[:-1] == given]
            if again:
                return "retry", "", [t for t in again if not self._is_continued(t)]
            return "edited", "rewound", sorted(left)
        if call.beside:
            return "parallel", "", []
        again = [
            number
            for number, turn in enumerate(self._turns)
            if turn.context[:-1] == given and turn.request.tools == call.request.tools
        ]
        if again:
            return "retry", "", [t for t in again if not self._is_continued(t)]
        return *self._difference(call.request), []

    def _is_continued(self, number: int) -> bool:
        context = self._turns[number].context
        others = (turn.context for turn in self._turns[number + 1 :])
        return any(other[: len(context)] == context for other in others)

    def _difference(self, request: Request) -> tuple[Kind, str]:
        """Differences of the messages from the context with the longest shared prefix."""
        given = request.messages
        shared, held = -1, self._turns[-1]
        for turn in self._turns:
            common = _num_common(turn.context, given)
            if common >= shared:
                shared, held = common, turn
        context = held.context
        if shared == len(context):
            return "edited", "tools" if held.request.tools != request.tools else "assistant"
        if shared == len(given):
            return "edited", "rewound"
        now, then = given[shared], context[shared]
        if shared and then.role == now.role == "assistant":
            return "altered", alteration(now, then)
        if not shared:
            same = now.role == then.role == "system" and given[1:2] == context[1:2]
            return ("edited", "system") if same and len(given) > 1 else ("sub_agent", "")
        kept = [one for one in given[shared:] if one in context[shared:]]
        if len(given) < len(context):
            if kept or any(_quotes(given[shared:], turn) for turn in self._turns):
                return "compaction", ""
            return "sub_agent", ""
        return "edited", now.role


def _shown(request: Request) -> Json:
    """Compared values of a replay: {"messages": [..], "tools": [..]}, for any API."""
    messages = [
        {**given._asdict(), "calls": [call._asdict() for call in given.calls]}
        for given in request.messages
    ]
    return {"messages": messages, "tools": list(request.tools)}


def _num_common(one: Sequence[Given], other: Sequence[Given]) -> int:
    number = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        number += 1
    return number


def _quotes(given: Sequence[Given], turn: _Turn) -> bool:
    """Whether messages that are not the policy's quote the text of a turn."""
    said = turn.context[-1].text.strip()
    if len(said) < MIN_QUOTED:
        return False
    return any(said in one.text for one in given if one.role != "assistant")


class _Handler:
    """The handler that a session is for the server."""

    def __init__(self, session: Session) -> None:
        self.new_id, self.count, self.answer = session.new_id, session.count, session.asked
        self.rewarded, self.resumed = session.rewarded, session.resumed


class Endpoint:
    """One HTTP server for all branches of a process, each with a key of its own."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._server = ApiServer(self._find, lambda: [MODEL])
        self._starting = asyncio.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def port(self) -> int:
        """On loopback, once it has started."""
        return self._server.port

    async def start(self) -> None:
        """Listen on loopback. Idempotent. Raises ConfigError."""
        async with self._starting:
            if not self._server.port:
                await self._server.start()

    def open(
        self,
        key: str = "",
        *,
        after: Session | None = None,
        same: Same | None = None,
        thoughts: Thoughts = "apart",
    ) -> Session:
        """A session for one branch; without a key it gets one. `thoughts` are served apart, or in
        the text, for programs that would drop them, which opens a context each time. With `after`
        its first calls are answered from the record of that session, as long as `same` says of two
        calls, recorded and now, that they are the same: each is {"messages": [..], "tools": [..]}
        in JSON, a message {"role", "text", "thoughts", "calls", "answers", "name"}."""
        if not key:
            key = f"branch-{secrets.token_urlsafe(NUM_KEY_BYTES)}"
        if key in self._sessions:
            raise AgentEnvError(f"the key {key} belongs to another branch")
        session = self._sessions[key] = Session(key, self.port, after, same, thoughts)
        return session

    def adopter(self, session: Session) -> Callable[[socket.socket], Awaitable[None]]:
        """Serves each connection that it is given: every call is of this session, whatever its
        key."""
        return partial(self._server.adopt, _Handler(session))

    def forget(self, session: Session) -> None:
        """Close a session for good; its key is refused from now on."""
        session.close()
        self._counts.update(session.counts)
        self._sessions.pop(session.key, None)

    def stats(self) -> dict[str, float]:
        """Counters of closed sessions."""
        return {f"endpoint/{name}": float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        """Close all sessions and the server."""
        for session in list(self._sessions.values()):
            self.forget(session)
        await self._server.close()

    def _find(self, key: str) -> _Handler:
        session = self._sessions.get(key)
        if session is None:
            raise ApiError("no_key", "no branch has this key, or it has ended")
        return _Handler(session)


MODEL = {
    "id": "policy", "object": "model", "type": "model", "display_name": "policy",
    "owned_by": "agentenv", "created": 0, "created_at": "1970-01-01T00:00:00Z",
}  # fmt: skip


async def shared_endpoint() -> Endpoint:
    """The endpoint of this process, which listens; it is closed with the shared resources."""
    endpoint = shared(("endpoint",), Endpoint)
    await endpoint.start()
    return endpoint
