"""An engine in the controller's process, asked by a rollout worker over their link.

    worker   LinkedEngine.generate --Sample-->  Turns   controller: one coroutine a turn
                  ^                                |
                  +--- Tokens, Stand, Turn, Refused

For engines that are no pool of servers: the embedded one and the scripted one; and for servers that
only one process may ask (PooledEngineConfig.is_shared).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agentenv.cluster.messages import Quit, Refused, Sample, Stand, Tokens, Turn, pack
from agentenv.deadline import ToldClock, Wait, work_clock, working
from agentenv.engine import Engine
from agentenv.errors import EngineError
from agentenv.link import Link
from agentenv.tree import Prefix, packed_ids
from agentenv.types import Chunk, Completion, SamplingParams
from agentenv.worker_group import named, raised


class _Pending:
    """A turn that was asked for."""

    def __init__(self, on_tokens: Callable[[Chunk], None] | None) -> None:
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.on_tokens = on_tokens
        self.wait = Wait()
        self.clock = work_clock()


class LinkedEngine:
    """The worker's end, an Engine. `hear` takes the controller's messages about turns; their
    receiver sets `policy_version`."""

    def __init__(self, link: Link) -> None:
        self.policy_version = 0
        self._link = link
        self._pending: dict[int, _Pending] = {}
        self._num_asked = 0

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
        """See Engine.generate."""
        number = self._num_asked = self._num_asked + 1
        ids = prompt_ids.joined() if isinstance(prompt_ids, Prefix) else packed_ids(prompt_ids)
        listens = on_tokens is not None
        pending = self._pending[number] = _Pending(on_tokens)
        self._link.send(
            pack(Sample(number, ids.tobytes(), sampling, session, listens, stream_interval, order))
        )
        try:
            return await pending.done
        except asyncio.CancelledError:
            self._link.send(pack(Quit(number)))
            raise
        finally:
            pending.wait.end()
            del self._pending[number]

    def hear(self, said: Tokens | Stand | Turn | Refused) -> None:
        """Handle a message about a turn; ignored if the turn is not wanted any more."""
        pending = self._pending.get(said.number)
        if pending is None or pending.done.done():
            return
        match said:
            case Tokens():
                assert pending.on_tokens is not None
                pending.on_tokens(said.chunk)
            case Stand():
                (pending.wait.begin if said.stands else pending.wait.end)()
                if said.lost_s and pending.clock is not None:
                    pending.clock.lose(said.lost_s)
            case Turn():
                pending.done.set_result(said.completion)
            case Refused():
                error = raised(said.kind, said.text)
                if isinstance(error, EngineError) and said.is_final:
                    error.is_final = True
                pending.done.set_exception(error)

    async def load_weights(self, source: Path, policy_version: int) -> None:
        raise NotImplementedError("the controller loads weights")

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        """The engine itself goes on."""


class Turns:
    """The controller's end: the turns that one worker has asked for."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine, self._link = engine, link
        self._running: dict[int, asyncio.Task[None]] = {}

    def sample(self, asked: Sample) -> None:
        """Begin a turn."""
        self._running[asked.number] = asyncio.create_task(self._sample(asked))

    def quit(self, number: int) -> None:
        """Abort a turn, if it runs."""
        if number in self._running:
            self._running[number].cancel()

    async def close(self) -> None:
        """Abort all turns."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, asked: Sample) -> None:
        said: Turn | Refused
        clock = ToldClock(partial(self._stand, asked.number))
        try:
            with working(clock):
                completion = await self._engine.generate(
                    memoryview(asked.prompt).cast("i").tolist(),
                    asked.sampling,
                    session=asked.session,
                    on_tokens=partial(self._tokens, asked.number) if asked.listens else None,
                    stream_interval=asked.stream_interval,
                    order=asked.order,
                )
                clock.tell = None
            said = Turn(asked.number, completion)
        except Exception as error:  # the rollout raises it
            said = Refused(asked.number, *named(error), is_final=getattr(error, "is_final", False))
        finally:
            clock.tell = None
            del self._running[asked.number]
        self._link.send(pack(said))

    def _tokens(self, number: int, chunk: Chunk) -> None:
        self._link.send(pack(Tokens(number, chunk)))

    def _stand(self, number: int, stands: bool, lost_s: float) -> None:
        self._link.send(pack(Stand(number, stands, lost_s)))
