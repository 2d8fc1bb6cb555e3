"""The basis of the learner's benchmark: equal work in each layout, and right counts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks import bench
from benchmarks.parts import layouts
from benchmarks.parts.layouts import ALL, count, load_shapes, make_model, make_step

# A prompt of 5; two turns of 4, the first with a result of 6 and two turns of 3 and 2 below it.
TREE = [[-1, 0, 5], [0, 4, 6], [1, 3, 0], [1, 2, 0], [0, 4, 0]]


@pytest.mark.parametrize("max_tokens", [12, 8192])
def test_all_layouts_have_the_same_loss_and_gradient(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "MAX_TOKENS", max_tokens)
    model = make_model()
    found = {}
    for layout in (*ALL, "dense"):
        loss = make_step(layout, [TREE, TREE], model)()
        found[layout] = loss, torch.cat([p.grad.flatten().clone() for p in model.parameters()])
    loss, gradient = found["varlen"]
    for other in found.values():
        assert other[0] == pytest.approx(loss, rel=1e-5)
        assert (other[1] - gradient).norm() < 1e-5 * gradient.norm()


def test_counts_by_hand() -> None:
    model = make_model()
    tokens, pairs, flops = count("tree", [TREE], model)
    assert tokens == 5 + 10 + 3 + 2 + 4
    # Each token sees the tokens on its path, itself included.
    depths = [*range(1, 16), *range(16, 19), *range(16, 18), *range(6, 10)]
    assert pairs == sum(depths)
    flat_tokens, flat_pairs, flat_flops = count("varlen", [TREE], model)
    lengths = [18, 17, 9]
    assert flat_tokens == sum(lengths)
    assert flat_pairs == sum(n * (n + 1) // 2 for n in lengths)
    head = 256 * 4096
    weights = sum(p.numel() for p in model.parameters()) - head
    channels = 14 * 4 * 8 * 32
    assert flops == 6 * (weights * tokens + head * 13) + channels * pairs
    assert flat_flops == 6 * (weights * flat_tokens + head * 17) + channels * flat_pairs


def test_shapes_are_those_of_rollouts() -> None:
    shapes = load_shapes()
    assert {"prefix2048x16", "arpo_defaults"} < set(shapes)
    assert len(shapes) >= 4
    for shape in shapes.values():
        for tree in shape["trees"]:
            assert all(-1 <= node[0] < number for number, node in enumerate(tree))
    (arpo,) = shapes["arpo_defaults"]["trees"]
    parents = [node[0] for node in arpo]
    assert parents.count(0) >= 8, "roots; what the forks leave of the budget starts there too"
    assert sum(number not in parents for number in range(len(arpo))) == 16
    assert {node[2] for node in arpo[1:]} == {0, 500}


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_bytes(msgspec.json.encode({"small": {"source": "by hand", "trees": [TREE]}}))
    monkeypatch.setattr(layouts, "SHAPES", shapes)
    # The command itself measures the peak memory of a separate process.
    monkeypatch.setattr(layouts, "in_own_process", layouts.peak_mb)
    target = tmp_path / "figures.json"
    command = ["learner", "--json", str(target), "--shapes", "small", "--repeats", "1", "--dense"]
    assert bench.main(command) == 0
    figures = msgspec.json.decode(target.read_bytes())
    expected = figures["small.varlen_cpu_s"] / figures["small.tree_cpu_s"]
    assert figures["small.varlen_over_tree"] == pytest.approx(expected, rel=0.05)
    assert figures["small.counted"] > 1
    assert figures["small.computed_over_unique"] == 1
    assert bench.main(["learner", "--shapes", "unheard-of"]) == 2
    nowhere = str(tmp_path / "nowhere" / "figures.json")
    assert bench.main(["learner", "--json", nowhere]) == 2, "before minutes are spent"
