"""TRL's TreeRow, which folds samples into a trie of their tokens, at the work of `learner`.

TRL itself makes the rows: its `packing.py` is loaded alone, since its package needs more than a
learner has. The attention that it asks for is a kernel of GPUs for segments of unequal length, to
the keys and values that TRL gathers for them: there PyTorch's own, elsewhere a call per segment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentenv.errors import ConfigError
from agentenv.learners.batch import EncodedTree
from agentenv.learners.policy import Policy

NAME = "tree_row"  # of the attention, as transformers knows it


@cache
def _file() -> Path | None:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / "experimental" / "async_grpo" / "packing.py"
    return path if path.is_file() else None


def is_installed() -> bool:
    """Whether there is a TRL that has TreeRow: 1.16 or newer."""
    return _file() is not None


@cache
def _packing() -> ModuleType:
    path = _file()
    if path is None:
        raise ConfigError("TreeRow is of TRL 1.16 or newer: pip install --no-deps 'trl>=1.16'")
    spec = importlib.util.spec_from_file_location("trl_packing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    return module


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    tree_kv_index: Tensor,
    tree_cu_seqlens_q: list[int],
    tree_cu_seqlens_k: list[int],
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, channels], key and value with their own number of heads; gives
    [1, tokens, heads, channels]. A segment sees its path and, of itself, what is not behind."""
    keys, values = (one.index_select(2, tree_kv_index) for one in (key, value))
    if query.is_cuda:
        ends = tree_cu_seqlens_q, tree_cu_seqlens_k
        return _attend_at_once(query, keys, values, *ends, scaling), None
    found = []
    for number, start in enumerate(tree_cu_seqlens_q[:-1]):
        end = tree_cu_seqlens_q[number + 1]
        path = slice(tree_cu_seqlens_k[number], tree_cu_seqlens_k[number + 1])
        num_before = path.stop - path.start - (end - start)
        seen = None
        if num_before:  # else it begins a sample, and plain causal attention is cheaper
            seen = torch.ones(end - start, path.stop - path.start, dtype=torch.bool)
            seen = seen.tril(num_before)
        found.append(
            scaled_dot_product_attention(
                query[:, :, start:end],
                keys[:, :, path],
                values[:, :, path],
                attn_mask=seen,
                is_causal=seen is None,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(found, 2).transpose(1, 2), None


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: list[int],
    key_ends: list[int],
    scaling: float,
) -> Tensor:
    """All segments in one kernel, whose causal mask is aligned to the last query and key."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.11 or newer

    copies = query.shape[1] // key.shape[1]
    keys, values = (one[0].repeat_interleave(copies, 0).transpose(0, 1) for one in (key, value))
    ends = (query_ends, key_ends)
    of_queries, of_keys = (torch.tensor(e, dtype=torch.int32, device=query.device) for e in ends)
    most_queries, most_keys = (int(np.diff(e).max()) for e in ends)
    attended = varlen_attn(
        query[0].transpose(0, 1),
        keys,
        values,
        of_queries,
        of_keys,
        most_queries,
        most_keys,
        scale=scaling,
        window_size=(-1, 0),
    )
    assert isinstance(attended, Tensor)
    return attended[None]


def pack(groups: Sequence[Sequence[EncodedTree]], budget: int) -> list[dict[str, Tensor]]:
    """The rows of one rank, filled as TRL fills them: a row is closed when the next trajectory has
    no room in it. One that has none in any, which TRL leaves out, gets a row of its own. `groups`
    are the trajectories of each tree."""
    make = _packing().TreeRow
    rows = [make()]
    for number, group in enumerate(groups):
        for one in group:
            sample = {
                "input_ids": torch.from_numpy(one.ints("token_ids").astype(np.int64)),
                "completion_mask": torch.from_numpy(one.actions().astype(np.int64)),
                "old_log_probs": torch.zeros(one.num_tokens),
                "advantage": 1.0,
                "group_id": number,
            }
            if rows[-1].samples and not rows[-1].fits(sample, budget):
                rows.append(make())
            rows[-1].add(sample)
    return [row.pack() for row in rows]


def make_step(rows: Sequence[dict[str, Tensor]], policy: Policy) -> Callable[[], float]:
    """A function that runs forward and backward over all rows and returns the loss: the sum, over
    the trained tokens of all trajectories, of what is negative log-probability."""

    def step() -> float:
        policy.zero_grad()
        model = policy.model
        device = next(model.parameters()).device
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        total = 0.0
        try:
            for row in ({name: one.to(device) for name, one in row.items()} for row in rows):
                labels = row["shift_labels"]
                hidden = model.base_model(
                    input_ids=row["input_ids"][None],
                    position_ids=row["position_ids"][None],
                    use_cache=False,
                    tree_kv_index=row["tree_kv_index"],
                    tree_cu_seqlens_q=row["tree_cu_seqlens_q"].tolist(),
                    tree_cu_seqlens_k=row["tree_cu_seqlens_k"].tolist(),
                ).last_hidden_state[0]
                places = (labels != -100).nonzero()[:, 0]  # a shared token is computed once
                logprobs = model.lm_head(hidden[places], labels[places])[0]
                at = torch.zeros(len(labels), dtype=torch.long, device=device)
                at[places] = torch.arange(len(places), device=device)
                loss = -logprobs[at[row["token_index"]]].sum()
                loss.backward()
                total += float(loss.detach())
        finally:
            model.set_attn_implementation(before)
        return total

    return step
