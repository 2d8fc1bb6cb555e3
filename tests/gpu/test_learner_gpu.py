"""A rank of DeepSpeed on a GPU, with the shape of Qwen2.5-0.5B: `python -m pytest tests/gpu -s`.

Prints the seconds of an update, of publishing weights, of giving the GPU to engines and of taking
it back, and the memory compared with the estimate of the dry run. Without a GPU all of it runs
scaled down on the CPU, where bytes are not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import AutoModelForCausalLM

from agentenv.assembly.checks.memory import find_shape, learner_memory
from agentenv.assembly.serving.gpus import GIB
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import tree_credit
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.learner import DeepSpeedLearner
from benchmarks.parts.layouts import WARM_UP, grow, load_shapes
from tests.gpu.place import HAS_GPU, timed, used_gib
from tests.gpu.test_tree_gpu import random_policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
DTYPE: Literal["bfloat16", "float32"] = "bfloat16" if HAS_GPU else "float32"
TOKENS = 16384 if HAS_GPU else 512
ALGORITHM = ARPO(group_size=8, importance_cap=2.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_policy("0.5B").model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def some_trees() -> list[TrajectoryTree]:
    shapes = load_shapes()["arpo_defaults"]["trees"] if HAS_GPU else WARM_UP
    return [grow(nodes, index) for index, nodes in enumerate(shapes)]


CASES: dict[str, dict[str, Any]] = {
    "stage1": {"zero_stage": 1, "activation_checkpointing": True},
    "stage3": {"zero_stage": 3, "activation_checkpointing": True},
    "stage2-offload": {
        "zero_stage": 2, "activation_checkpointing": True, "offload": "optimizer", "num_threads": 8,
    },
    "all-activations": {"zero_stage": 1, "activation_checkpointing": False},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES if HAS_GPU else ["stage1"])
async def test_an_update_fits_into_the_memory_estimate_of_the_dry_run(
    model: Path, name: str, tmp_path: Path
) -> None:
    config = LearnerConfig(
        optimizer="adamw",
        learning_rate=1e-6,
        dtype=DTYPE,
        max_tokens_per_microbatch=TOKENS,
        groups_per_minibatch=64,
        command_timeout_s=600,
        **CASES[name],
    )
    shape = find_shape(model)
    assert shape is not None
    counted = learner_memory(shape, config, TOKENS)
    before = used_gib()
    start_s, learner = await timed(
        DeepSpeedLearner.start(config, ALGORITHM, model, tmp_path / "log")
    )
    try:
        trees = some_trees()
        credits = [(tree, credit) for tree in trees if (credit := tree_credit(tree, group_size=1))]
        found = [await timed(learner.update(credits))]  # the first two compile
        first = AutoModelForCausalLM.from_pretrained(await learner.export(tmp_path / "first"))
        found += [await timed(learner.update(credits)) for _ in range(3)]
        metrics = found[-1][1]
        used = used_gib() - before
        publish_s, _ = await timed(learner.publish(tmp_path / "published"))
        naps = []
        for _ in range(2):  # the first allocates main memory for its copies
            sleep_s, _ = await timed(learner.sleep())
            asleep = used_gib() - before
            naps.append((sleep_s, (await timed(learner.wake()))[0]))
        again = await learner.update(credits)
        second = AutoModelForCausalLM.from_pretrained(await learner.export(tmp_path / "second"))
    finally:
        await learner.close()
    assert metrics["num_skipped"] == again["num_skipped"] == 0
    assert again["loss"] == pytest.approx(metrics["loss"], rel=0.2, abs=1e-4)
    moved = [not a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert any(moved)
    allocated, reserved = (metrics.get(f"gpu_{n}_gib", 0.0) for n in ("allocated", "reserved"))
    print(
        f"\n{name}: start {start_s:.1f} s, updates of {metrics['num_tokens']:,.0f} tokens "
        + ", ".join(f"{took:.2f}" for took, _ in found)
        + f" s, publish {publish_s:.2f} s, to sleep and back "
        + ", ".join(f"{down:.2f} and {up:.2f} s" for down, up in naps)
        + f"\n  tensors {allocated:.1f} GiB, torch holds {reserved:.1f}, the process {used:.1f} "
        f"(asleep {asleep:.1f}), "
        f"the dry run counts {counted.gpu_bytes / GIB:.1f}: "
        + ", ".join(f"{part} {size / GIB:.1f}" for part, size in counted.gpu.items())
    )
    if HAS_GPU:
        assert allocated <= reserved < used
        # The allocator releases memory beyond its tensors before it runs out of memory.
        assert allocated + used - reserved <= counted.gpu_bytes / GIB
        assert asleep < 2.5  # only CUDA's context
