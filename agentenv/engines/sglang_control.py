"""Calls that change or ask an SGLang server as a whole, sent to each worker behind one URL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentenv.engines.http import HttpClient, RefusedError
from agentenv.engines.server import ServerLostError
from agentenv.errors import EngineError

logger = logging.getLogger(__name__)

NOTHING_DONE = "Failed to get weights iterator"  # a refusal before any weight was touched


class Control:
    """The routes of one or more workers that hold the same weights."""

    def __init__(self, servers: Sequence[HttpClient]) -> None:
        self.servers = servers

    async def post(
        self, path: str, body: dict[str, Any], *, timeout_s: float | None = None
    ) -> list[Any]:
        """To all at once. RefusedError if all refused, else any failure of one is a
        ServerLostError: they may differ now."""
        calls = (post(server, path, body, timeout_s) for server in self.servers)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not errors:
            return outcomes
        for error in errors:
            if not isinstance(error, RefusedError):
                raise error
        if len(errors) < len(outcomes):
            raise ServerLostError(f"not all workers did it: {errors[0]}") from errors[0]
        raise errors[0]

    async def pause(self) -> None:
        """What runs goes back to the queue with its tokens."""
        await self.post("/pause_generation", {"mode": "retract"})

    async def reload(self, source: Path, policy_version: int) -> None:
        """Read the weights from a directory. RefusedError: no weight was touched. After any other
        failure nobody knows."""
        body = {
            "model_path": str(await asyncio.to_thread(source.absolute)),
            "weight_version": str(policy_version),
            "flush_cache": False,  # with it, a refused flush would report an update as failed
            "abort_all_requests": False,
        }
        try:
            await self.post("/update_weights_from_disk", body, timeout_s=self._load_s)
        except RefusedError as error:
            if NOTHING_DONE in error.reason:
                raise
            raise ServerLostError(f"nobody knows what weights it has: {error}") from error

    async def flush(self) -> None:
        """Drop the prefix cache."""
        try:
            # Its own parameter to wait would wait for retracted requests to end.
            for server in self.servers:
                await server.call("POST", "/flush_cache")
        except RefusedError as error:  # a request that waited may have an old cache salt
            raise ServerLostError(f"prefixes of old weights remain: {error}") from error

    async def name_version(self, policy_version: int) -> None:
        """Tokens from now on are labelled with it."""
        body = {"new_version": str(policy_version), "abort_all_requests": False}
        await self.post("/update_weight_version", body)

    async def resume(self) -> None:
        await self.post("/continue_generation", {})

    async def abort(self, request_id: str) -> None:
        """Errors do not matter: the request is gone with its server, or it has just ended."""
        await asyncio.gather(*(_abort(server, request_id) for server in self.servers))

    async def fall_asleep(self) -> None:
        """What is left is aborted: it must be idle to sleep."""
        await self.post("/pause_generation", {"mode": "abort"})
        await self.post("/release_memory_occupation", {}, timeout_s=self._load_s)

    async def wake(self) -> None:
        """It stays paused."""
        await self.post("/resume_memory_occupation", {}, timeout_s=self._load_s)

    async def fingerprint(self) -> dict[str, str]:
        """A checksum per parameter, of every rank of every worker."""
        body = {"action": "checksum"}
        answers = await self.post("/weights_checker", body, timeout_s=self._load_s)
        ranks = [rank for answer in answers for rank in answer["ranks"]]
        return {
            f"{name}@{number}" if number else name: checksum
            for number, rank in enumerate(ranks)
            for name, checksum in rank["checksums"].items()
        }

    @property
    def _load_s(self) -> float:
        return self.servers[0].timeouts.load_s


async def post(
    server: HttpClient, path: str, body: dict[str, Any], timeout_s: float | None = None
) -> Any:
    """To one worker; RefusedError also for an answer that says success: false."""
    answer = await server.call_json("POST", path, body, timeout_s=timeout_s)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise RefusedError(f"{server.name}{path} failed: {answer}", 200, str(answer))
    return answer


async def _abort(server: HttpClient, request_id: str) -> None:
    try:
        await server.call("POST", "/abort_request", {"rid": request_id})
    except EngineError as error:
        logger.debug("abort of %s: %s", request_id, error)
