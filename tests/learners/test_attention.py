"""Every form of attention on packed trees against a dense mask, and the hook into transformers."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from agentenv.base.errors import ConfigError
from agentenv.learners.trees import attention as attention_blocked
from agentenv.learners.trees.attention import (
    NO_MASK,
    BlockPlan,
    TreeLayout,
    _attend,
    _attention,
    blocked_attention,
    chain_blocks,
    use_tree_attention,
)
from agentenv.learners.trees.flex_attention import block_mask, flex_tree_attention, visible_blocks
from tests.learners.trees import MODELS, tiny_model

CPU = torch.device("cpu")


def random_end(seed: int, max_tokens: int = 60) -> np.ndarray:
    """`end` of a random forest in pre-order: each token hangs below one of the open ones."""
    random = Random(seed)
    num_tokens = random.randint(1, max_tokens)
    end = np.full(num_tokens, num_tokens)
    path: list[int] = []
    for token in range(num_tokens):
        keep = len(path) if random.random() < 0.8 else random.randint(0, len(path))
        end[path[keep:]] = token
        path = [*path[:keep], token]
    return end.astype(np.int64)


def dense(end: np.ndarray) -> torch.Tensor:
    """The definition, pair by pair."""
    n = len(end)
    return torch.tensor([[k <= q < end[k] for k in range(n)] for q in range(n)])


seeds = st.integers(0, 10**6)


@given(seeds)
def test_blocks_hold_each_visible_pair_once_and_no_other(seed: int) -> None:
    end = random_end(seed)
    held = torch.zeros(len(end), len(end), dtype=torch.int64)
    queries_of_causal = []
    for block in chain_blocks(end):
        queries = slice(block.first_query, block.last_query)
        keys = slice(block.first_key, block.last_key)
        part = torch.ones_like(held[queries, keys])
        held[queries, keys] += part.tril() if block.kind == "causal" else part
        if block.kind == "causal":
            assert queries == keys
            queries_of_causal += range(block.first_query, block.last_query)
    assert torch.equal(held, dense(end).long())
    assert queries_of_causal == list(range(len(end)))
    assert sum(block.pairs for block in chain_blocks(end)) == int(dense(end).sum())


def test_the_form_is_chosen_by_counted_pairs() -> None:
    assert [block.kind for block in BlockPlan(np.full(400, 400)).blocks] == ["causal"]
    # Tokens that see themselves only: one call with all pairs, until those outweigh the calls.
    limit = attention_blocked.CALL_PAIRS
    assert [block.kind for block in BlockPlan(np.arange(1, limit)).blocks] == ["masked"]
    assert len(BlockPlan(np.arange(1, limit + 2)).blocks) == limit + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call_pairs", [0, 10**9])
def test_blocked_attention_equals_a_dense_mask(
    dtype: torch.dtype, call_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_blocked, "CALL_PAIRS", call_pairs)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for seed in range(12):
        end = random_end(seed, 90)
        torch.manual_seed(seed)
        shapes = [(1, 6, len(end), 8), (1, 2, len(end), 8), (1, 2, len(end), 8)]
        inputs = [torch.randn(shape, dtype=dtype).mul(2).requires_grad_() for shape in shapes]
        grad = torch.randn(1, len(end), 6, 8, dtype=dtype)
        plan = BlockPlan(end)
        assert (plan.blocks[0].kind == "masked") == (call_pairs > 0 and len(chain_blocks(end)) > 1)
        output = blocked_attention(*inputs, plan, 0.3)
        found = [output, *torch.autograd.grad(output, inputs, grad)]
        exact = [one.detach().double().requires_grad_() for one in inputs]
        expected = scaled_dot_product_attention(
            *exact, attn_mask=dense(end), scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        grads = torch.autograd.grad(expected, exact, grad.double())
        for one, other in zip(found, [expected, *grads], strict=True):
            assert one.dtype == dtype
            assert (one - other).norm() <= tolerance * other.norm()


def test_blocked_attention_passes_gradcheck() -> None:
    end = np.array([9, 9, 5, 4, 5, 9, 8, 8, 9, 11, 11])
    shapes = [(1, 4, 11, 4), (1, 2, 11, 4), (1, 2, 11, 4)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    plan = BlockPlan(end)
    plan.blocks = chain_blocks(end)
    assert torch.autograd.gradcheck(lambda *args: blocked_attention(*args, plan, 0.5), inputs)


@given(seeds, st.sampled_from([2, 4, 7]))
def test_block_mask_equals_the_dense_mask(seed: int, size: int) -> None:
    end = random_end(seed)
    partial, full = visible_blocks(torch.from_numpy(end), size)
    blocks = -(-len(end) // size)
    padded = np.concatenate([end, np.arange(len(end), blocks * size) + 1])
    pairs = dense(padded).view(blocks, size, blocks, size).transpose(1, 2)
    assert torch.equal(full, pairs.all(-1).all(-1) & ~torch.eye(blocks, dtype=torch.bool))
    assert torch.equal(partial | full, pairs.any(-1).any(-1))
    assert not (partial & full).any()
    mask = block_mask(torch.from_numpy(end), size)
    assert mask.shape == (1, 1, len(end), len(end))
    counts = (mask.kv_num_blocks + mask.full_kv_num_blocks)[0, 0]
    assert torch.equal(counts, pairs.any(-1).any(-1).sum(1).int())
    for row, (count, order) in enumerate(
        zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)
    ):
        assert order[:count].tolist() == full[row].nonzero()[:, 0].tolist()


def test_the_block_mask_needs_no_tensor_of_all_pairs() -> None:
    """100,000 tokens: all pairs would be 10 GB."""
    mask = block_mask(torch.full((100_000,), 100_000))
    sizes = [mask.kv_indices.numel(), mask.full_kv_indices.numel()]
    assert max(sizes) <= (100_000 // 128 + 1) ** 2
    assert int(mask.full_kv_num_blocks.sum()) == 780 * 781 // 2


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention_uses_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, not compiled: the only part of FlexAttention that runs on a CPU in a test."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("agentenv.learners.trees.flex_attention._compiled", lambda: flex_attention)
    end = random_end(5, 200)
    query, key = torch.randn(1, 4, len(end), 16), torch.randn(1, 2, len(end), 16)
    found = flex_tree_attention(query, key, key, block_mask(torch.from_numpy(end)), 0.25)
    expected = blocked_attention(query, key, key, BlockPlan(end), 0.25)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_a_layout_is_unchanged(name: str) -> None:
    """Also with padding: a registered name without a mask function would drop the mask."""
    ids = torch.randint(61, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    plain, hooked = tiny_model(name), tiny_model(name)
    use_tree_attention(hooked)
    torch.testing.assert_close(hooked(input_ids=ids).logits, plain(input_ids=ids).logits)
    found, expected = (
        one(input_ids=ids, attention_mask=mask).logits[mask.bool()] for one in (hooked, plain)
    )
    torch.testing.assert_close(found, expected)
    masked, free = (hooked(input_ids=ids, attention_mask=m).logits[0, -1] for m in (mask, None))
    assert (masked - free).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["blocked", "dense", "flex"])  # flex: heads too narrow for it
def test_tree_positions_do_not_become_packed_sequences(name: str, form: str) -> None:
    """The trap: the same positions without a layout give other hidden states, and no error."""
    model = tiny_model(name, torch.float64)
    use_tree_attention(model)
    end = np.array([7, 7, 5, 5, 5, 7, 7])
    ids, depth = torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), torch.tensor([[0, 1, 2, 3, 4, 2, 3]])

    def hidden(**inputs: object) -> torch.Tensor:
        return model.base_model(use_cache=False, **inputs).last_hidden_state[0]

    packed = hidden(
        input_ids=ids,
        position_ids=depth,
        attention_mask=NO_MASK,
        tree_layout=TreeLayout(end, CPU, form),
    )
    first, second = hidden(input_ids=ids[:, :5]), hidden(input_ids=ids[:, [0, 1, 5, 6]])
    torch.testing.assert_close(packed[:5], first, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(packed[5:], second[2:], rtol=1e-6, atol=1e-6)
    trapped = hidden(input_ids=ids, position_ids=depth)
    assert (trapped[5:] - second[2:]).abs().max() > 1e-3


def test_a_layout_without_its_mask_is_refused() -> None:
    model = tiny_model()
    use_tree_attention(model)
    ids, layout = torch.tensor([[3, 1, 4]]), TreeLayout(np.array([3, 3, 3]), CPU)
    for wrong in (
        {"tree_layout": layout},
        {"attention_mask": NO_MASK},
        {"attention_mask": NO_MASK, "tree_layout": TreeLayout(np.array([2, 2]), CPU)},
    ):
        with pytest.raises(ValueError, match="layout"):
            model.base_model(input_ids=ids, use_cache=False, **wrong)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [1, 3, 40, 150, 10_000])
def test_a_window_shows_the_last_tokens_of_the_path(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form; FlexAttention forward only, by blocks that skip tokens outside every
    window."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr("agentenv.learners.trees.flex_attention._compiled", lambda: flex_attention)
    end = random_end(7, 300)
    place = np.arange(len(end))
    seen = (place <= place[:, None]) & (place[:, None] < end)
    far = seen.cumsum(1)  # of q's path, the k-th token sees 1 + k; q itself comes last
    near = torch.from_numpy(seen & (far > far[place, place][:, None] - window))
    query, key, value = (torch.randn(1, heads, len(end), 16) for heads in (4, 2, 2))
    expected = scaled_dot_product_attention(query, key, value, near, scale=0.25, enable_gqa=True)
    for form in ("blocked", "flex", "dense"):
        layout = TreeLayout(end, CPU, form)
        found = _attend(query, key, value, layout, 0.25, window)
        torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    depth = torch.from_numpy(layout.depth)
    assert torch.equal(depth, near.new_tensor(seen).sum(1) - 1)
    some, full = visible_blocks(torch.from_numpy(end), 16, depth, window)
    blocks = torch.nn.functional.pad(near, (0, -len(end) % 16, 0, -len(end) % 16))
    blocks = blocks.view(len(some), 16, len(some), 16).transpose(1, 2).flatten(2)
    assert not (blocks.any(-1) & ~(some | full)).any()
    assert blocks[:-1].all(-1)[full[:-1]].all()
    assert window > 40 or (some | full).sum() < (blocks.any(-1) | full).sum() + 3 * len(some)


def test_computations_without_tree_support_are_refused() -> None:
    model = tiny_model()
    use_tree_attention(model)
    layout = TreeLayout(np.array([3, 3, 3]), CPU)
    heads = torch.randn(1, 4, 3, 8)
    with pytest.raises(ConfigError, match="attention with s_aux"):
        _attention(model, heads, heads, heads, NO_MASK, tree_layout=layout, s_aux=torch.zeros(4))


def test_models_without_layout_support_are_refused() -> None:
    model = tiny_model("llama")
    model.config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="attention_dropout"):
        use_tree_attention(model)
