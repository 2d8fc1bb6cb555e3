"""Says what a frozen web holds: `agentenv snapshot FILE [RUN ...]`.

FILE is a snapshot of `search.snapshot`. Of each RUN (a directory of training or of an evaluation,
or a file of rows with `tool_calls`) it says which of the searches made and pages opened FILE holds,
and lists those that it does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentenv.envs.search.snapshot import MISSED, Snapshot
from agentenv.errors import DataError, ForeignError
from agentenv.pipelines.run.arguments import EXIT_MISSING, Parser
from agentenv.pipelines.run.terminal import View, to_its_end
from agentenv.untrusted import decode


class _Call(Struct):
    name: str
    arguments: dict[str, Any]


class _Row(Struct):
    tool_calls: list[_Call] = []
    error: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all is there, 2 bad input, 3 something was asked for that FILE does
    not hold."""
    parser = Parser(
        prog="agentenv snapshot",
        description="Say what a frozen web holds, and what of a run it covers.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN")
    arguments = parser.parse_args(argv)
    view = View()
    return to_its_end(
        lambda: _tell(arguments.file, arguments.runs, view), view, writing=str(arguments.file)
    )


def _tell(path: Path, runs: Sequence[Path], view: View) -> int:
    with closing(Snapshot(path)) as snapshot:
        snapshot.load()
        head = snapshot.head
        view.say(f"{head.name}, sha256 {snapshot.sha256}")
        view.say(f"results of {head.backend or 'unknown'}, pages by {head.reader or 'unknown'}")
        view.say(f"{snapshot.num_searches} searches, {snapshot.num_pages} pages")
        return _coverage(snapshot, [row for run in runs for row in _rows(run)], view)


def _coverage(snapshot: Snapshot, rows: Sequence[_Row], view: View) -> int:
    """Say what the snapshot holds of what was asked for in these rows; the exit code."""
    calls = [call for row in rows for call in row.tool_calls]
    queries, urls = _asked(calls, "search", "query"), _asked(calls, "open_page", "url")
    found = {query: snapshot.covers(query) for query in queries}
    behind = {url for one in found.values() for url in one or () if url.startswith("http")}
    missing = [f"search {query!r}" for query in queries if found[query] is None]
    missing += [f"page {url}" for url in urls if not snapshot.has_page(url)]
    for what, asked, held in (
        ("searches", queries, [query for query in queries if found[query] is not None]),
        ("pages", urls, [url for url in urls if snapshot.has_page(url)]),
        ("pages behind the results", behind, [url for url in behind if snapshot.has_page(url)]),
    ):
        if asked:
            view.say(f"{what}: {len(held)} of {len(asked)} ({len(held) / len(asked):.1%})")
    # of a rollout that failed for a miss, the call stands in its error alone
    failed_for = dict.fromkeys(str(row.error).partition(MISSED)[2] for row in rows)
    held_now = snapshot.names()
    missing += [one for one in failed_for if one and one not in held_now]
    for one in missing:
        view.say(f"  missing: {one}")
    return EXIT_MISSING if missing else 0


def _asked(calls: Sequence[_Call], tool: str, argument: str) -> list[str]:
    """What calls of the tool asked for, each once."""
    found = (call.arguments.get(argument) for call in calls if call.name == tool)
    return list(dict.fromkeys(str(one).strip() for one in found if one))


def _rows(run: Path) -> Iterator[_Row]:
    """The rows of a file, or of the *.jsonl below a directory."""
    files = sorted(run.rglob("*.jsonl")) if run.is_dir() else [run]
    if not files:
        raise DataError(f"{run} holds no *.jsonl; expected a run, an evaluation or a file of rows")
    for path in files:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                yield decode(line, _Row)
            except ForeignError as error:
                raise DataError(f"{path}, row {number}: {error}; expected a JSON object") from error


if __name__ == "__main__":
    sys.exit(main())
