"""A server of a pool as whoever asks it for turns sees it, and who gives places on servers.

PoolClient (client.py) --acquire--> Seats --> Seat: one server, of which a place is held
                                      |
                             Fleet (fleet.py), or another process that has one
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from math import inf
from typing import Any, Protocol, TypeVar

from agentenv.deadline import Wait, Work, WorkClock
from agentenv.engines.remote.server import BrokenOffError, BusyError, Server, ServerLostError
from agentenv.errors import EngineError
from agentenv.server_config import PoolConfig

LISTEN_S = 1.0  # between two looks at whether requests have gone silent
# Tokens of an event that nobody waits for: what a server samples of a request meanwhile, within
# these bounds. As many may go with a server, and a request whose events take longer than
# PoolConfig.silence_s is lost; each event costs both sides some 50 microseconds.
EVENT_S = 2.0
FEWEST, MOST = 16, 64
SPEAKS_S = EVENT_S + LISTEN_S  # a server that gave a token within so long is not silent
PACE_GAIN = 0.1  # weight of a request in the pace of its server


class Voice:
    """What is heard of one server, of whichever request."""

    def __init__(self) -> None:
        self._heard_s = -inf  # time of the loop
        self._time = asyncio.get_running_loop().time
        self._pace = 0.0  # tokens a second of one request

    @property
    def interval(self) -> int:
        """Tokens of an event that nobody waits for."""
        return min(MOST, max(FEWEST, round(self._pace * EVENT_S)))

    def went(self, pace: float) -> None:
        """A request came to its end that had so many tokens a second behind its first ones. More
        than matters counts as that: events come together where the loop was held up."""
        pace = min(pace, MOST / EVENT_S)
        self._pace += (pace - self._pace) * (PACE_GAIN if self._pace else 1.0)

    def heard(self) -> None:
        """A token has come."""
        self._heard_s = self._time()

    @property
    def speaks(self) -> bool:
        """Whether one came just now."""
        return self._time() - self._heard_s < SPEAKS_S


class Hearing:
    """What is heard of one request on a server; `wait` is its rollout's, while the server is
    paused, and `work` since the last token. `may_wait`: requests wait in the server, of which this
    may be one again, preempted. `problem` says after which silence it was given up."""

    def __init__(self, voice: Voice, clock: WorkClock) -> None:
        self.wait = Wait()
        self.work = Work()
        self.may_wait = False
        self.problem = ""
        self._voice = voice  # of the server
        self._clock = clock
        self._since_s = clock()
        self._has_tokens = False
        self._num_later, self._first_s = 0, 0.0  # tokens behind the first event, and when that came
        self._is_due = False  # its rollout has no time left, unless the server is silent

    def heard(self, num_tokens: int) -> None:
        """An event with so many tokens has come."""
        self._since_s = self._clock()
        if self._has_tokens:
            self._num_later += num_tokens
        else:
            self._has_tokens, self._first_s = True, self._since_s
        self._voice.heard()
        self.work.begin()

    def doubt_s(self) -> float:
        """The rollout has no time left. Where nothing at all is heard of the server, that may be
        the server's fault, which is known after `silence_s`: seconds until it is asked again."""
        if self._voice.speaks:
            return 0.0
        self._is_due = True
        return LISTEN_S

    def is_lost(self, config: PoolConfig) -> bool:
        """Whether it is silent for too long."""
        silence_s = self._clock() - self._since_s
        is_preempted = self.may_wait and self._voice.speaks
        began = self._has_tokens and not is_preempted
        patience_s = config.silence_s if began else config.first_token_s
        if self._is_due:
            patience_s = min(patience_s, config.silence_s)
        if silence_s <= patience_s:
            return False
        what = "no more tokens" if self._has_tokens else "no first token"
        self.problem = f"{what} of a request within {silence_s:.0f} s"
        return True

    def end(self) -> None:
        """The request is over."""
        self.wait.end()
        took_s = self._since_s - self._first_s
        if self._num_later and took_s > 0:
            self._voice.went(self._num_later / took_s)


class Seat:
    """A server and the requests on it. `reason` says why it does not serve; `attempts` are the
    requests that run; while it is `standing`, its weights being replaced, they wait."""

    def __init__(self, server: Server, config: PoolConfig) -> None:
        self.server = server
        self.config = config
        self.doing = f"the server {server.name}"  # of who asks it
        self.reason = ""
        self.attempts: dict[asyncio.Future[Any], Hearing] = {}
        self.counts: Counter[str] = Counter()
        self.standing = False
        self._clock = WorkClock()  # stands still while its weights are being replaced
        self._clock.go()

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def policy_version(self) -> int:
        """Version of the weights that choose its next token, as far as anyone knows."""
        return self.server.policy_version

    @property
    def asleep(self) -> bool:
        """Whether what was on it was broken off since it sleeps."""
        raise NotImplementedError

    def check(self) -> None:
        """Before a request. Raises what ends the part of a turn that the place was for."""
        if self.asleep:  # since the place was given
            raise BrokenOffError(self.reason)

    def hear(self, voice: Voice) -> Hearing:
        """Of a request that it gets now."""
        hearing = Hearing(voice, self._clock)
        if self.standing:
            hearing.wait.begin()
        return hearing

    def listen(self) -> None:
        """Break off the requests that it says nothing of; they, and it, are lost then."""
        for attempt, hearing in self.attempts.items():
            if hearing.is_lost(self.config):
                attempt.cancel()

    def stand(self) -> None:
        """Its weights are being replaced from now on."""
        self.standing = True
        self._clock.stop()
        for hearing in self.attempts.values():
            hearing.wait.begin()

    def go_on(self) -> None:
        """They have been."""
        self.standing = False
        self._clock.go()
        for hearing in self.attempts.values():
            hearing.wait.end()

    def break_off(self) -> None:
        """End what runs on it."""
        for attempt in self.attempts:
            attempt.cancel()


S = TypeVar("S", bound=Seat)


class Seats(Protocol[S]):
    """Gives places on servers, and is told what became of requests."""

    def check_alive(self) -> None:
        """Raises EngineDeadError once no server is left."""
        ...

    async def acquire(self, session: str, order: tuple[int, int], avoid: Collection[S]) -> S:
        """A place on a server that serves; to be given back with `release`. Raises
        EngineDeadError."""
        ...

    def release(self, seat: S) -> None: ...

    def heard(self, seat: S, num_tokens: int) -> None:
        """A request gave more tokens."""
        ...

    def answered(self, seat: S, num_tokens: int, seconds: float) -> None:
        """A request was answered, so long after it was sent."""
        ...

    def completed(self, seat: S) -> None:
        """The part of a turn that the place was for came to its end."""
        ...

    def reset(self, seat: S, error: ServerLostError) -> None:
        """A connection broke off, and the server may be well."""
        ...

    def lose(self, seat: S, error: EngineError) -> None:
        """A request was lost: ServerLostError or ForeignWeightsError."""
        ...

    async def refuse(self, seat: S, error: BusyError) -> str:
        """The server refused a request since it is full. What is wrong with it if it refuses them
        all, by which it is lost; else empty."""
        ...
