"""A program that is killed while it saves; `tests.learners.test_checkpoint` runs it.

    python -m tests.learners.saving_forever FOLDER KILLS

Forks itself KILLS times. Each child saves checkpoint after checkpoint, as a run does, with all
weights and moments equal to the step, until it is killed at a random moment. The parent checks
what it finds. Prints the number of checkpoints, and of kills that left a half-written one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from launchers.checkpoints import Checkpoints, find_checkpoint
from launchers.rl.state import RunState
from launchers.rundir import load_state, save_state
from learners import checkpoint, export
from learners.export_offline import Weights
from learners.policy import Policy
from learners.torch_backend import TorchBackend
from tests.learners.ranks import two_ranks
from tests.learners.trees import tiny_model


def save_from(backend: TorchBackend, source: Path, checkpoints: Checkpoints, step: int) -> None:
    while True:
        for param in backend.policy.parameters():
            param.data.fill_(step)
            backend.base_optimizer.state[param]["exp_avg"].fill_(step)
        partial = checkpoints.begin(step)
        export.write_model(backend, source, partial, durable=True)
        meta = checkpoint.Meta(
            num_ranks=1,
            zero_stage=0,
            dtype="float32",
            optimizer="adamw",
            policy_version=step,
            optimizer_step=step,
            moved=False,
            base_model="",
        )
        checkpoint.save(backend, meta, partial / "trainer")
        save_state(partial, RunState(step=step))
        checkpoints.complete(partial)
        checkpoints.prune(2)
        if step % 2:
            checkpoints.keep_best(step)
        step += 1


def check(path: Path) -> int:
    """The step of a checkpoint, all of whose parts are whole and of that step."""
    step = load_state(path, RunState).step
    saved = checkpoint.Checkpoint(path / "trainer")
    assert saved.meta.policy_version == step
    weights = Weights(path)
    for name in weights.names():
        shape = weights.shape(name)
        assert torch.equal(weights.tensor(name), torch.full(shape, float(step)))
        size = torch.Size(shape).numel()
        for kind in ("master", "exp_avg"):
            assert torch.equal(saved.read(name, kind, 0, size), torch.full((size,), float(step)))
    return int(step)


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    source = folder / "model"
    tiny_model().save_pretrained(source)
    backend = TorchBackend(Policy(tiny_model()), two_ranks(num_ranks=1))
    for param in backend.policy.parameters():
        param.grad = torch.ones_like(param)
    backend.step(1.0)
    checkpoints = Checkpoints(folder / "checkpoints")
    last = best = half = 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            save_from(backend, source, checkpoints, last + 1)
        time.sleep(random.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        half += any(checkpoints.folder.glob("*.partial"))
        found = [check(path) for path in checkpoints.finished()]
        assert not last or max(found) >= last, (found, last)
        last = max(found, default=0)
        if checkpoints.best() is not None or best:
            path = checkpoints.best()
            assert path is not None, "there was a best one, and it is lost"
            assert check(path) >= best
            best = check(path)
        if found:
            assert check(find_checkpoint(folder)) == last
    sys.stdout.write(f"{last} {half}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
