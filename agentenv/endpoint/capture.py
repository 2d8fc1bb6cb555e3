"""The calls of a program as the turns of one branch.

    extends the last turn      the messages after it are the observation
    anything else              `NextTurn.prompt`: the whole context, in which a message that was
                               returned exactly as served stands for the tokens of its turn

The rollout renders and compares token ids. This module decides which messages are equal, and the
`Kind` of a context with its cause:

    retry        the same call again, after its answer was lost
    repeated     the same call again, after its answer: a vote
    parallel     it arrived while another call of the session was pending
    altered      a message of the policy was returned changed: trimmed, json_rewritten, arguments,
                 thoughts_dropped, thoughts_changed, call_ids, calls, text
    compaction   it shares the beginning of a context, and the rest is shorter and quotes it
    edited       other messages of a context were changed: system, user, tool, tools, rewound,
                 assistant (inserted, though it was not served)
    sub_agent    a separate conversation

An answer is lost if its connection ended before the reply was written: its turn stays on the tree,
but is not trained. All others are trained, unless those that were abandoned are left out too
(`take_abandoned`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from agentenv.base.disk import own_folder, short_path
from agentenv.base.errors import SHOWN, EnvError, OutageError
from agentenv.base.offload import in_thread
from agentenv.base.types import Constraints, Info, Kind, Message, NextTurn, PastTurn
from agentenv.contract.env import shared
from agentenv.endpoint.difference import compared, difference
from agentenv.endpoint.messages import (
    ERRORS,
    ApiError,
    Given,
    Handed,
    HandedTurn,
    Json,
    Request,
    ServedTurn,
    alteration,
    as_message,
    served,
    turn_of,
    with_thoughts,
)
from agentenv.endpoint.server import ApiServer, Delta
from agentenv.endpoint.structured import fits
from agentenv.text.contexts import num_common

ENDED = "the branch of this key has ended"
NUM_KEY_BYTES = 24
PREFIX = "agentenv-endpoint-"
OUT_OF_ORDER_S = 20.0  # for the next expected call of a replayed program with threads
IN_ORDER_S = 2.0  # for those that may come before a replayed call, in a program without threads
MIN_QUOTED = 8  # minimum characters of a quoted text

BYTES_A_TOKEN = 4  # an estimate
MAX_COUNTS = 500  # names of counters
NO_REFUSALS = ("no_key", "ended", "engine", "engine_dead", "bug")  # their cause is no call
_PLACE = re.compile(r"\[\d+\]")

Normal = Callable[[Json], Json]
Thoughts = Literal["apart", "text"]
Refused = Literal["fail", "count"]

logger = logging.getLogger(__name__)


class CallRefusedError(EnvError):
    """A call of the program was refused."""


class DivergedError(OutageError):
    """A call of a replayed program differs from the recorded one; `cause` names the difference."""

    def __init__(self, text: str, cause: str) -> None:
        super().__init__(text)
        self.cause = cause


class ProgramCall(NamedTuple):
    """A call as an observation: the new messages, the tools, and the start of the turn."""

    messages: list[Message]
    tools: tuple[Json, ...]
    turn: NextTurn


class _Pending:
    """A pending call. `is_parallel`: it arrived while another one was pending. `num_waiting`: the
    connections that wait for its answer."""

    def __init__(self, request: Request, *, is_parallel: bool) -> None:
        self.request, self.is_parallel = request, is_parallel
        self.answer: asyncio.Future[ServedTurn] = asyncio.get_running_loop().create_future()
        self.num_waiting = 0

    async def answered(self) -> ServedTurn:
        """Its answer. A call for which no connection waits any more is not answered."""
        self.num_waiting += 1
        try:
            return await (asyncio.shield(self.answer) if self.request.repeats else self.answer)
        finally:
            self.num_waiting -= 1
            if not (self.num_waiting or self.request.repeats or self.answer.done()):
                self.answer.cancel()


def _turn(before: tuple[Given, ...], request: Request, answer: ServedTurn) -> HandedTurn:
    """An answered call; messages that it shares with `before` are stored once."""
    same = num_common(before, request.messages)
    request.messages, request.body = (*before[:same], *request.messages[same:]), {}
    return HandedTurn(request, answer, (*request.messages, answer.message))


class CaptureSession:
    """The calls of one branch, one at a time in order of arrival. `port` is the server's. `is_new`:
    whether a note of a kind is the first one of the process.

    `thoughts` are served separately or, for programs that would drop them and so open a context
    each time, within the text. A call that is `refused` fails the branch, or is only counted. The
    engine can force calls, or also the form of replies (`constraints`). With `after`, its first
    calls are answered from the record of that session, as long as `normal` gives the same for both:
    a call is {"messages": [..], "tools": [..]} in JSON, a message {"role", "text", "thoughts",
    "calls", "answers", "name"}.
    """

    def __init__(
        self,
        key: str,
        port: int,
        is_new: Callable[[str], bool],
        *,
        after: CaptureSession | None = None,
        normal: Normal | None = None,
        thoughts: Thoughts = "apart",
        refused: Refused = "fail",
        constraints: Constraints = "none",
    ) -> None:
        self._constraints: Constraints = constraints if after is None else after._constraints
        self.key, self.port, self._is_new = key, port, is_new
        self.refusals: Refused = refused if after is None else after.refusals
        self.thoughts: Thoughts = thoughts if after is None else after.thoughts
        self.counts: Counter[str] = Counter()
        self._turns: list[HandedTurn] = []
        self.handed: Handed = {}
        self._ids = count()
        self._numbers: dict[str, int] = {}  # of the turns, by the id of their reply
        self._lost: set[int] = set()  # turns whose reply was not written
        self._gone: set[str] = set()  # ids of replies that cannot be written any more
        self._written: set[str] = set()  # ids of replies; of a repeated call one may be lost too
        self._reported: set[int] = set()  # lost turns that the rollout knows
        self._keyed: dict[str, _Pending] = {}  # by the key of idempotency
        self._parts: dict[str, list[Request]] = {}  # a call of each choice, by the id of the reply
        self._waiting: deque[_Pending] = deque()
        self._current: _Pending | None = None
        self._came = asyncio.Event()
        self._closed, self._error = "", "ended"
        self._recorded: dict[int, HandedTurn] = {}  # not yet requested by the replayed program
        self._expected: list[Request] = []  # its calls after those; the first one is unanswered
        # cause and text of an unexpected call, and how long the expected one may take
        self._stray: tuple[tuple[str, str], float] | None = None
        self._is_parallel = False  # its calls arrived while others were pending
        if after is not None:
            self._follow(after)
        self._normal: Normal = normal or (lambda call: call)
        self._problem: EnvError | None = None
        self.posted: Json | None = None  # the reward that the program gave itself
        self._rewarded = asyncio.Event()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with URL and key for the clients of both APIs."""
        url = f"http://127.0.0.1:{self.port}"
        return {
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": self.key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": self.key,
        }  # fmt: skip

    # for the environment

    async def next(self) -> ProgramCall:
        """Wait for the next call. Raises EnvError once the session is closed, and DivergedError
        when a replay differs."""
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
        """Return when the replay has reached the pending call of the recorded session. Raises
        DivergedError."""
        while True:
            self._check_open()
            if (found := self._replay_pending()) is not None:
                break
            self._came.clear()
            stray, within_s = self._stray or (None, None)
            try:
                async with asyncio.timeout(within_s):
                    await self._came.wait()
            except TimeoutError:
                assert stray is not None
                raise self._diverge(*stray) from None
        self._waiting.remove(found)
        self._current, self._expected = found, []

    def check(self) -> None:
        """Raise the problem that ended the branch, if any: a refusal, or a replay that differs; its
        info has the counts of the calls."""
        if self._problem is not None:
            self._problem.info = self.info
            raise self._problem

    @property
    def info(self) -> Info:
        """The counts of the calls, for a leaf."""
        return {"endpoint": dict(self.counts)}

    def _check_open(self) -> None:
        self.check()
        if self._closed:
            raise EnvError(self._closed)

    def reply(self, action: Message) -> None:
        """Reply to the call from `next` with the rollout's action."""
        call, turn = self._current, action.turn
        if call is None or turn is None:
            raise EnvError("no call of the program waits for an answer")
        if self.thoughts == "text" and turn.thoughts:
            turn = replace(turn, thoughts="", text=with_thoughts(turn.thoughts, turn.text))
        found = served(turn, action.tool_calls, str(len(self._turns)), call.request)
        if turn.kept:
            self.counts.update(f"calls_in_text/{why}" for why in turn.kept)
        message, schema = found.message, call.request.schema
        if schema is not None and not message.calls and not fits(message.text, schema):
            self.counts["invalid_output"] += 1
        self._add(call, found)

    async def reward(self) -> Json | None:
        """The reward that the program posted, if any."""
        await self._rewarded.wait()
        return self.posted

    def close(self, why: str = ENDED, error: str = "ended") -> None:
        """Pending and later calls get an error, named as in ERRORS. Idempotent."""
        if not self._closed:
            self._closed, self._error = why, error
        for call in (*self._waiting, *filter(None, (self._current,))):
            if not call.answer.done():
                call.answer.set_exception(ApiError(self._error, self._closed))
                call.answer.exception()  # its client may be gone
        self._waiting.clear()
        self._came.set()

    # for the server, as its `Handler`

    def new_id(self) -> str:
        return f"{len(self._turns)}_{next(self._ids)}"

    async def count(self, request: Request) -> int:
        """The tokens of the longest known beginning, and an estimate of the rest."""
        best, rest = 0, request.messages
        for turn in self._turns:
            known, answer = turn.context, turn.answer
            if request.messages[: len(known)] == known and answer.num_prompt_tokens > best:
                best, rest = answer.num_prompt_tokens + answer.num_tokens, rest[len(known) :]
        shown = sum(len(one.text.encode()) + 20 for one in rest)
        tools = 0 if best else len(json.dumps(request.tools))
        return best + (shown + tools) // BYTES_A_TOKEN + 1

    async def answer(self, request: Request, delta: Delta | None) -> Sequence[ServedTurn]:
        """Wait for the rollout's answer to a call. Raises ApiError."""
        if request.logprobs or request.raw:
            key = "logprobs" if request.logprobs else "raw"
            raise ApiError("unsupported", f"{key} is not supported in a run; omit it", key)
        if request.forced and self._constraints == "none":
            what = "this engine cannot force a call; use auto or response_format, or vllm or sglang"
            raise ApiError("unsupported", what, "tool_choice")
        if self._closed:
            raise ApiError(self._error, self._closed)
        if request.n > 1:
            return await self._choices(request)
        self.counts["calls"] += 1
        self._note_ignored(request)
        call = self._keyed.get(request.repeats) if request.repeats else None
        if call is not None:
            if not self._is(call.request, request):
                what = "its Idempotency-Key belongs to another call; send a new one with each"
                raise ApiError("invalid", what, "Idempotency-Key")
            request.id = call.request.id
            return [await call.answered()]
        is_led = bool(self._recorded or self._expected)
        replayed = self._replayed(request) if is_led else None
        held = (*self._waiting, *filter(None, (self._current,)))
        others = bool(self._expected) or any(one.num_waiting for one in held)
        call = _Pending(request, is_parallel=others)
        if request.repeats:
            self._keyed[request.repeats] = call
        if replayed is not None:
            call.answer.set_result(replayed)
            await self._in_order(request)
            return [replayed]
        self._is_parallel |= others
        self._waiting.append(call)
        self._came.set()
        return [await call.answered()]

    async def _choices(self, request: Request) -> Sequence[ServedTurn]:
        """The answers to `n` concurrent calls."""
        again = request.repeats
        self._parts[request.id] = [
            replace(request, n=1, id=self.new_id(), repeats=again and f"{again} {index}")
            for index in range(request.n)
        ]
        calls = (self.answer(one, None) for one in self._parts[request.id])
        return [turn for (turn,) in await asyncio.gather(*calls)]

    def written(self, request: Request) -> None:
        """Its turn is trained."""
        for part in self._parts.pop(request.id, ()):
            self.written(part)
        self._written.add(request.id)
        self._lost.discard(self._numbers.get(request.id, -1))

    def lost(self, request: Request) -> None:
        """Its turn, also one that is still sampled, is not trained, unless it was written to
        another connection."""
        for part in self._parts.pop(request.id, ()):
            self.lost(part)
        self._gone.add(request.id)
        if request.id in self._numbers and request.id not in self._written:
            self._lost.add(self._numbers[request.id])

    def refused(self, error: ApiError) -> None:
        """Count an error of a call. With `refusals` "fail" it ends the branch."""
        if error.name in NO_REFUSALS:
            return
        key = _PLACE.sub("", error.param or "")
        kind = f"refused/{ERRORS[error.name][2]}" + (f"/{key}" if key else "")
        self.counts[kind] += 1
        where = f"{error.param}: " if error.param and error.param not in str(error) else ""
        text = f"a call of the program was refused: {where}{error}"
        if self._is_new(kind):
            remedy = (
                "" if self.refusals == "fail" else "; the program goes on, and its answer is graded"
            )
            logger.warning("%s%s", text, remedy, extra=SHOWN)
        if self.refusals == "fail" and self._problem is None:
            self._problem = CallRefusedError(
                f'{text}; to go on after refusals, set env.kwargs.program.refused = "count"'
            )
            self._came.set()

    def _note_ignored(self, request: Request) -> None:
        """Count the keys of a call that have no effect."""
        found = request.ignored | request.own_sampling
        if not found:
            return
        self.counts.update(f"ignored/{key}" for key in found)
        new = sorted(key for key in found if self._is_new(f"ignored/{key}"))
        if new:
            text = "calls of the program have keys or parts without an effect in a run: %s"
            own = request.own_sampling and "; its sampling is that of the configuration"
            logger.warning(text + (own or ""), ", ".join(new), extra=SHOWN)

    def rewarded(self, body: Json) -> None:
        """Store a reward that the program posts; the last one counts. Raises ApiError."""
        if self._closed and self._error == "ended":  # truncated episodes may still be scored
            raise ApiError("ended", self._closed)
        reward = body.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not isfinite(reward):
            raise ApiError("invalid", 'expected {"reward": NUMBER}', "reward")
        self.posted = body
        self._rewarded.set()

    # a replay

    def _follow(self, after: CaptureSession) -> None:
        """Take over the state of another session once the program has repeated its calls, in any
        order of its threads."""
        self._turns = list(after._turns)
        self._recorded = {n: one for n, one in enumerate(after._turns) if n not in after._lost}
        self._lost, self._reported = set(after._lost), set(after._reported)
        self._is_parallel = after._is_parallel
        repeated = ("refused/", "ignored/")  # counted again during the replay
        kept = {name for name in after.counts if "/" in name and not name.startswith(repeated)}
        self.counts.update({name: after.counts[name] for name in kept})
        current = (after._current,) if after._current else ()
        self._expected = [call.request for call in (*current, *after._waiting)]

    def _replay_pending(self) -> _Pending | None:
        """The pending call, once all calls before it have been replayed."""
        if self._recorded or not self._expected:
            return None
        waiting = (call for call in self._waiting if not call.answer.cancelled())
        return next((call for call in waiting if self._is(self._expected[0], call.request)), None)

    def _is(self, recorded: Request, now: Request) -> bool:
        """Whether two calls are equal except for random parts. Fast for different calls."""
        if len(recorded.messages) != len(now.messages) or len(recorded.tools) != len(now.tools):
            return False
        one, other = compared(recorded), compared(now)
        return one == other or self._normal(one) == self._normal(other)

    def _replayed(self, request: Request) -> ServedTurn | None:
        """The answer to the equal call of the recorded session; None for a call that must wait."""
        for number, turn in self._recorded.items():
            if self._is(turn.request, request):
                del self._recorded[number]
                self.counts["replayed"] += 1
                self._turns[number] = _turn(turn.context, request, turn.answer)
                self._hand(request, number)
                self._came.set()
                return turn.answer
        if any(self._is(expected, request) for expected in self._expected):
            return None
        number = min(self._recorded, default=len(self._turns))
        then = self._recorded[number].request if self._recorded else self._expected[0]
        differs = difference(self._normal(compared(then)), self._normal(compared(request)))
        text = f"call {number} differs from the recorded one: {differs}"
        stray = "other" if self._recorded else "last", text
        within_s = OUT_OF_ORDER_S if self._is_parallel else IN_ORDER_S
        self._stray = self._stray or (stray, within_s)  # unless it is a thread ahead of others
        return None

    async def _in_order(self, request: Request) -> None:
        """Wait for the calls that were answered before this one, since a program with threads may
        note which answer came first; not for long, since it may also ask one after the other."""
        number = self._numbers[request.id]
        with suppress(TimeoutError):
            async with asyncio.timeout(IN_ORDER_S):
                while min(self._recorded, default=number) < number and not self._closed:
                    self._came.clear()
                    await self._came.wait()

    def _diverge(self, cause: str, text: str) -> DivergedError:
        self.counts[f"diverged/{cause}"] += 1
        diverged = self._problem = DivergedError(f"the replay failed: {text}", cause)
        self.close(str(diverged))
        return diverged

    def _add(self, call: _Pending, answer: ServedTurn) -> None:
        before = self._turns[-1].context if self._turns else ()
        self._turns.append(_turn(before, call.request, answer))
        self._hand(call.request, len(self._turns) - 1)
        if not call.answer.done():
            call.answer.set_result(answer)

    def _hand(self, request: Request, number: int) -> None:
        self._numbers[request.id] = number
        self.handed[request.id] = self._turns[number]
        if request.id in self._gone:
            self._lost.add(number)

    def take_lost(self) -> tuple[int, ...]:
        """The turns whose answers were lost, each once."""
        new = sorted(self._lost - self._reported)
        self._reported |= self._lost
        self.counts["discarded"] += len(new)
        return tuple(new)

    def take_abandoned(self) -> tuple[int, ...]:
        """At the end of the branch, the turns in whose place the program continued with another:
        no call has their answer as it was served, and each call that goes on after the same served
        answer (without one, after the same messages) has another served answer next."""
        calls = [turn.request.messages for turn in self._turns]
        calls += [call.request.messages for call in (self._current, *self._waiting) if call]
        said = {turn.answer.message for turn in self._turns}
        unused = said - {one for call in calls for one in call}
        found = []
        for number, turn in enumerate(self._turns[:-1]):
            if turn.answer.message in unused and number not in self._lost:
                then = _next_answers(_point(turn.request.messages, said), calls)
                found += [number] if set() < then <= said else []
        self.counts["abandoned"] += len(found)
        return tuple(found)

    # the place where a call continues

    def _placed(self, call: _Pending) -> ProgramCall:
        """The call as an observation."""
        request = call.request
        given = request.messages
        next_turn = turn_of(request, self._constraints)
        base = self._extended(request)
        if base is None and not self._turns:
            messages = [as_message(one, given[:place]) for place, one in enumerate(given)]
            return ProgramCall(messages, request.tools, next_turn)
        if base is not None and base == len(self._turns) - 1:
            start = len(self._turns[base].context)
            messages = [as_message(given[at], given[:at]) for at in range(start, len(given))]
            self.counts["context/extends"] += 1
            return ProgramCall(messages, request.tools, next_turn)
        kind, cause = self._explained(call, base)
        self.counts[f"context/{kind or 'resumed'}"] += 1
        if cause:
            self.counts[f"{kind}/{cause}"] += 1
        turn = replace(
            next_turn,
            prompt=tuple(self._references(given)),
            kind=kind,
            cause=cause,
            discards=self.take_lost(),
            tools=request.tools,
        )
        return ProgramCall([], request.tools, turn)

    def _extended(self, request: Request) -> int | None:
        """The last turn whose context the request continues with messages of others than the
        policy."""
        given, tools = request.messages, request.tools
        for number in range(len(self._turns) - 1, -1, -1):
            turn = self._turns[number]
            size = len(turn.context)
            if size >= len(given) or turn.request.tools != tools or given[:size] != turn.context:
                continue
            if all(one.role != "assistant" for one in given[size:]):
                request.messages = (*turn.context, *given[size:])  # shared, and compared faster
                return number
        return None

    def _references(self, given: tuple[Given, ...]) -> Iterable[Message | PastTurn]:
        """The messages; a turn that was returned as served becomes its number."""
        known = {turn.context[-1]: number for number, turn in enumerate(self._turns)}
        whole = {turn.context: number for number, turn in enumerate(self._turns)}
        for place, one in enumerate(given):
            if one.role == "assistant" and one in known:
                yield PastTurn(whole.get(given[: place + 1], known[one]))
            else:
                yield as_message(one, given[:place])

    def _explained(self, call: _Pending, base: int | None) -> tuple[Kind | None, str]:
        """Kind and cause of a context."""
        given, tools = call.request.messages, call.request.tools
        if base is not None:
            context = self._turns[base].context
            later = self._turns[base + 1 :]
            if all(turn.context[: len(context)] != context for turn in later):
                return None, ""
        if call.is_parallel:
            return "parallel", ""
        same = {
            number
            for number, turn in enumerate(self._turns)
            if turn.context[:-1] == given and turn.request.tools == tools
        }
        if same:
            return "retry" if same <= self._lost else "repeated", ""
        return ("edited", "rewound") if base is not None else self._difference(call.request)

    def _difference(self, request: Request) -> tuple[Kind, str]:
        """Differences of the messages from the context with the longest shared prefix."""
        given = request.messages
        shared, held = -1, self._turns[-1]
        for turn in self._turns:
            common = num_common(turn.context, given)
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
        if then.role == now.role == "user" and _grown(now.text, then.text):
            return "edited", "user"
        if not shared:
            same = now.role == then.role == "system" and given[1:2] == context[1:2]
            return ("edited", "system") if same and len(given) > 1 else ("sub_agent", "")
        kept = [one for one in given[shared:] if one in context[shared:]]
        if len(given) < len(context):
            if kept or any(_quotes(given[shared:], turn) for turn in self._turns):
                return "compaction", ""
            return "sub_agent", ""
        return "edited", now.role


def _point(messages: tuple[Given, ...], said: set[Given]) -> tuple[Given, ...]:
    """The messages up to the last one that was served; all, if there is none."""
    sizes = (size for size in range(len(messages), 0, -1) if messages[size - 1] in said)
    return messages[: next(sizes, len(messages))]


def _next_answers(point: tuple[Given, ...], calls: Iterable[tuple[Given, ...]]) -> set[Given]:
    """The first messages of the policy after the same beginning."""
    size = len(point)
    rests = [call[size:] for call in calls if call[:size] == point]
    return {one for rest in rests for one in [o for o in rest if o.role == "assistant"][:1]}


def _grown(now: str, then: str) -> bool:
    """Whether something was inserted into the text, as by agents whose history is one message."""
    start = num_common(now, then)
    return bool(then) and len(now) > len(then) and now.endswith(then[start:])


def _quotes(given: Sequence[Given], turn: HandedTurn) -> bool:
    """Whether messages of others than the policy quote the text of a turn."""
    quoted = turn.context[-1].text.strip()
    if len(quoted) < MIN_QUOTED:
        return False
    return any(quoted in one.text for one in given if one.role != "assistant")


class Endpoint:
    """One HTTP server for all branches of a process, each with its own key."""

    def __init__(self) -> None:
        self._sessions: dict[str, CaptureSession] = {}
        self._server = ApiServer(self._find, lambda: [MODEL])
        self._starting = asyncio.Lock()
        self._counts: Counter[str] = Counter()
        self._noted: set[str] = set()
        self._kept = ExitStack()
        self.socket = Path()  # the Unix socket of programs in sandboxes, after `start`

    @property
    def port(self) -> int:
        """The port on loopback, after `start`."""
        return self._server.port

    async def start(self) -> None:
        """Listen on loopback and at a Unix socket. Idempotent. Raises ConfigError."""
        async with self._starting:
            if not self._server.port:
                await self._server.start(path=await in_thread(self._make_folder))
                await in_thread(self.socket.chmod, 0o666)  # programs may have other users

    def _make_folder(self) -> str:
        """Create the folder of the socket; returns a short path of the socket. Blocks."""
        self.socket = self._kept.enter_context(own_folder(None, PREFIX)) / "socket"
        return self._kept.enter_context(short_path(self.socket))

    def open(self, **settings: Any) -> CaptureSession:
        """A session for one branch, with a key of its own and settings of `CaptureSession`."""
        key = f"branch-{secrets.token_urlsafe(NUM_KEY_BYTES)}"
        session = self._sessions[key] = CaptureSession(key, self.port, self._is_new, **settings)
        return session

    def _is_new(self, note: str) -> bool:
        """Whether a note is the first of its kind."""
        is_new = note not in self._noted
        self._noted.add(note)
        return is_new

    def forget(self, session: CaptureSession) -> None:
        """Close a session; from now on its key is rejected."""
        session.close()
        for name, number in session.counts.items():  # a program may send any number of keys
            known = name in self._counts or len(self._counts) < MAX_COUNTS
            self._counts[name if known else f"{name.partition('/')[0]}/other"] += number
        self._sessions.pop(session.key, None)

    def stats(self) -> dict[str, float]:
        """Counters of closed sessions."""
        return {f"endpoint/{name}": float(count) for name, count in self._counts.items()}

    async def close(self) -> None:
        """Close all sessions and the server."""
        for session in list(self._sessions.values()):
            self.forget(session)
        await self._server.close()
        await in_thread(self._kept.close)

    def _find(self, key: str) -> CaptureSession:
        session = self._sessions.get(key)
        if session is None:
            raise ApiError("no_key", "no branch has this key, or it has ended; send OPENAI_API_KEY")
        return session


MODEL = {
    "id": "policy", "object": "model", "type": "model", "display_name": "policy",
    "owned_by": "agentenv", "created": 0, "created_at": "1970-01-01T00:00:00Z",
}  # fmt: skip


async def shared_endpoint() -> Endpoint:
    """The listening endpoint of this process; it is closed with the shared resources."""
    endpoint = shared(("endpoint",), Endpoint)
    await endpoint.start()
    return endpoint
