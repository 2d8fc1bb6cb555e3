"""The controller's handle on a learner rank that runs as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

import learners
from agentenv.errors import ConfigError, LearnerError
from agentenv.tree import TrajectoryTree
from learners import messages as wire
from learners.encoding import EncodedTree, encode
from learners.learner import LearnerConfig, Metrics, OptimizerConfig, Score

CLOSE_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000


class DeepSpeedLearner:
    """See `learners.learner.Learner`. One command runs at a time; others wait for it.

    A rank that dies raises LearnerError at once, in the call that is waiting and in each later
    one, with its exit code or signal and the end of its log. Use `start`, then `close`.
    """

    def __init__(self, config: LearnerConfig, algorithm: wire.AnyAlgorithm, log_path: Path) -> None:
        self.config = config
        self.algorithm = algorithm
        self.log_path = log_path
        self._policy_version = 0
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def start(
        cls,
        config: LearnerConfig,
        algorithm: wire.AnyAlgorithm,
        model_dir: Path,
        log_path: Path,
        *,
        seed: int = 0,
    ) -> DeepSpeedLearner:
        """Start the rank and load the model of a Hugging Face directory into it.

        Raises ConfigError for settings that contradict each other or a directory that is not a
        model, LearnerError if the rank does not come up.
        """
        if config.optimizer == "muon_adamw" and config.zero_stage != 0:
            raise ConfigError("learner.optimizer = muon_adamw needs learner.zero_stage = 0")
        if not (model_dir / "config.json").is_file():
            raise ConfigError(f"{model_dir}: not a Hugging Face model directory (no config.json)")
        learner = cls(config, algorithm, log_path)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await learner._spawn()
            init = wire.Init(config, algorithm, str(model_dir.resolve()), seed)
            await learner._call(init, config.start_timeout_s)
        except BaseException as error:
            await learner.close()
            if isinstance(error, TimeoutError):
                text = f"the learner did not connect in {config.start_timeout_s:.0f} s"
                raise LearnerError(f"{text}{learner._log_tail()}") from None
            raise
        return learner

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def pid(self) -> int | None:
        """Process id of the rank; None before it starts."""
        return None if self._process is None else self._process.pid

    async def update(self, trees: Sequence[TrajectoryTree], lr_scale: float = 1.0) -> Metrics:
        """Train on whole groups; metrics count groups as trained, filtered and dropped.

        Filtered groups have no signal (all advantages 0), dropped ones are too short. What is
        left is dealt evenly to as few mini-batches as groups_per_minibatch allows; if nothing is
        left, no step is taken.
        """
        encoded, metrics = await asyncio.to_thread(self._encode, list(trees))
        if encoded:
            count = -(-len(encoded) // self.config.groups_per_minibatch)
            cuts = [len(encoded) * i // count for i in range(count + 1)]
            minibatches = [encoded[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            metrics |= (await self._call(wire.Update(minibatches, lr_scale))).metrics
        return metrics

    def _encode(self, trees: list[TrajectoryTree]) -> tuple[list[EncodedTree], Metrics]:
        credits = [self.algorithm.credit(tree) for tree in trees]
        encoded = [
            encode(tree, credit, self._policy_version)
            for tree, credit in zip(trees, credits, strict=True)
            if credit is not None and credit.has_signal
        ]
        dropped = sum(credit is None for credit in credits)
        return encoded, {
            "num_trained": float(len(encoded)),
            "num_filtered": float(len(trees) - len(encoded) - dropped),
            "num_dropped": float(dropped),
            "num_steps": 0.0,
        }

    async def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float = 1.0) -> Metrics:
        if not sequences:
            return {"num_steps": 0.0}
        return (await self._call(wire.Imitate(list(sequences), lr_scale))).metrics

    async def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        if not sequences:
            return []
        return (await self._call(wire.ScoreSequences(list(sequences)))).scores

    async def reset_optimizer(self, config: OptimizerConfig) -> None:
        await self._call(wire.ResetOptimizer(config))

    async def publish(self, directory: Path) -> Path:
        await self._call(wire.WriteModel(str(directory.absolute()), True))
        return directory

    async def export(self, directory: Path) -> Path:
        await self._call(wire.WriteModel(str(directory.absolute()), False))
        return directory

    async def save(self, directory: Path) -> None:
        await self._call(wire.Save(str(directory.absolute())))

    async def load(self, directory: Path) -> None:
        await self._call(wire.Load(str(directory.absolute())))

    async def close(self) -> None:
        """Ask the rank to stop, then kill it; also ends calls that are waiting. Idempotent."""
        process, self._process = self._process, None
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(ConnectionError):
                if not self._lock.locked():
                    writer.write(wire.pack_frame(wire.Stop()))
                writer.close()
                await writer.wait_closed()
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        """Start the process and wait until it has connected with our token."""
        token = secrets.token_hex(16)
        connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hello = await _read_reply(reader)
            known = isinstance(hello, wire.Hello) and secrets.compare_digest(hello.token, token)
            if not known or connected.done():
                writer.close()
                return
            self._reader, self._writer = reader, writer
            connected.set_result(None)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        root = str(Path(learners.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        variables = {
            wire.ADDRESS_VARIABLE: f"127.0.0.1:{port}",
            wire.TOKEN_VARIABLE: token,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": str(self.config.num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the rollouts beside them
        }
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "learners.deepspeed_worker",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        died = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({connected, died}, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        if not connected.done():
            raise self._death(died.result())
        died.cancel()

    async def _call(self, command: Struct, timeout_s: float | None = None) -> wire.Done:
        async with self._lock:
            if self._writer is None or self._reader is None or self._process is None:
                raise LearnerError("the learner is closed")
            process = self._process
            limit_s = timeout_s or self.config.command_timeout_s
            try:
                async with asyncio.timeout(limit_s):
                    self._writer.write(wire.pack_frame(command))
                    await self._writer.drain()
                    reply = await _read_reply(self._reader)
            except (ConnectionError, asyncio.IncompleteReadError):
                raise self._death(await _exit_code(process)) from None
            except TimeoutError:
                await self.close()
                name = type(command).__name__
                text = f"{name} took longer than {limit_s:.0f} s; the learner was stopped"
                raise LearnerError(f"{text}{self._log_tail()}") from None
            except asyncio.CancelledError:
                # The answer would be taken for that of the next command.
                await self.close()
                raise
        if isinstance(reply, wire.Failed):
            raise LearnerError(f"{reply.error}\n{reply.traceback}")
        if not isinstance(reply, wire.Done):
            raise LearnerError(f"unexpected answer {reply!r}")
        self._policy_version = reply.policy_version
        return reply

    def _death(self, code: int | None) -> LearnerError:
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return LearnerError(f"the learner {how}{self._log_tail()}")

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
            return f"; log {self.log_path}:\n{tail}"
        return f"; log {self.log_path}"


async def _read_reply(reader: asyncio.StreamReader) -> wire.Reply:
    prefix = await reader.readexactly(wire.PREFIX_BYTES)
    return wire.unpack_reply(await reader.readexactly(int.from_bytes(prefix, "little")))


async def _exit_code(process: asyncio.subprocess.Process) -> int | None:
    """Of a process whose connection broke; None if it lives on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            return await process.wait()
    return None
