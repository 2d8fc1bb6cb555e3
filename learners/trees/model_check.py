"""A check that a model's forward pass equals that of transformers, before its weights load.

A random model of the same class, with reduced sizes of its config.json, scores two sequences and a
tree twice: as a micro-batch, and path by path with the unmodified model. Otherwise a family with
window attention, scaled logits, or layers that mix neighbors could train on wrong log-probs without
an error. The parity gap compares real weights with the engine's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentenv.base.errors import ConfigError
from agentenv.learners.trees.encoded_tree import LAYOUTS, EncodedTree, from_arrays
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, recurrent_kinds, tensors

TOLERANCE = 1e-3  # nats, in float32
VOCABULARY = 64
WINDOW = 5  # tokens, less than the paths below, like every other length in a small model
POSITIONS = 8
HEADS, HEAD_SIZE = 4, 16
SIZES = {  # of a small model; sizes that its configuration does not have are skipped
    "hidden_size": HEADS * HEAD_SIZE,
    "head_dim": HEAD_SIZE,
    "intermediate_size": 64,
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "v_head_dim"), 16),
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_head_dim", "ssm_state_size"), 16),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}
SPREAD = 0.15  # of random weights, so that log-probs depend on token and context


def check_model(directory: Path, context_parallel: int = 1) -> None:
    """Raises ConfigError, with the family and the likely reason, for a model that is computed
    wrongly, or of which no small one can be made, and for one that `context_parallel` ranks cannot
    share."""
    config = AutoConfig.from_pretrained(directory)
    family = f"{directory}: the family {config.model_type}"
    recurrent = recurrent_kinds(config)
    if context_parallel > 1 and recurrent:
        raise ConfigError(
            f"learner.context_parallel = {context_parallel}: {family} has layers of type "
            f"{', '.join(recurrent)}, which carry state from token to token and cannot be computed "
            "in parts; set learner.context_parallel = 1"
        )
    try:
        gap = distance(small(config))
    except ConfigError as error:
        raise ConfigError(f"{family} is not supported: {error}") from error
    except Exception as error:  # any error of a model family's code
        raise ConfigError(
            f"{family} is not supported: its forward pass over a packed tree failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not gap <= TOLERANCE:
        raise ConfigError(
            f"{family} is not supported: with random weights its log-probs differ from "
            f"transformers' own by {gap:.2g} nats, at most {TOLERANCE:g} expected; "
            f"{reason(config)}"
        )


def distance(config: Any) -> float:
    """The largest difference of log-probs, nats, between both computations of a random model."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=SPREAD)
        trees = list(examples())
        expected = torch.cat([_alone(model, tree) for tree in trees])
        policy = Policy(model)
        layouts = LAYOUTS if policy.masks is None else LAYOUTS[:1]
        gap = []
        for layout in layouts:
            (batch,) = pack(trees, 1 << 20, layout)
            found, _, _ = policy(*tensors(batch, torch.device("cpu")))
            gap.append(found - expected[torch.from_numpy(batch.index)])
        return float(torch.cat(gap).abs().max())


def examples() -> Iterator[EncodedTree]:
    """Sequences and a tree with a fork, shorter and longer than windows and limits."""
    rng = np.random.default_rng(0)
    for sizes, parents in (([4], [-1]), ([23], [-1]), ([9, 11, 4], [-1, 0, 0])):
        total = sum(sizes)
        action = np.arange(total) > 0
        ids = rng.integers(1, VOCABULARY, total)
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        yield from_arrays(ids, action, starts, parents, weight=np.ones(len(sizes)))


def _alone(model: Any, tree: EncodedTree) -> Tensor:
    """Log-probs of the trained tokens, [tokens], path by path with the model's forward pass."""
    ids, pred = tree.ints("token_ids"), tree.ints("pred")
    found = torch.zeros(len(ids))
    for place in set(range(len(ids))) - set(pred.tolist()):  # the last tokens of the paths
        path = [place]
        while pred[path[-1]] >= 0:
            path.append(int(pred[path[-1]]))
        tokens = torch.from_numpy(ids[path[::-1]]).long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        logprobs = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found[path[-2::-1]] = logprobs
    return found[torch.tensor(tree.actions())]


def small(config: Any) -> Any:
    """A copy with few narrow layers, one of each kind, and windows and positions shorter than the
    examples. Everything else, including scales and caps, is unchanged."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    _keep_one_layer_of_each_kind(text)
    share = _share(text)
    sizes = {**SIZES, "num_attention_heads": HEADS, "num_key_value_heads": HEADS // share}
    if hasattr(text, "qk_rope_head_dim"):  # latent attention: positions have a separate width
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    for name, size in {**sizes, "vocab_size": VOCABULARY}.items():
        now = getattr(text, name, False)
        if isinstance(now, int | None) and not isinstance(now, bool):
            with contextlib.suppress(AttributeError):  # derived from others
                setattr(text, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, WINDOW)
    _shorten_positions(text)
    return config


def _share(text: Any) -> int:
    """Query heads per key head of the small model: as in the large one, if possible."""
    heads, keys = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    share = heads // keys if isinstance(heads, int) and isinstance(keys, int) and keys else 1
    return share if HEADS % max(1, share) == 0 else HEADS


def _keep_one_layer_of_each_kind(text: Any) -> None:
    """Keep one layer of each kind, at least two. Lists with one entry per layer, and lists of layer
    numbers, determine the kinds."""
    total = text.num_hidden_layers
    values = {name: value for name, value in vars(text).items() if isinstance(value, list)}
    by_layer = {name: value for name, value in values.items() if len(value) == total > 1}
    numbered = {
        name: value
        for name, value in values.items()
        if name not in by_layer and "layer" in name and all(isinstance(n, int) for n in value)
    }
    dense = getattr(text, "first_k_dense_replace", 0) or 0
    kinds: dict[Any, int] = {}
    for layer in range(total):
        kind = (
            *(str(value[layer]) for value in by_layer.values()),
            *(layer in value for value in numbered.values()),
            layer < dense,
        )
        kinds.setdefault(kind, layer)
    kept = sorted({*kinds.values(), *range(min(2, total))}) if len(kinds) < 2 else [*kinds.values()]
    text.num_hidden_layers = len(kept)
    for name, value in by_layer.items():
        setattr(text, name, [value[layer] for layer in kept])
    for name, value in numbered.items():
        setattr(text, name, [place for place, layer in enumerate(kept) if layer in value])
    if dense:
        text.first_k_dense_replace = sum(layer < dense for layer in kept)


def _shorten_positions(text: Any) -> None:
    """Reduce the limits for scaled positions below the lengths of the examples."""
    for rope in _ropes(text):
        width = int(HEAD_SIZE * float(rope.get("partial_rotary_factor") or 1.0)) // 2
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = POSITIONS
        for name in ("short_factor", "long_factor"):
            if rope.get(name):
                rope[name] = rope[name][:width]
        if rope.get("rope_type") in ("dynamic", "longrope"):
            text.max_position_embeddings = POSITIONS
    if getattr(text, "original_max_position_embeddings", None):
        text.original_max_position_embeddings = POSITIONS


def _ropes(text: Any) -> list[dict[str, Any]]:
    """The settings of rotary positions: one table, or one per kind of layer."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [one for one in (found, *found.values()) if isinstance(one, dict) and "rope_type" in one]


def reason(config: Any) -> str:
    """The setting of the configuration that explains a difference, as far as it is known."""
    kinds = [rope["rope_type"] for rope in _ropes(config.get_text_config())]
    known = [f"rope_type = {kind}" for kind in kinds if kind in ("dynamic", "longrope")]
    cause = f"its config.json has {', '.join(known)}" if known else "its layers differ"
    return f"{cause}; docs/learner.md lists the supported families"
