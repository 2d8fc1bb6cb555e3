"""The page of a sweep: its runs with their state, figures and health, and the last comparison. Each
run links to its own page, served by the same server."""

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

PICTURE = "comparison.png"  # of `agentenv compare`
COLUMNS = ("arm", "seed", "state", "updates", "calls", "success", "health")
THEME = """const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = isDark ? "dark" : "light";
"""
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
<script src="theme.js"></script>
</head>
<body><main>
<div class="about"><b>{name}</b><span class="muted">{about}</span></div>
<section class="card scroll"><table class="plain list">
<thead><tr>{heads}</tr></thead>
<tbody>{rows}</tbody>
</table></section>
<section class="card">{comparison}</section>
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
        app.router.add_get("/theme.js", self._theme)
        app.router.add_get(f"/{PICTURE}", self._picture)
        for path, handler in (
            ("", super()._page), ("static/{name}", self._static), ("api/{path:.+}", self._answer),
        ):  # fmt: skip
            app.router.add_get(f"/runs/{{arm}}/{{seed}}/{path}", handler)
        return app

    async def _page(self, request: web.Request) -> web.Response:
        response = await super()._page(request)
        response.body = (await in_thread(self._text)).encode()
        return response

    async def _theme(self, request: web.Request) -> web.Response:
        return web.Response(text=THEME, content_type="text/javascript")

    async def _picture(self, request: web.Request) -> web.Response:
        try:
            body = await in_thread((self.path / PICTURE).read_bytes)
        except FileNotFoundError:
            raise web.HTTPNotFound from None
        return web.Response(body=body, content_type="image/png")

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
        command = f"agentenv compare {escape(str(self.path))}"
        comparison = f"To compare the finished runs: <code>{command}</code>"
        if (self.path / PICTURE).is_file():
            comparison = f'<img src="{PICTURE}" width="100%" alt="success against tool calls">'
        return PAGE.format(
            reload=RELOAD_S,
            name=escape(self.path.resolve().name),
            about=f"{num_done} of {len(runs)} runs finished; {escape(made.config)}",
            heads="".join(f"<th>{one}</th>" for one in COLUMNS),
            rows="\n".join(_row(cells) for cells in map(self._cells, runs)),
            comparison=comparison,
        )

    def _cells(self, run: SweepRun) -> Iterator[str]:
        """The cells of a run, as HTML."""
        arm = escape(run.arm)
        if run.state() == "new":
            yield from (arm, str(run.seed), "waits", "", "", "", "")
            return
        yield f'<a href="runs/{arm}/{run.seed}/">{arm}</a>'
        yield str(run.seed)
        folder = self._folder_of(run)
        state, health = folder.status()["is"], folder.health()
        yield f'<span class="status status-{state}"><i></i>{state}</span>'
        rows = [row for row in folder.metrics()["rows"] if isinstance(row, dict)]
        updates = {row["step"]: row for row in rows if "rollout/tool_calls" in row}
        yield str(len(updates))
        yield f"{sum(int(row['rollout/tool_calls']) for row in updates.values()):,}"
        found = [one for row in rows for key, one in row.items() if _is_success(key)]
        yield f"{found[-1]:.3f}" if found else ""
        yield "" if health is None else escape(health.text)


def _is_success(key: str) -> bool:
    """Whether a metric is the success of an evaluation: eval/SET/success."""
    parts = key.split("/")
    return len(parts) == 3 and parts[0] == "eval" and parts[2] == "success"


def _row(cells: Iterator[str]) -> str:
    *figures, health = cells
    written = "".join(f"<td>{cell}</td>" for cell in figures)
    return f'<tr>{written}<td class="wide">{health}</td></tr>'
