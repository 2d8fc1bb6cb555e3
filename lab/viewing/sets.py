"""The page of a sweep: its runs with their state and health. Each run links to its own page, served
by the same server."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from aiohttp import web

from agentenv.base.errors import DataError
from agentenv.base.offload import in_thread
from agentenv.evaluation.sweep import START, SweepRun, read_made, runs_of
from agentenv.lab.viewing.folder import Folder
from agentenv.lab.viewing.page import PageServer

COLUMNS = ("arm", "seed", "state", "updates", "health")
RELOAD_S = 30
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{reload}">
<title>{name}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/viewer.css">
</head>
<body><main>
<div class="about"><b>{name}</b><span class="muted">{about}</span></div>
<section class="card scroll"><table class="plain list">
<thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody>
</table></section>
<p>To compare the finished runs: <code>agentenv compare {path}</code></p>
</main></body>
</html>
"""


class SetServer(PageServer):
    """Serves the folder of a sweep. Raises ConfigError for another folder."""

    def __init__(self, path: Path, port: int = 0) -> None:
        super().__init__(path, port)
        read_made(path)
        self._folders: dict[Path, Folder] = {}

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = super().app()
        for path, handler in (
            ("", super()._page), ("static/{name}", self._static), ("api/{path:.+}", self._answer),
        ):  # fmt: skip
            app.router.add_get(f"/runs/{{arm}}/{{seed}}/{path}", handler)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        response = await super()._page(request)
        response.body = (await in_thread(self._text)).encode()
        return response

    def _folder(self, request: web.Request) -> Folder:
        arm, seed = request.match_info.get("arm"), request.match_info.get("seed")
        for run in self._runs():
            if (arm, seed) == (run.arm, str(run.seed)) and run.state() != "new":
                return self._folder_of(run)
        raise DataError(f"{self.path}: no run of arm {arm}, seed {seed} has begun")

    def _folder_of(self, run: SweepRun) -> Folder:
        if run.path not in self._folders:
            self._folders[run.path] = Folder(run.path)
        return self._folders[run.path]

    def _runs(self) -> list[SweepRun]:
        return sorted(runs_of(self.path, read_made(self.path)), key=lambda run: run.arm != START)

    def _text(self) -> str:
        """The page as HTML."""
        made, runs = read_made(self.path), self._runs()
        num_done = sum(run.state() == "finished" for run in runs)
        return PAGE.format(
            reload=RELOAD_S,
            name=escape(self.path.resolve().name),
            about=f"{num_done} of {len(runs)} runs finished; {escape(made.config)}",
            heads="".join(f"<th>{one}</th>" for one in COLUMNS),
            rows="\n".join(_row(cells) for cells in map(self._cells, runs)),
            path=escape(str(self.path)),
        )

    def _cells(self, run: SweepRun) -> Iterator[str]:
        """The cells of a run, as HTML."""
        arm = escape(run.arm)
        if run.state() == "new":
            yield from (arm, str(run.seed), "waits", "", "")
            return
        yield f'<a href="runs/{arm}/{run.seed}/">{arm}</a>'
        yield str(run.seed)
        folder = self._folder_of(run)
        state, health = folder.status()["is"], folder.health()
        yield f'<span class="status status-{state}"><i></i>{state}</span>'
        rows = [row for row in folder.metrics()["rows"] if isinstance(row, dict)]
        yield str(len({row["step"] for row in rows if "rollout/tool_calls" in row}))
        yield "" if health is None else escape(health.text)


def _row(cells: Iterator[str]) -> str:
    *figures, health = cells
    written = "".join(f"<td>{cell}</td>" for cell in figures)
    return f'<tr>{written}<td class="wide">{health}</td></tr>'
