"""Slots keep their columns through every move, and take little more memory than columns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from agentenv.engines.embedded.model import SlotCache
from agentenv.engines.embedded.weights import Architecture

SHAPE = {
    "vocab_size": 9, "hidden_size": 4, "intermediate_size": 4, "num_layers": 1, "num_heads": 1,
    "num_kv_heads": 1, "head_dim": 2, "max_length": 400, "norm_eps": 1e-6, "rope": {},
    "qk_norm": False, "qkv_bias": False, "out_bias": False, "tied": True, "eos_ids": frozenset(),
}  # fmt: skip
ARCH = Architecture(**SHAPE)


class Walk:
    """Random admissions, steps, ends and updates; keys hold the token and the version."""

    def __init__(self, seed: int, num_cached: int) -> None:
        self.rng = random.Random(seed)
        self.version = 0
        self.num_cached = num_cached
        self.cache = SlotCache(ARCH, 4, num_cached, torch.float32, torch.device("cpu"))
        self.texts: dict[int, list[int]] = {}  # of running slots
        self.versions: dict[int, list[int]] = {}
        self.past: list[list[int]] = []
        self.hits = 0

    def write(self, slot: int, start: int) -> None:
        block, row = self.cache.place[slot]
        text = self.texts[slot][start:]
        end = start + len(text)
        block.kv[0, 0, row, 0, start:end, 0] = torch.tensor(text, dtype=torch.float32)
        block.kv[0, 1, row, 0, start:end, 1] = float(self.version)
        self.versions[slot][start:] = [self.version] * len(text)

    def admit(self) -> None:
        base = self.rng.choice(self.past) if self.past and self.rng.random() < 0.7 else []
        text = base[: self.rng.randint(0, len(base))] if self.rng.random() < 0.5 else base
        text = text + [self.rng.randrange(9) for _ in range(self.rng.randint(1, 30))]
        if len(text) > 350:
            return
        prompt = np.array(text, dtype=np.int32)
        source, common = self.cache.find(prompt, "s", self.version)
        assert (source is None) == (common == 0)
        slot, cached = self.cache.open(prompt, "s", source, common, 4)
        assert slot not in self.texts
        assert cached == min(common, len(text) - 1)
        self.hits += cached > 0
        self.texts[slot], self.versions[slot] = text, [self.version] * cached
        self.write(slot, cached)
        self.cache.publish(slot, self.version)

    def step(self) -> None:
        slots = list(self.texts)
        for slot in slots:
            length = int(self.cache.lengths[slot])
            if length == self.cache.place[slot][0].width:
                self.cache.grow(slot, length + 1)
            self.texts[slot].append(self.rng.randrange(9))
            self.versions[slot].append(self.version)
            self.write(slot, length)
        tokens = [self.texts[slot][-1] for slot in slots]
        self.cache.append(np.array(slots, dtype=np.int64), tokens)

    def check(self) -> None:
        for slot, text in self.texts.items():
            block, row = self.cache.place[slot]
            assert block.slots[row] == slot
            columns = block.columns(row, len(text))
            assert columns[0, 0, 0, :, 0].tolist() == text
            assert columns[0, 1, 0, :, 1].tolist() == self.versions[slot]
        placed = [slot for block in self.cache.blocks.values() for slot in block.slots]
        assert sorted(placed) == sorted(self.texts)
        assert len(self.cache.idle) <= self.num_cached
        for slot, kept in self.cache.idle.items():
            text = self.cache.tokens[slot, : self.cache.lengths[slot]].tolist()
            assert kept[0, 0, 0, :, 0].tolist() == text
            assert set(kept[0, 1, 0, :, 1].tolist()) == {float(self.version)}


@pytest.mark.parametrize("num_cached", [0, 1, 3])
def test_columns_survive_every_move(num_cached: int) -> None:
    hits = 0
    for seed in range(6):
        walk = Walk(seed, num_cached)
        for _ in range(250):
            chance = walk.rng.random()
            if chance < 0.35 and len(walk.texts) < 4:
                walk.admit()
            elif chance < 0.5 and walk.texts:
                slot = walk.rng.choice(list(walk.texts))
                walk.cache.close(slot, walk.version)
                walk.past.append(walk.texts.pop(slot))
            elif chance < 0.52:
                walk.version += 1
                walk.cache.forget_all()
            elif walk.texts:
                walk.step()
            walk.check()
        hits += walk.hits
    assert hits > (50 if num_cached else 10)


def test_one_long_sequence_does_not_widen_the_others() -> None:
    cache = SlotCache(ARCH, 64, 64, torch.float32, torch.device("cpu"))
    column = 2 * 2 * 4  # bytes: key and value of two float32 each
    lengths = [*range(20, 20 + 2 * 62, 2), 300, 20_000]
    for length in lengths:
        prompt = np.full(length, length % 9, dtype=np.int32)
        slot, _ = cache.open(prompt, "s", None, 0, 0)
        cache.publish(slot, 0)
    running = sum(block.kv.nbytes for block in cache.blocks.values())
    widths = [max(128, 2 * length) for length in lengths]  # rows as wide as that at most
    assert running <= column * 2 * sum(widths)  # and at most twice as many as are used
    for block in list(cache.blocks.values()):
        for slot in list(block.slots):
            cache.close(slot, 0)
    assert list(cache.blocks) == [128]
    assert sum(kept.nbytes for kept in cache.idle.values()) == column * sum(lengths)
