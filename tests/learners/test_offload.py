"""A learner that sleeps between its updates, and releases the memory of its device, or compiles its
kernels ahead of time, ends with the weights of one that does not, to the bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentenv.base.errors import LearnerError
from agentenv.learners.lora import LoRAConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.offloaded_memory import HostMemory, OffloadedMemory, held_tensors
from tests.learners.ranks import (
    ALGORITHM,
    largest_difference,
    plain_torch,
    save_tiny_model,
    train,
    two_ranks,
    uneven_trees,
    weights_in,
    weights_of,
)
from tests.learners.trees import credited

TREES = uneven_trees(4)


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_stage": 0, "lora": LoRAConfig(r=4, dropout=0.1), "num_ranks": 1},
        {"zero_stage": 1, "dtype": "bfloat16"},
        {"zero_stage": 2},
        {"zero_stage": 3},
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values())[:24],
)
async def test_sleeping_between_updates_changes_nothing(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    config = two_ranks(**keys, command_timeout_s=600)
    found = []
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model, tmp_path / "learner.log")
    try:
        await learner.update(credited(TREES, learner.algorithm))
        await learner.save(tmp_path / "start")
        for way in ("plain", "asleep"):
            await learner.load(tmp_path / "start")
            for _ in range(2):
                await learner.update(credited(TREES, learner.algorithm))
                if way == "asleep":
                    await learner.sleep()
                    await learner.sleep()
                    with pytest.raises(LearnerError, match="Update: the learner"):
                        await learner.update(credited(TREES, learner.algorithm))
                    await learner.wake()
                    await learner.wake()
            found.append(weights_in(await learner.publish(tmp_path / way)))
    finally:
        await learner.close()
    assert largest_difference(found[0], found[1]) == 0


def test_the_memory_of_a_rank_is_freed_and_restored(tmp_path: Path) -> None:
    """Only the weights and both moments of AdamW are in main memory."""
    trainer = plain_torch(save_tiny_model(tmp_path / "model"), two_ranks(), torch.float32)
    for param in trainer.backend.policy.parameters():
        param.data = param.data.clone()  # they are mapped from the file
    train(trainer, TREES, 4)
    backend = trainer.backend
    assert isinstance(backend, RankBackend)
    before = {name: weight.clone() for name, weight in weights_of(trainer).items()}
    num_bytes = sum(weight.nbytes for weight in before.values())
    offloaded = OffloadedMemory(backend)
    assert 3 * num_bytes <= size_of(offloaded) <= 3 * num_bytes + 64 * len(before)
    assert all(
        t.untyped_storage().size() == 0
        for t in held_tensors(backend)
        if t.untyped_storage().resizable()
    )
    offloaded.restore()
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(trainer).items())


def test_main_memory_is_kept_for_the_next_sleep(tmp_path: Path) -> None:
    trainer = plain_torch(save_tiny_model(tmp_path / "model"), two_ranks(), torch.float32)
    train(trainer, TREES, 4)
    memory, places = HostMemory(), []
    for _ in range(2):
        offloaded = OffloadedMemory(trainer.backend, memory=memory)
        places.append(sorted(copy.data_ptr() for _, copy in offloaded._kept))
        offloaded.restore()
    assert places[0] == places[1]


@pytest.mark.parametrize("status", [0, 1])
def test_memory_is_page_locked_while_it_is_allocated(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal, which CUDA reports to the next kernel, costs speed only."""
    locked: list[int] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda place, size, flags: locked.append(place) or status,
        cudaHostUnregister=locked.remove,
    )

    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "zeros", kernel)
    memory = HostMemory()
    found = memory.take(4096, torch.device("cuda"))
    assert locked == [found.data_ptr()]
    memory.release(found)
    assert memory.take(4096, torch.device("cuda")) is found
    assert len(locked) == 1
    del memory, found
    assert len(locked) == status  # refused memory is not unregistered


def test_buckets_of_gradients_are_freed_without_a_copy(tmp_path: Path) -> None:
    trainer = plain_torch(save_tiny_model(tmp_path / "model"), two_ranks(), torch.float32)
    backend = trainer.backend
    offloaded = OffloadedMemory(backend)
    held = size_of(offloaded)
    offloaded.restore()
    bucket = torch.ones(1000)
    lists = SimpleNamespace(buffer=[bucket]), SimpleNamespace(buffer=None)
    backend.optimizer.ipg_buckets = dict(enumerate(lists))  # as ZeRO has them
    offloaded = OffloadedMemory(backend)
    assert size_of(offloaded) == held
    assert bucket.untyped_storage().size() == 0
    offloaded.restore()
    assert bucket.untyped_storage().size() == 4000


def size_of(offloaded: OffloadedMemory) -> int:
    """Bytes in main memory."""
    return sum(copy.nbytes for _, copy in offloaded._kept)
