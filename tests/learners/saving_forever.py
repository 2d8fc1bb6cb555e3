"""A program that is killed while it saves; `tests.learners.test_checkpoint` runs it.

    python -m tests.learners.saving_forever FOLDER KILLS [STAGE]

Forks itself KILLS times: one rank of plain torch, or with STAGE two of DeepSpeed ZeRO. The children
save checkpoint after checkpoint, as a run does, with all weights and moments equal to the step,
until one of them or both are killed at a random moment. The parent checks the files. Prints the
number of checkpoints, and of kills that left a half-written one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from agentenv.assembly.run.checkpoints import Checkpoints, load_state, save_state
from agentenv.assembly.run.kept import best_checkpoint, find_checkpoint, keep_best
from agentenv.learners.ranks import checkpoint, export
from agentenv.learners.ranks.backend import RankBackend, empty_batch
from agentenv.learners.ranks.checkpoint import fragments, moments
from agentenv.learners.ranks.deepspeed_backend import DeepSpeedBackend, prepare_deepspeed
from agentenv.learners.ranks.export import WeightFiles
from agentenv.learners.ranks.saved_checkpoint import Checkpoint, changing_weights, local_weights
from agentenv.learners.trees.policy import Policy
from agentenv.processes.guard import PR_SET_PDEATHSIG, prctl
from agentenv.training.loop.state import RunState
from tests.learners.ranks import two_ranks
from tests.learners.trees import tiny_model
from tests.support.toy_rank import saved_meta


def make_backend(folder: Path, rank: int, stage: int | None) -> RankBackend:
    """A backend whose optimizer has a state."""
    if stage is None:
        backend = RankBackend(Policy(tiny_model()), two_ranks(num_ranks=1))
    else:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
        backend = DeepSpeedBackend(Policy(tiny_model()), two_ranks(zero_stage=stage))
    backend.backward(backend.forward(empty_batch())[0].sum())
    backend.step(1.0)
    return backend


@torch.no_grad()
def fill(backend: RankBackend, value: int) -> None:
    with changing_weights(backend):
        for _, _, elements in local_weights(backend):
            elements.fill_(value)
    for fragment in fragments(backend):
        for tensor in (fragment.view(fragment.owner), *moments(backend, fragment)[0].values()):
            tensor.fill_(value)


def save_forever(folder: Path, backend: RankBackend, step: int, report_fd: int) -> None:
    """Rank 0 also acts as the controller; it reports complete checkpoints."""
    checkpoints = Checkpoints(folder / "checkpoints")
    while True:
        fill(backend, step)
        if backend.rank == 0:
            checkpoints.begin(checkpoints.path(step))
        backend.gather(None)
        partial = checkpoints.path(step).with_suffix(".partial")
        export.write_model(backend, folder / "model", partial, durable=True)
        ranks = {"num_ranks": backend.num_ranks, "zero_stage": backend.stage}
        meta = saved_meta(**ranks, policy_version=step, optimizer_step=step)
        checkpoint.save(backend, meta, partial / "trainer")
        if backend.rank == 0:
            save_state(partial, RunState(step=step))
            checkpoints.complete(partial)
            os.write(report_fd, b".")
            checkpoints.prune(2)
            if step % 2:
                keep_best(checkpoints, step)
        step += 1


def check(path: Path) -> int:
    """The step of a checkpoint, all of whose parts are whole and of that step."""
    step = load_state(path, RunState).step
    saved = Checkpoint(path / "trainer")
    assert saved.meta.policy_version == step
    weights = WeightFiles(path)
    for name in weights.files:
        shape = weights.shape(name)
        assert torch.equal(weights.tensor(name), torch.full(shape, float(step)))
        size = torch.Size(shape).numel()
        for kind in ("master", "exp_avg"):
            assert torch.equal(saved.read(name, kind, 0, size), torch.full((size,), float(step)))
    return int(step)


def kill_at_random(folder: Path, stage: int | None, step: int) -> None:
    """Start all ranks, and kill them after some checkpoints and a part of a further one."""
    (folder / "meeting").unlink(missing_ok=True)
    receiver, sender = os.pipe()
    children = []
    for rank in range(1 if stage is None else 2):
        children.append(os.fork())
        if children[-1] == 0:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            save_forever(folder, make_backend(folder, rank, stage), step, sender)
    os.close(sender)
    start = time.monotonic()
    for _ in range(random.randint(1, 3)):
        start, before = time.monotonic(), start
        assert os.read(receiver, 1), "a rank has ended by itself"
    time.sleep(random.random() * min(time.monotonic() - before, 1.0))
    # All at once, or one first; the others then wait for it or detect its end.
    for child in random.sample(children, len(children)):
        os.kill(child, signal.SIGKILL)
        time.sleep(random.choice((0.0, 0.1)))
    for child in children:
        os.waitpid(child, 0)
    os.close(receiver)


def main(folder: Path, kills: int, stage: int | None = None) -> None:
    torch.set_num_threads(1)
    prepare_deepspeed()
    tiny_model().save_pretrained(folder / "model")
    checkpoints = Checkpoints(folder / "checkpoints")
    last = best = half = 0
    for number in range(10 * kills):
        if number >= kills and half:  # few kills may all fall between two saves
            break
        kill_at_random(folder, stage, last + 1)
        half += any(checkpoints.folder.glob("*.partial"))
        found = [check(path) for path in checkpoints.finished()]
        assert max(found) > last, (found, last)
        last = max(found)
        if best_checkpoint(checkpoints) is not None or best:
            path = best_checkpoint(checkpoints)
            assert path is not None, "there was a best one, and it is lost"
            assert check(path) >= best
            best = check(path)
        assert check(find_checkpoint(folder)) == last
    sys.stdout.write(f"{last} {half}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
