"""What the files of a Hugging Face model directory say: vocabulary, context, ends of a turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.errors import DataError, ForeignError
from agentenv.foreign import decode


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. DataError: the file is no readable `what`."""
    try:
        return decode(path.read_bytes(), dict[str, Any])
    except (OSError, ForeignError) as error:
        raise DataError(f"{path}: not a readable {what}: {error}") from error


def read_model_config(model: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    return read_object(model / "config.json", "model configuration")


def vocab_size(model: Path) -> int:
    """The vocabulary that entropies range over."""
    size = read_model_config(model).get("vocab_size")
    if not isinstance(size, int):
        raise DataError(f"{model / 'config.json'}: key vocab_size is missing")
    return size


def num_positions(model_config: dict[str, Any]) -> int:
    """Tokens that the model was made for; 0: its config.json does not say."""
    return int(model_config.get("max_position_embeddings") or 0)


def num_experts(model_config: dict[str, Any]) -> int:
    """Experts of a layer; 0: it has none."""
    text = model_config.get("text_config", model_config)
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return max(int(text.get(name) or 0) for name in names)


def num_stretched_positions(model_config: dict[str, Any]) -> int:
    """The positions of a model as vLLM and SGLang count them: times the factor that its
    config.json has for longer contexts; 0: it does not say."""
    positions = num_positions(model_config)
    rope = model_config.get("rope_scaling") or model_config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("yarn", "linear", "dynamic"):
        return positions
    trained = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(trained * float(rope.get("factor") or 1.0)))


def read_eos_ids(model: Path, tokenizer: Any) -> frozenset[int]:
    """All tokens that end a turn: those of generation_config.json and the tokenizer's own."""
    path = model / "generation_config.json"
    found: Any = None
    if path.is_file():
        found = read_object(path, "generation configuration").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(token for token in [*ids, own] if isinstance(token, int))
