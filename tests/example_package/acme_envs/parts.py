"""One of each kind of part that a configuration chooses by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from agentenv import Grade, Message, Task, tool
from agentenv.assembly.reports.monitors import Axis, MonitorPart
from agentenv.contract.engine import Engine, EngineStart
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.envs.grading.keys import GraderPart
from agentenv.envs.search.corpus import BackendConfig, Hit, Query
from agentenv.envs.web_search import WebSearchEnv
from agentenv.learners.algorithms.algorithm import Grouped
from agentenv.learners.algorithms.credit import Floats


class OfficeEnv(WebSearchEnv):
    """Questions about the books on a shelf."""

    def __init__(self, task: Task, **tables: Any) -> None:
        super().__init__(task, open_page=False, prompt="", **tables)


@tool
def shout(text: str) -> str:
    """The text in capitals."""
    return text.upper()


class Median(Grouped, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="acme-median"):
    """Advantages about the median of the group."""

    scale: Annotated[float, Meta(gt=0, description="factor on the advantages")] = 1.0

    def advantages(self, returns: Floats) -> Floats:
        return self.scale * (returns - np.median(returns))


class Counted(EmbeddedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="counted"):
    """The embedded engine, which leaves a note of its start."""

    note: Annotated[str, Meta(description="file that a start writes")]

    async def start(self, given: EngineStart) -> Engine:
        line = f"policy {given.policy_version}\n"
        await asyncio.to_thread(Path(self.note).write_text, line, encoding="utf-8")
        return await super().start(given)


class ShelfConfig(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="acme-shelf"):
    """A shelf of numbered books."""

    num_books: Annotated[int, Meta(ge=1, description="books on the shelf")] = 3

    def build(self) -> Shelf:
        return Shelf(self.num_books)


class Shelf:
    def __init__(self, num_books: int) -> None:
        self.num_books = num_books

    async def start(self) -> None:
        pass

    async def search(self, query: Query) -> list[Hit]:
        found = [Hit(f"book {n} on {query.text}") for n in range(self.num_books)]
        return found[: query.max_results]

    async def document(self, url: str) -> Hit | None:
        return None

    async def close(self) -> None:
        pass


class LengthConfig(GraderPart, frozen=True, kw_only=True, tag="acme-length"):
    """The longer the better."""

    full: Annotated[int, Meta(ge=1, description="characters that earn 1")] = 100

    def build(self) -> Length:
        return Length(self.full)


class Length:
    def __init__(self, full: int) -> None:
        self.full = full

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        share = min(1.0, sum(len(message.content) for message in written) / self.full)
        return Grade(share, share >= 1.0)


class LedgerConfig(MonitorPart, frozen=True, kw_only=True, tag="acme-ledger"):
    """Writes figures into a file of the run."""

    file: Annotated[str, Meta(description="its name")] = "ledger.txt"

    def build(self, run: Path, settings: dict[str, Any]) -> Ledger:
        return Ledger(run / self.file, str(settings["algorithm"]["name"]))


class Ledger:
    def __init__(self, path: Path, title: str) -> None:
        self.path = path
        self._write(title)

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        self._write(f"{axis.key} {axis.step} {len(metrics)}")

    def trajectories(self, name: str, rows: Sequence[dict[str, Any]], axis: Axis) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        self._write(f"ended with {exit_code}")

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
