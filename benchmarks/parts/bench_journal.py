"""What the journal costs: CPU of the event loop a turn, turns a second on this disk, bytes a token.

    python benchmarks/parts/bench_journal.py [--turns 20000] [--tokens 300] [--folder DIR]

Turns of so many sampled and as many observed tokens, of 100 trees at once. `loop` is the CPU time
of the thread that rolls out, beyond that of making the same nodes without a journal; `rate` is over
wall time until the last frame is written and synced; bytes are those of the files less 4 an
observed token, by sampled token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from agentenv.frames import JournalConfig
from agentenv.journal import Journal
from agentenv.tree import TrajectoryTree
from agentenv.types import Task, VersionSpan

NUM_TREES = 100


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def main(num_turns: int, num_tokens: int, folder: Path) -> None:
    journal = Journal(folder, JournalConfig(), settings="bench", incarnation=1)
    trees = [TrajectoryTree(Task(str(i), "bench", "?", ()), index=i) for i in range(NUM_TREES)]
    records = [journal.record(tree.index) for tree in trees]
    ids = array("i", range(num_tokens))
    nats = array("f", [0.1]) * num_tokens
    info = {"tool_calls": [{"name": "search", "seconds": 0.1, "arguments": {"query": "x" * 40}}]}
    for tree, record in zip(trees, records, strict=True):
        record.began(tree)
        record.turned(tree.add(None, observation_ids=ids), 0.0)
    await asyncio.sleep(0)

    async def grow(is_recorded: bool) -> float:
        """CPU seconds of the thread, for all turns."""
        cpu = time.thread_time()
        for turn in range(num_turns):
            tree, record = trees[turn % NUM_TREES], records[turn % NUM_TREES]
            node = tree.add(
                tree.nodes[-1],
                branch="0",
                action_ids=ids,
                logprobs=nats,
                entropies=nats,
                version_spans=[VersionSpan(0, 0, num_tokens)],
                observation_ids=ids,
                info=info,
            )
            if is_recorded:
                record.turned(node, 1.0, "</search>")
            if turn % NUM_TREES == 0:
                await asyncio.sleep(0)
        return time.thread_time() - cpu

    floor_s = await grow(is_recorded=False)
    start = time.perf_counter()
    loop_s = await grow(is_recorded=True) - floor_s
    await journal.commit()
    await journal.close()
    wall_s = time.perf_counter() - start
    size = num_bytes(folder) - 4 * num_turns * num_tokens
    print(f"loop: {1e6 * loop_s / num_turns:.1f} us of CPU a turn")
    print(f"rate: {num_turns / wall_s:.0f} turns a second")
    print(f"size: {size / (num_turns * num_tokens):.2f} bytes a sampled token")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        asyncio.run(main(options.turns, options.tokens, Path(made)))
