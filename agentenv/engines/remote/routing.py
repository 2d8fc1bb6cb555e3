"""Location of a session's prefixes: data-parallel ranks, and headers of routers."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from urllib.parse import quote

SESSION_HEADER, RANK_HEADER = "X-Session-ID", "X-data-parallel-rank"
MAX_SESSIONS = 65536  # with a remembered rank
MAX_SESSION_CHARS = 200  # servers and proxies limit headers to a few kB
PLAIN = re.compile(r"[!-$&-~]+( +[!-$&-~]+)*")  # valid in a header, except %


class Ranks:
    """Data-parallel ranks behind one URL, each with its own prefix cache: a session stays on one
    rank, the least loaded one at its start."""

    def __init__(self) -> None:
        self.count = 1
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._num_running: Counter[int] = Counter()

    @contextmanager
    def take(self, session: str) -> Iterator[int | None]:
        """The rank for a request; None: the server chooses."""
        if self.count == 1 or not session:
            yield None
            return
        rank = self._homes.get(session, self.count)
        if rank >= self.count:
            rank = min(range(self.count), key=self._num_running.__getitem__)
        self._homes[session] = rank
        self._homes.move_to_end(session)
        if len(self._homes) > MAX_SESSIONS:
            self._homes.popitem(last=False)
        self._num_running[rank] += 1
        try:
            yield rank
        finally:
            self._num_running[rank] -= 1


def routing(session: str, rank: int | None) -> dict[str, str]:
    """Headers by which routers, and servers with ranks, find the prefixes of a session. A name that
    is invalid in a header is percent-encoded, and a long one is hashed."""
    name = session if PLAIN.fullmatch(session) else quote(session, errors="surrogatepass")
    if len(name) > MAX_SESSION_CHARS:
        name = blake2b(name.encode(), digest_size=16).hexdigest()
    headers = {SESSION_HEADER: name} if session else {}
    return headers if rank is None else headers | {RANK_HEADER: str(rank)}
