"""Tree training on a GPU: `python -m pytest tests/gpu/test_tree_gpu.py -s`.

Checks FlexAttention and the log-prob head, then prints, for the shapes of Qwen2.5-0.5B, 1.5B and 7B
with random weights, tokens per second, peak memory and the share of the matrix peak of trees and of
flat layouts, and the layout that the learner chooses; with `-k speed` the latter alone. Without a
GPU all of it runs scaled down, and its figures are meaningless.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from random import Random
from statistics import median

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.trees.attention import TreeLayout
from agentenv.learners.trees.encoded_tree import encode
from agentenv.learners.trees.liger import use_liger
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import LogprobHead, Policy, tensors
from benchmarks.parts.layouts import ALL, VOCABULARY, WARM_UP, count, load_shapes, make_step
from tests.gpu.place import DEVICE, HAS_GPU, synchronize
from tests.learners.trees import MODELS, random_tree, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
NUM_STEPS = 3 if HAS_GPU else 1
# FlexAttention compiles for minutes on a CPU, and has no backward pass there.
FORMS = (("cuda", "flex"), ("cuda", "dense")) if HAS_GPU else (("cpu", "dense"),)
LEAVES = [6, 60] if HAS_GPU else [6]
SUPPORTED = [one for one in ALL if one != "segments" or not HAS_GPU]
HAS_LIGER = HAS_GPU and find_spec("liger_kernel") is not None


@pytest.fixture(autouse=True)
def _no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def gradients(model: nn.Module, logprobs: Tensor) -> Tensor:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_leaves", LEAVES)
def test_flex_equals_dense_and_the_cpu(name: str, num_leaves: int) -> None:
    """60 leaves: several blocks of 128 tokens, whole, partial and empty ones among them."""
    trees = [random_tree(Random(i), index=i, num_leaves=num_leaves) for i in range(3)]
    algorithm = GRPO(group_size=num_leaves)
    encoded = [encode(tree, algorithm.credit(tree), 0) for tree in trees]
    (batch,) = pack(encoded, 10**6)
    found = {}
    for device, form in (*FORMS, ("cpu", "blocked")):
        place = torch.device(device)
        # FlexAttention needs heads of at least 16 channels.
        model = tiny_model(name, head_dim=16).to(place)
        token_ids, positions, _, source, targets, *_ = tensors(batch, place)
        layout = TreeLayout(batch.end, place, form)
        logprobs, _, _ = Policy(model)(token_ids, positions, layout, source, targets)
        found[form] = logprobs.detach().cpu(), gradients(model, logprobs).cpu()
    for _, form in FORMS:
        torch.testing.assert_close(found[form][0], found["blocked"][0], rtol=1e-4, atol=1e-4)
        difference = (found[form][1] - found["blocked"][1]).norm()
        assert difference < 1e-4 * found["blocked"][1].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_sums_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = LogprobHead.of(nn.Linear(256, 5000, device=DEVICE, dtype=dtype))
    hidden = torch.randn(600, 256, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.randint(5000, (600,), device=DEVICE)
    logprobs, entropies, _ = head(hidden, targets)
    (logprobs + 0.1 * entropies).sum().backward()
    exact, weight, bias = (
        one.detach().double().requires_grad_() for one in (hidden, head.weight, head.bias)
    )
    rows = nn.functional.linear(exact, weight, bias).log_softmax(-1)
    chosen, entropy = rows.gather(-1, targets[:, None])[:, 0], -(rows.exp() * rows).sum(-1)
    (chosen + 0.1 * entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), chosen, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies.double(), entropy, rtol=1e-4, atol=1e-4)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in ((hidden, exact), (head.weight, weight), (head.bias, bias)):
        assert (one.grad.double() - other.grad).norm() < tolerance * other.grad.norm()


SIZES: dict[str, dict[str, int]] = {  # as their config.json has them
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128},
}  # fmt: skip
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip


def random_policy(size: str, *, fused: bool = False) -> Policy:
    """With the configuration of Qwen2.5 of that size, or a small one on the CPU."""
    config = Qwen2Config(
        **(SIZES[size] if HAS_GPU else SMALL),
        vocab_size=151_936 if HAS_GPU else VOCABULARY,
        max_position_embeddings=32768,
        tie_word_embeddings=size != "7B",
    )
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16 if HAS_GPU else torch.float32).eval()
    if fused:
        use_liger(model)
    return Policy(model, checkpointing=True)


def seconds(step: object) -> float:
    assert callable(step)
    step()  # compiles
    step()
    found = []
    for _ in range(NUM_STEPS):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        found.append(time.perf_counter() - start)
    return median(found)


def matrix_peak() -> float:
    """Floating point operations per second of a large product in bfloat16."""
    side = 8192 if HAS_GPU else 256
    left, right = torch.randn(2, side, side, device=DEVICE, dtype=torch.bfloat16)
    return 2 * side**3 / seconds(lambda: left @ right)


def seconds_with_liger(shape: str, size: str) -> float:
    policy = random_policy(size, fused=True)
    return seconds(make_step("tree", load_shapes()[shape]["trees"], policy))


SPEEDS = [
    ("arpo_defaults", "7B"),
    *((shape, s) for s in ("1.5B", "0.5B") for shape in load_shapes()),
]


@pytest.mark.parametrize(("shape", "size"), SPEEDS if HAS_GPU else SPEEDS[-1:])
def test_speed_on_random_weights(shape: str, size: str) -> None:
    trees = load_shapes()[shape]["trees"] if HAS_GPU else WARM_UP
    policy, peak = random_policy(size), matrix_peak()
    times = {}
    name = torch.cuda.get_device_name() if HAS_GPU else "CPU, in small"
    print(f"\n{name}, {shape}, {size}, matrix peak {peak / 1e12:.2f} TFLOP/s")
    for layout in SUPPORTED:
        step = make_step(layout, trees, policy)
        if HAS_GPU:
            torch.cuda.reset_peak_memory_stats()
        times[layout] = seconds(step)
        tokens, _, flops = count(layout, trees, policy)
        print(
            f"  {layout:8} {times[layout]:.3f} s, {tokens / times[layout]:,.0f} tokens/s, "
            f"peak {torch.cuda.max_memory_allocated() / 1e9 if HAS_GPU else 0:.1f} GB, "
            f"{flops / times[layout] / peak:.1%} of the matrix peak"
        )
    if HAS_LIGER and (shape, size) == ("arpo_defaults", "1.5B"):
        # In a separate process, since it changes transformers' modules.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            took = pool.submit(seconds_with_liger, shape, size).result()
        print(f"  tree, liger: {took:.3f} s")
    counted = count("varlen", trees, policy)[2] / count("tree", trees, policy)[2]
    ratio = times["varlen"] / times["tree"]
    print(f"  varlen over tree {ratio:.2f}, counted {counted:.2f}")
    assert counted >= 1


def test_layouts_are_equal_on_random_weights_of_half_a_billion() -> None:
    """Sum of weighted log-probs and norm of its gradient, in the dtype of training: they differ by
    rounding only."""
    policy = random_policy("0.5B")
    trees = load_shapes()["prefix2048x16"]["trees"] if HAS_GPU else WARM_UP
    found = {}
    for layout in SUPPORTED:
        loss = make_step(layout, trees, policy)()
        norms = [p.grad.float().norm() for p in policy.parameters() if p.grad is not None]
        found[layout] = loss, float(torch.stack(norms).norm())
    for loss, norm in found.values():
        assert loss == pytest.approx(found["varlen"][0], rel=1e-2 if HAS_GPU else 1e-4)
        assert norm == pytest.approx(found["varlen"][1], rel=3e-2 if HAS_GPU else 1e-4)
