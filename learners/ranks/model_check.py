"""A rehearsal of a model: before its weights load, a small random one of its class is trained.

It keeps the inequalities of its config.json between narrow sizes, and scores two sequences and a
tree twice: as a micro-batch in each layout, and path by path with the unmodified model. Log-probs
and gradients must agree; otherwise a family with window attention, scaled logits, or layers that
mix neighbors could train on wrong ones without an error. Its export must be read back as written.
The parity gap compares real weights with the engine's.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from agentenv.base.errors import ConfigError, MissingError
from agentenv.base.model_files import load_config, load_pretrained
from agentenv.learners.ranks.export import entries, write_weights
from agentenv.learners.trees.encoded_tree import LAYOUTS, EncodedTree, from_arrays
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, recurrent_kinds, tensors, text_part

TOLERANCE = 1e-3  # of log-probs in nats, of gradients as a part of their norm, in float32
VOCABULARY = 64
WINDOW = 5  # tokens, less than the paths below, like every other length in a small model
POSITIONS = 8
HEADS, HEAD_SIZE = 4, 16
SIZES = {  # of a small model; sizes that its configuration does not have are skipped
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **{"hidden_size_per_layer_input": 16, "laurel_rank": 8, "zero_expert_num": 2},
    **{"num_attention_heads": HEADS, "hidden_size": HEADS * HEAD_SIZE},
}
# Widths that keep their ratios, and so the inequalities of their sums.
RATIOS: tuple[tuple[str, ...], ...] = (
    ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    ("linear_key_head_dim", "linear_value_head_dim"),
)
ORDERED = (  # sizes that keep their order: names, the least one, and the step to the next
    (("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
      "shared_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 32, 16),
    (("q_lora_rank", "kv_lora_rank"), 16, 8),
    (("linear_num_key_heads", "linear_num_value_heads"), 2, 2),
    (("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts", "num_local_experts",
      "n_routed_experts"), 2, 2),
    (("n_group", "topk_group"), 1, 1),
    (("vocab_size_per_layer_input", "vocab_size"), VOCABULARY, 8),
)  # fmt: skip
FIRST_LAYERS, LAST_LAYERS = ("first_k_dense_replace", "num_dense_layers"), ("num_kv_shared_layers",)
COUNTS = ("layers", "depth", "blocks")  # ends of names of numbers of layers
WIDTHS = ("hidden", "intermediate", "dim", "width", "d_model", "channel")
SPREAD = 0.15  # of random weights, so that log-probs depend on token and context


def check_model(directory: Path, context_parallel: int = 1) -> None:
    """Raises ConfigError, with the family and the likely reason, for a model that is computed or
    exported wrongly, or of which no small one can be made, and for one that `context_parallel`
    ranks cannot share."""
    config = load_config(directory)
    family = f"{directory}: the family {config.model_type}"
    problem = "no small model could be made"
    try:
        model = random_model(small(config))
        problem = "its forward pass or gradient over a packed tree failed"
        if not (gap := distance(model)) <= TOLERANCE:
            raise ConfigError(
                "with random weights its log-probs or gradients differ from transformers' own by "
                f"{gap:.2g} nats or of their norm, at most {TOLERANCE:g} expected; {reason(config)}"
            )
        problem = "its export could not be written and read"
        check_export(model)
    except (MissingError, ImportError) as error:
        raise MissingError(f"{family}: {' '.join(str(error).split())}") from error
    except ConfigError as error:
        raise ConfigError(f"{family} is not supported: {error}") from error
    except Exception as error:  # any error of a model family's code
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, OSError) or lacks_memory(error):
            raise ConfigError(f"{family} cannot be tried on this machine: {cause}") from error
        raise ConfigError(
            f"{family} is not supported: {problem} ({cause}); docs/learner.md lists the supported "
            "families"
        ) from error
    if context_parallel > 1 and (recurrent := recurrent_kinds(config)):
        raise ConfigError(
            f"learner.context_parallel = {context_parallel}: {family} has layers of type "
            f"{', '.join(recurrent)}, which carry state from token to token and cannot be computed "
            "in parts; set learner.context_parallel = 1"
        )


def lacks_memory(error: BaseException | None) -> bool:
    """Whether the machine or its GPU has run out of memory."""
    is_cpu_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu_allocator or isinstance(error, MemoryError | torch.OutOfMemoryError)


def random_model(config: Any) -> Any:
    """A model with random weights, float32."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        ).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=SPREAD)
    return model


def distance(model: Any) -> float:
    """The largest difference of both computations in any layout: of log-probs, nats, and of
    gradients, as a part of their norm. The model becomes that of a policy."""
    Policy(copy.deepcopy(model))  # refuses before passes that may be slow
    trees = list(examples())
    expected = torch.cat([_alone(model, tree) for tree in trees])
    weights = torch.linspace(-1.0, 1.0, len(expected))
    wanted = _gradient(model, expected @ weights)
    policy = Policy(model)
    gap = []
    for layout in LAYOUTS if policy.masks is None else LAYOUTS[:1]:
        (batch,) = pack(trees, 1 << 20, layout)
        found, _, _ = policy(*tensors(batch, torch.device("cpu")))
        index = torch.from_numpy(batch.index)
        gap.append((found - expected[index]).detach().abs().max())
        gradient = _gradient(model, found @ weights[index])
        gap.append((gradient - wanted).norm() / wanted.norm())
    return float(torch.stack(gap).max())


def _gradient(model: Any, value: Tensor) -> Tensor:
    """The gradient of a value, one row; 0 for unused weights."""
    model.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    own = text_part(model)
    grads = [(one, one.grad) for one in model.parameters() if id(one) in own]
    return torch.cat([(torch.zeros_like(one) if g is None else g).flatten() for one, g in grads])


def check_export(model: Any) -> None:
    """Raises ConfigError if the written model has a name twice, or is read as another."""
    names = Counter(entry.name for entry in entries(model))
    if twice := [name for name, number in names.items() if number > 1]:
        raise ConfigError(f"its export has {', '.join(twice)} twice")
    with TemporaryDirectory() as made:
        folder = Path(made)
        model.config.save_pretrained(folder)
        write_weights(entries(model), entries(model), folder)
        read = load_pretrained("AutoModelForCausalLM", folder, dtype=torch.float32)
    written, found = _text_state(model), _text_state(read)
    for name in written.keys() | found.keys():
        if name not in written or name not in found or not torch.equal(written[name], found[name]):
            raise ConfigError(f"its export is read back with another {name}")


def _text_state(model: Any) -> dict[str, Tensor]:
    own = text_part(model)
    return {name: one for name, one in model.state_dict(keep_vars=True).items() if id(one) in own}


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
    examples. Inequalities of sizes are kept; everything else, including scales and caps, is
    unchanged."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for tower in (getattr(config, name, None) for name in config.sub_configs):
        if isinstance(tower, PreTrainedConfig) and tower is not text:
            _narrow_tower(tower)
    tables = text.to_dict().get("per_layer_config") or {}  # sizes of single layers
    own = {int(layer): table for layer, table in tables.items()}
    if own:
        text.per_layer_config = None
    kept = _keep_one_layer_of_each_kind(text, own)
    sizes = _narrow(text, own.values())
    real = {name: getattr(text, name, False) for name in sizes}  # some have two names
    for name, now in real.items():
        size = sizes[name]
        if isinstance(now, list):
            setattr(text, name, [_of(size, one) for one in now])
        elif isinstance(now, int | None) and not isinstance(now, bool):
            with contextlib.suppress(AttributeError):  # derived from others
                setattr(text, name, _of(size, now))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, WINDOW)
    _shorten_positions(text)
    if own:
        text.per_layer_config = {
            place: {key: _of(sizes.get(key, one), one) for key, one in own.get(layer, {}).items()}
            for place, layer in enumerate(kept)
        }
    return config


def _narrow_tower(tower: Any) -> None:
    """Keep one layer, and one head with its share of the widths. Towers do not run here."""
    sizes = {name: one for name, one in vars(tower).items() if type(one) is int and one > 1}
    counts = {one for name, one in sizes.items() if name.endswith(COUNTS)}
    heads = math.gcd(*(one for name, one in sizes.items() if name.endswith("heads")))
    for name, value in vars(tower).items():
        if name in sizes and name.endswith((*COUNTS, "heads")):
            setattr(tower, name, 1)
        elif name in sizes and any(part in name for part in WIDTHS) and heads:
            setattr(tower, name, 4 * -(-value // (4 * heads)))
        elif isinstance(value, list | tuple) and len(value) in counts:
            setattr(tower, name, value[:1])


def _of(size: int | dict[int | None, int], now: int | None) -> int | None:
    """The small size of a real one."""
    return size.get(now, now) if isinstance(size, dict) else size


def _narrow(text: Any, own: Collection[dict[str, Any]]) -> dict[str, Any]:
    """The small sizes by name: a number, or numbers by the real size."""

    def real(*names: str) -> set[int]:
        """The sizes of these names, of all layers."""
        found = [getattr(text, name, None) for name in names]
        found += [table.get(name) for table in own for name in names]
        flat = [part for one in found for part in (one if isinstance(one, list) else [one])]
        return {part for part in flat if type(part) is int}

    sizes: dict[str, Any] = {**SIZES}
    for names in RATIOS:
        unit = math.gcd(*real(*names)) or 1
        scale = HEAD_SIZE if real(*names) <= {unit} else HEAD_SIZE // 2
        scaled = {None: scale} | {one: one // unit * scale for one in real(*names)}
        sizes |= dict.fromkeys(names, scaled)
    parts = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if None not in parts:
        sizes["qk_head_dim"] = sum(sizes["head_dim"][part] for part in parts)
    for names, least, step in ORDERED:
        ordered = enumerate(sorted(real(*names)))
        narrow = {None: least} | {one: least + step * place for place, one in ordered}
        sizes |= dict.fromkeys(names, narrow)
    sizes["q_lora_rank"] = {**sizes["q_lora_rank"], None: None}  # another form of queries
    heads, keys = (getattr(text, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    sizes["num_key_value_heads"] = {
        key: HEADS // _share(heads, key) for key in (*real("num_key_value_heads"), keys)
    }
    width = getattr(text, "head_dim", None)
    if type(heads) is type(width) is int and not real("qk_rope_head_dim", "mamba_expand"):
        sizes["hidden_size"] += HEAD_SIZE * int(np.sign(text.hidden_size - heads * width))
    for head, state in (("mamba_d_head", "mamba_d_state"), ("mamba_head_dim", "ssm_state_size")):
        for one, other in zip(real(state), real(head), strict=False):
            sizes[state] = HEAD_SIZE + HEAD_SIZE // 2 * int(np.sign(one - other))
    return sizes


def _share(heads: Any, keys: Any) -> int:
    """Query heads per key head of the small model: as in the large one, if possible."""
    share = heads // keys if isinstance(heads, int) and isinstance(keys, int) and keys else 1
    return share if HEADS % max(1, share) == 0 else HEADS


def _keep_one_layer_of_each_kind(text: Any, own: dict[int, dict[str, Any]]) -> list[int]:
    """Keep one layer of each kind, at least two, and return their numbers. Lists with one entry per
    layer, lists of layer numbers, and counts of layers determine the kinds."""
    total = text.num_hidden_layers
    values = {name: value for name, value in vars(text).items() if isinstance(value, list)}
    by_layer = {name: value for name, value in values.items() if len(value) == total > 1}
    numbered = {
        name: value
        for name, value in values.items()
        if name not in by_layer and "layer" in name and all(isinstance(n, int) for n in value)
    }
    counts = {name: range(getattr(text, name, None) or 0) for name in FIRST_LAYERS}
    counts |= {name: range(total - (getattr(text, name, None) or 0), total) for name in LAST_LAYERS}
    kinds: dict[Any, int] = {}
    for layer in range(total):
        kind = (
            *(str(value[layer]) for value in by_layer.values()),
            *(layer in value for value in (*numbered.values(), *counts.values())),
            str(own.get(layer)),
        )
        kinds.setdefault(kind, layer)
    kept = sorted({*kinds.values(), *range(min(2, total))}) if len(kinds) < 2 else [*kinds.values()]
    text.num_hidden_layers = len(kept)
    for name, value in by_layer.items():
        setattr(text, name, [value[layer] for layer in kept])
    for name, value in numbered.items():
        setattr(text, name, [place for place, layer in enumerate(kept) if layer in value])
    for name, layers in counts.items():
        if layers:
            setattr(text, name, sum(layer in layers for layer in kept))
    return kept


def _shorten_positions(text: Any) -> None:
    """Reduce the limits for scaled positions below the lengths of the examples."""
    for rope in _ropes(text):
        size = getattr(text, "head_dim", None) or HEAD_SIZE
        width = int(size * float(rope.get("partial_rotary_factor") or 1.0)) // 2
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = POSITIONS
        for name in ("short_factor", "long_factor"):
            if rope.get(name):
                rope[name] = rope[name][:width]
        if sections := rope.get("mrope_section"):
            parts = [part * width // sum(sections) for part in sections[:-1]]
            rope["mrope_section"] = [*parts, width - sum(parts)]
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
