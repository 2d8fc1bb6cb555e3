"""How busy an evaluation keeps the embedded engine: `python tests/bench/bench_evaluate.py RUN`.

Evaluates 500 questions of a trained quick-start run, records every request, and then lets the
same engine sample the same requests flat out: all first turns at once, each next turn of a
trajectory as soon as the one before is sampled, no tokenizer, tools, grader or rows in between.
The two take turns; the figure is the ratio of their tokens a second, both in wall time and in CPU
time of the engine's thread. On a busy machine only the ratios mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentenv.engine import Engine
from agentenv.evaluate import Answer, Question, ask
from agentenv.types import Completion, SamplingParams
from launchers.evaluation.parts import Builder
from launchers.evaluation.run_config import resolve_sets
from launchers.evaluation.store import Saved, Store
from launchers.evaluation.subject import find_subject
from launchers.evaluation.trajectory import row_of

NUM_QUESTIONS = 500
Call = tuple[Sequence[int], SamplingParams]


class Recorded:
    """An engine that keeps what it was asked, by trajectory: a prompt that continues another."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[tuple[Sequence[int], SamplingParams, Completion]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, prompt_ids: Any, sampling: Any, **keys: Any) -> Completion:
        done = await self.engine.generate(prompt_ids, sampling, **keys)
        self.calls.append((list(prompt_ids), sampling, done))
        return done

    def chains(self) -> list[list[Call]]:
        """The requests of each trajectory in order."""
        chains: list[list[Call]] = []
        open_: dict[tuple[int, ...], list[list[Call]]] = defaultdict(list)
        lengths: set[int] = set()
        for prompt, sampling, done in sorted(self.calls, key=lambda call: len(call[0])):
            for length in sorted(lengths, reverse=True):
                found = open_.get(tuple(prompt[:length]))
                if found:
                    chain = found.pop()
                    break
            else:
                chains.append(chain := [])
            chain.append((prompt, sampling))
            reached = (*prompt, *done.token_ids)
            open_[reached].append(chain)
            lengths.add(len(reached))
        return chains


async def flat_out(engine: Engine, chains: list[list[Call]]) -> None:
    async def one(number: int, chain: list[Call]) -> None:
        for prompt, sampling in chain:
            await engine.generate(prompt, sampling, session=str(number))

    async with asyncio.TaskGroup() as group:
        for number, chain in enumerate(chains):
            group.create_task(one(number, chain))


async def timed(engine: Engine, work: Any) -> tuple[float, float, float]:
    """Tokens, wall seconds and CPU seconds of the engine's thread."""
    loop, before = asyncio.get_running_loop(), engine.stats()
    start = loop.time()
    await work
    after = engine.stats()
    tokens = after["sampled_tokens"] - before["sampled_tokens"]
    return tokens, loop.time() - start, after["busy_s"] - before["busy_s"]


async def bench(run: str, num_questions: int, rounds: int, concurrency: int) -> None:
    subject = find_subject(run)
    raw = {**subject.raw, "concurrency": concurrency}
    config = resolve_sets(raw, run)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        builder = Builder(config, subject, stack, print)
        await builder.start()
        ((name, questions),) = (await builder.questions()).items()
        engine = Recorded(await builder.engine())
        actor = builder.actor(name, questions, engine)
        chains: list[list[Call]] = []
        wall, cpu, share = [], [], []
        for number in range(rounds):
            saved = Saved(subject={}, run="", config={"engine": {}, "limits": {}, "sets": {}})
            store = Store(Path(folder) / str(number), saved)

            def keep(answer: Answer, store: Store = store) -> None:
                store.add(row_of(name, answer, 0))

            asked = [Question(actor, task, 0) for task in questions.tasks[:num_questions]]
            engine.calls = []
            tokens, wall_s, cpu_s = await timed(
                engine, ask(asked, keep, concurrency=config.concurrency)
            )
            store.close()
            chains = engine.chains()
            assert sum(map(len, chains)) == len(engine.calls)
            flat_tokens, flat_wall_s, flat_cpu_s = await timed(
                engine, flat_out(engine.engine, chains)
            )
            assert flat_tokens == tokens, "the same seeds give the same tokens"
            wall.append(flat_wall_s / wall_s)
            cpu.append(flat_cpu_s / cpu_s)
            share.append(cpu_s / wall_s)
            print(
                f"{len(asked)} questions, {len(engine.calls)} requests, {tokens:.0f} tokens: "
                f"evaluation {wall_s:.2f} s ({cpu_s:.2f} CPU), flat out {flat_wall_s:.2f} s "
                f"({flat_cpu_s:.2f} CPU): {wall[-1]:.3f} of flat out"
            )
        print(
            f"median of {rounds}: {statistics.median(wall):.3f} of the flat-out tokens/s by wall, "
            f"{statistics.median(cpu):.3f} by CPU of the engine's thread"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run of configs/quickstart.toml")
    parser.add_argument("--n", type=int, default=NUM_QUESTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=256)
    arguments = parser.parse_args()
    asyncio.run(bench(arguments.run, arguments.n, arguments.rounds, arguments.concurrency))


if __name__ == "__main__":
    main()
