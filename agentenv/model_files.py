"""A Hugging Face model directory: what must be in it, its tokenizer, vocabulary, ends of a turn."""

from __future__ import annotations

import re
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


HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")  # of a model there; paths of that form may be meant so


def check_model_directory(model: Path, with_weights: bool = True) -> None:
    """Raises DataError, which says what is missing in it."""
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            is_name = not model.exists() and HUB_NAME.fullmatch(str(model))
            hint = f", e.g. by `hf download {model} --local-dir DIR`" if is_name else ""
            raise DataError(
                f"{model} is not a model directory: {name} is missing; expected a Hugging Face "
                f"directory with config.json, safetensors and tokenizer files{hint}"
            )
    if with_weights and not any(model.glob("*.safetensors")):
        raise DataError(f"{model} is not a model directory: it holds no *.safetensors file")


def load_tokenizer(model: Path, with_weights: bool = True) -> Any:
    """The tokenizer of a Hugging Face directory, which has the weights too unless somebody else
    serves them; DataError says what is missing in it."""
    check_model_directory(model, with_weights)
    import transformers

    kind = getattr(transformers, tokenizer_class(model) or "AutoTokenizer")
    try:
        return kind.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{model}: its tokenizer cannot be loaded: {error}") from error


PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # the class of tokenizer.json alone
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# What AutoTokenizer finds, by model_type and the tokenizer_class of tokenizer_config.json.
KNOWN_CLASSES = {
    **{("llama", name): "TokenizersBackend" for name in PLAIN},
    **{("qwen2", name): "Qwen2Tokenizer" for name in (*QWEN, *PLAIN)},
    **{
        (kind, name): "Qwen2Tokenizer" if name in QWEN else "TokenizersBackend"
        for kind in ("qwen2_moe", "qwen3", "qwen3_moe")
        for name in (*QWEN, *PLAIN)
    },
}


def tokenizer_class(model: Path) -> str | None:
    """The class of its tokenizer, of transformers; None where only AutoTokenizer knows.

    To ask that loads torch, 200 MB of each process that tokenizes.
    """
    path = model / "tokenizer_config.json"
    found = read_object(path, "tokenizer configuration") if path.is_file() else {}
    if "auto_map" in found:
        return None
    kind = read_model_config(model).get("model_type")
    return KNOWN_CLASSES.get((str(kind), str(found.get("tokenizer_class"))))
