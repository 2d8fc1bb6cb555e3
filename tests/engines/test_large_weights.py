"""Weights that would take minutes to read: the client of their server reads none of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from agentenv.base.ports import hold_port, port_of
from agentenv.base.types import SamplingParams
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.vllm import VLLMServer
from benchmarks.parts.mock_server import MockServer

VOCABULARY = 64
WEIGHTS = 2**36  # bytes: 40 s of SHA-256 on a core that is good at it
READ = 2**22  # limit of the bytes read of all files, routes and tokens


class OneToken:
    def rest(self, prompt: list[int]) -> list[int]:
        return [1] * 40


def write_model(path: Path) -> Path:
    """A file of the size of a 32B model, of which the disk has the header alone."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    header = {"w": {"dtype": "BF16", "shape": [WEIGHTS // 2], "data_offsets": [0, WEIGHTS]}}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + WEIGHTS)
    return path


def bytes_read() -> int:
    """Of files and sockets, by this process, in which the server is too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


async def test_a_server_starts_updates_and_restarts_while_no_weights_are_read(
    tmp_path: Path,
) -> None:
    models = [write_model(tmp_path / f"v{version}") for version in range(3)]
    recital = OneToken()
    port = port_of(held := hold_port())
    server = MockServer("", port, recital, models[0], 0.001)  # type: ignore[arg-type]
    await server.open()
    pool = EnginePool(
        [VLLMServer(f"http://127.0.0.1:{port}", entropy_top_k=1, vocab_size=VOCABULARY)],
        models[0],
        0,
        vocab_size=VOCABULARY,
        eos_ids=(),
    )
    before = bytes_read()

    async def sample() -> list[int]:
        done = await pool.generate([2, 3], SamplingParams(8), session="s")
        return [span.version for span in done.version_spans]

    try:
        await pool.start(fresh=True)
        assert await sample() == [0]
        await pool.load_weights(models[1], 1)
        assert await sample() == [1]
        turn = asyncio.create_task(sample())
        await asyncio.sleep(0)
        await server.restart()
        assert (await turn)[-1] == 1, "the new process has them only since it loaded again"
        assert pool.account()["servers"][f"http://127.0.0.1:{port}"]["answered"] == 3
        await pool.load_weights(models[2], 2)
        assert await sample() == [2]
    finally:
        await pool.close()
        await server.close()
        held.close()
    assert bytes_read() - before < READ
    assert not [route for route in server.routes_seen if "check" in route], server.routes_seen
