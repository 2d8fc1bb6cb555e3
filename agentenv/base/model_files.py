"""Hugging Face model directories: required files, tokenizer, vocabulary, end-of-turn tokens; and
models and datasets by hub id, from the cache or downloaded.

    model.path = "Qwen/Qwen3-0.6B"                    the newest revision in the cache, else the hub
    model.path = "Qwen/Qwen3-0.6B@c1899de289a0"       pinned to a revision
    data.train = "openai/gsm8k:main/train-*.parquet"  files of a dataset; all without a colon

A text OWNER/NAME is an id if neither this path nor a folder OWNER exists. A file NAME.gguf is a
model too: it is converted once, to a directory next to the cache of the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeVar

from agentenv.base.errors import ConfigError, DataError, ForeignError, MissingError, reported_as
from agentenv.base.untrusted import decode

GENERATION = "generation_config.json"
WEIGHTS_SUFFIXES = (  # weights in the formats of several frameworks, and files next to them
    ".safetensors", ".bin", ".pt", ".pth", ".index.json", ".partial", ".gguf", ".h5", ".msgpack",
    ".onnx", ".onnx_data", ".ckpt", ".tflite", ".npz",
)  # fmt: skip

T = TypeVar("T")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file. Raises DataError if the file is not a readable `what`."""
    return read_as(path, what, dict[str, Any])


def read_as(path: Path, what: str, kind: type[T]) -> T:
    """The content of a JSON file; see `read_object`."""
    try:
        return decode(path.read_bytes(), kind)
    except (OSError, ForeignError) as error:
        cause = getattr(error, "strerror", error)
        raise DataError(f"{path}: not a readable {what}: {cause}") from error


def read_model_config(model: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory; see `text_table`."""
    return text_table(read_object(model / "config.json", "model configuration"))


def text_table(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the text model: those in `text_config`, where a multimodal model has them, else
    those around it, which also name the model and its dtype."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    own = {key: config[key] for key in ("model_type", "dtype", "torch_dtype") if key in config}
    return {**config, **inner, **own}


def vocab_size(model: Path) -> int:
    """The size of the vocabulary, over which entropies are computed."""
    size = read_model_config(model).get("vocab_size")
    if not isinstance(size, int):
        raise DataError(f"{model / 'config.json'}: key vocab_size is missing")
    return size


def num_positions(model_config: dict[str, Any]) -> int:
    """The model's context length, tokens; 0 if its config.json does not state it."""
    return int(model_config.get("max_position_embeddings") or 0)


def num_experts(model_config: dict[str, Any]) -> int:
    """Experts of a layer; 0 for a dense model."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return max(int(model_config.get(name) or 0) for name in names)


def num_stretched_positions(model_config: dict[str, Any]) -> int:
    """The context length of a model in vLLM and SGLang: multiplied by the scaling factor in its
    config.json; 0 if it is not stated."""
    positions = num_positions(model_config)
    rope = model_config.get("rope_scaling") or model_config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type")) not in ("yarn", "linear", "dynamic"):
        return positions
    trained = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(trained * float(rope.get("factor") or 1.0)))


# End-of-turn tokens.


def read_eos_ids(model: Path, tokenizer: Any = None) -> frozenset[int]:
    """The tokens at which every engine stops, and which renderers remove from a turn:
    `eos_token_id` of generation_config.json and of config.json (a number or a list), and the
    tokenizer's eos_token. Raises DataError for other types."""
    return frozenset().union(*(ids for _, ids in _eos_sources(model, tokenizer)))


def _eos_sources(model: Path, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    """Pairs (source of end-of-turn tokens, their ids)."""
    generation = _eos_of(model / GENERATION)
    yield f"eos_token_id of {GENERATION}", generation
    own = _eos_of(model / "config.json")
    if generation:  # config.json may have a library's default, which can be any token
        own = [token for token in own if token in special_tokens(tokenizer)]
    yield "eos_token_id of config.json", own
    end = getattr(tokenizer, "eos_token_id", None)
    yield "eos_token of the tokenizer", [] if end is None else [end]


def _eos_of(path: Path) -> list[int]:
    """eos_token_id in a file, also of the text model inside a multimodal one."""
    found = read_object(path, "model configuration") if path.is_file() else {}
    ids: list[int] = []
    for table in (found, text_table(found)):
        value = table.get("eos_token_id")
        some = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in some):
            raise DataError(
                f"{path}: eos_token_id: expected a token id or a list of them, got {value!r}"
            )
        ids += some
    return list(dict.fromkeys(ids))


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The texts of the tokenizer's special tokens by id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: str(one.content) for token, one in added.items() if one.special}


def template_end(
    tokenizer: Any, eos_ids: Collection[int], chat_template_kwargs: Mapping[str, Any]
) -> int | None:
    """The token with which the chat template ends an answer: among the special tokens that it
    writes there in sequence, the first one in `eos_ids`, else the first. None if it writes none, or
    fails."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    ends = {str(tokenizer.decode([token])): token for token in sorted(eos_ids)}
    known = {text: token for token, text in special_tokens(tokenizer).items()} | ends
    known.pop("", None)
    chat = [{"role": role, "content": f"q{role}q"} for role in ("user", "assistant", "user")]
    for turns in (2, 3):
        try:
            text = tokenizer.apply_chat_template(
                chat[:turns], tokenize=False, **dict(chat_template_kwargs)
            )
        except Exception:  # any error of template code; rendering the prompts reports it
            return None
        _, answer, rest = str(text).rpartition("qassistantq")
        run = list(_leading(rest.lstrip(), known)) if answer else []
        found = [token for token in run if token in eos_ids]
        if found:
            return found[0]
        if run and turns == 2:  # tokens before the next turn may belong to that turn
            return run[0]
    return None


def _leading(text: str, known: Mapping[str, int]) -> Iterator[int]:
    """The known tokens at the beginning of a text."""
    while found := [one for one in known if text.startswith(one)]:
        longest = max(found, key=len)
        yield known[longest]
        text = text.removeprefix(longest)


def check_turn_end(
    model: Path, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None
) -> None:
    """Raises DataError if the model's files name no end-of-turn token, or if its chat template
    (None: not applied) ends an answer with a token at which no engine stops."""
    sources = [*_eos_sources(model, tokenizer)]
    eos_ids = read_eos_ids(model, tokenizer)
    path = model / GENERATION
    if not eos_ids:
        raise DataError(
            f"{model}: no end-of-turn token: neither {GENERATION} nor config.json has "
            f"eos_token_id, and the tokenizer has no eos_token; set eos_token_id in {path}"
        )
    if chat_template_kwargs is None:
        return
    end = template_end(tokenizer, eos_ids, chat_template_kwargs)
    if end is None or end in eos_ids:
        return
    listed = ", ".join(f"{where} is {ids}" for where, ids in sources if ids)
    raise DataError(
        f"{model}: the chat template ends an answer with {tokenizer.decode([end])!r} (token {end}),"
        f" at which generation does not stop: {listed}; set eos_token_id in {path} to "
        f"{sorted({end, *eos_ids})}, in a copy of the model if necessary, or use a template that "
        "ends answers with one of these tokens"
    )


def check_model_directory(model: Path, with_weights: bool = True) -> None:
    """Raises DataError, naming the missing file."""
    check_format(model)
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise DataError(
                f"{model} is not a model directory: {name} is missing; expected a Hugging Face "
                "directory with config.json, safetensors and tokenizer files, or an id of the hub"
            )
    for path in model.iterdir():
        if not path.exists() and not path.name.endswith(WEIGHTS_SUFFIXES):
            raise DataError(
                f"{path}: this link is broken, and checkpoints need the file; download or copy the "
                "model again, or remove the link"
            )
    if with_weights and not any(model.glob("*.safetensors")):
        raise DataError(f"{model} is not a model directory: it has no *.safetensors file")


OTHER_FORMATS = {
    "adapter_config.json": "an adapter: merge it into its model (merge_and_unload() of peft)",
    "*.gguf": "a GGUF model: choose one of its files instead of the folder",
}


def check_format(model: Path) -> None:
    """Raises DataError for a folder with a model in another format."""
    for pattern, what in OTHER_FORMATS.items():
        if not (model / "config.json").is_file() and any(model.glob(pattern)):
            raise DataError(f"{model} has {pattern} and no config.json, so that it is {what}")


IMPLEMENTATION = re.compile(r"\w+_implementation(_internal)?")
IMPLEMENTATIONS = (None, "eager", "sdpa", "grouped_mm", "batched_mm")


def check_known(model: Path) -> None:
    """Raises ConfigError for a model_type that transformers does not know, for quantized weights,
    and for a kernel that it would load from the hub. Loads no torch."""
    from transformers import __version__
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    table = read_object(model / "config.json", "model configuration")
    parts = [table, *(one for one in table.values() if isinstance(one, dict))]
    for key, value in chain.from_iterable(part.items() for part in parts):
        if IMPLEMENTATION.fullmatch(key) and value not in IMPLEMENTATIONS:
            shown = f"{model}: config.json has {key} = {value!r}"
            raise ConfigError(f"{shown}; remove it: code of other kernels is never run")
    kind, inner = table.get("model_type"), text_table(table)
    if isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES:
        if found := inner.get("quantization_config") or inner.get("compression_config"):
            method = found.get("quant_method") if isinstance(found, dict) else found
            raise ConfigError(
                f"{model}: config.json has quantized weights (quant_method {method!r}), which are "
                "not trained: choose the unquantized model, with learner.lora if memory is short, "
                "or write one (dequantize() and save_pretrained() of transformers)"
            )
        return
    code = " and code of its own (auto_map), which is never run" if "auto_map" in table else ""
    raise ConfigError(
        f"{model}: config.json has model_type {kind!r}{code}; transformers {__version__}, which is "
        "installed, does not know it: choose a model of a known type (docs/learner.md lists the "
        "supported families), or install a version of transformers that has it"
    )


def check_vocabulary(model: Path, tokenizer: Any) -> None:
    """Raises DataError for tokens beyond the embedding, except special ones that neither begin or
    end a text nor are in the chat template, such as those of images: no text of a run has them."""
    size, template = vocab_size(model), str(getattr(tokenizer, "chat_template", None))
    needed = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")}
    unused = {
        token
        for token, text in special_tokens(tokenizer).items()
        if token not in needed and text not in template
    }
    beyond = {token: text for text, token in tokenizer.get_vocab().items() if token >= size}
    if found := sorted(beyond.keys() - unused):
        raise DataError(
            f"{model}: the embedding has {size} rows (vocab_size in config.json), but the tokenizer"
            f" has {len(found)} tokens beyond it, such as {beyond[found[0]]!r} (token {found[0]}); "
            "remove them from the tokenizer, or save the model after "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def load_config(model: Path) -> Any:
    """The configuration of transformers in a model directory. Raises ConfigError."""
    check_known(model)
    return load_pretrained("AutoConfig", model)


def load_pretrained(kind: str, model: Path | str, **keys: Any) -> Any:
    """What a class of transformers, named `kind`, loads from a directory: the only call of its
    `from_pretrained`, which neither runs code of the directory nor asks on standard input. Raises
    ConfigError for files that it cannot load."""
    # An `import` that waits for that of another thread returns the module that this replaces.
    transformers = importlib.import_module("transformers")
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    keys = {"local_files_only": True, **keys, "trust_remote_code": False}
    try:
        return getattr(transformers, kind).from_pretrained(model, **keys)
    except (RuntimeError, MemoryError):  # of the machine, as a lack of memory
        raise
    except ImportError as error:
        raise MissingError(
            f"{model}: {kind} of transformers needs a package: {' '.join(str(error).split())}"
        ) from error
    except Exception as error:  # damaged files raise arbitrary errors
        cause = brief_reason(error)
        if "trust_remote_code" in str(error):
            cause = "it requires code of its own (auto_map), which is never run"
        raise ConfigError(
            f"{model}: transformers {transformers.__version__} cannot load it as {kind}: {cause}; "
            "check the files of this directory, or choose a model that this version can load"
        ) from error


def load_tokenizer(model: Path, with_weights: bool = True) -> Any:
    """The tokenizer of a Hugging Face directory, which must also have weights if `with_weights`.
    Raises DataError, naming the missing file."""
    check_model_directory(model, with_weights)
    problem = f"{model}: its tokenizer cannot be loaded"
    with reported_as(DataError, problem, ConfigError, RuntimeError):
        return load_pretrained(tokenizer_class(model) or "AutoTokenizer", model)


PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that only need tokenizer.json
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
# The result of AutoTokenizer, by model_type and the tokenizer_class of tokenizer_config.json.
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
    """The class of its tokenizer in transformers; None if only AutoTokenizer can determine it.

    AutoTokenizer loads torch, 200 MB in each process that tokenizes.
    """
    path = model / "tokenizer_config.json"
    found = read_object(path, "tokenizer configuration") if path.is_file() else {}
    if "auto_map" in found:
        return None
    kind = read_model_config(model).get("model_type")
    return KNOWN_CLASSES.get((str(kind), str(found.get("tokenizer_class"))))


HubKind = Literal["model", "dataset"]

ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<files>.+))?")
FOLDERS = ("models", "data", "runs", "configs", "evals")  # beginnings of this project's paths
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
DATA_FILES = ["*.jsonl", "*.json", "*.csv", "*.parquet", "*.arrow"]

_places: dict[str, Path] = {}


class HubId(NamedTuple):
    """An id, its pinned revision ("": none), and the files of a dataset."""

    name: str
    revision: str = ""
    files: str = ""


def hub_id(text: str) -> HubId | None:
    """The id in a text of the configuration; None if the text is a path."""
    found = ID.fullmatch(text)
    if found is None or Path(text).exists():
        return None
    owner = found["name"].partition("/")[0]
    if owner in FOLDERS or Path(owner).exists():
        return None
    return HubId(found["name"], found["revision"] or "", found["files"] or "")


def place_on_hub(text: str) -> Path | None:
    """The location of an id that was found before; None otherwise."""
    return _places.get(text)


def find_on_hub(text: str, kind: HubKind) -> Path | None:
    """The complete model or dataset of an id in the cache; None if the text is not an id, or the
    cache does not have it."""
    if kind == "model" and text.endswith(".gguf") and Path(text).is_file():
        place: Path | None = read_gguf(Path(text))
    else:
        found = hub_id(text)
        place = None if found is None else _cached(found, kind)
    if place is not None:
        _places[text] = place
    return place


def fetch_from_hub(text: str, kind: HubKind, report: Callable[[str], None]) -> Path | None:
    """As `find_on_hub`, but downloads it if necessary; None if the text is not an id. Raises
    DataError with the download command for a machine that can reach the hub."""
    place, found = find_on_hub(text, kind), hub_id(text)
    if found is None:
        return place
    if place is not None:
        report(f"{text}: found in the hub's cache, revision {_commit(place)[:12]}")
        return place
    report(f"{text}: not in the cache; downloading the {kind} from the hub")
    try:
        folder = _snapshot(found, kind)
    except (ImportError, OSError, ValueError, RuntimeError) as error:  # errors of requests
        pinned = f" at revision {found.revision}" if found.revision else ""
        raise DataError(
            f"{found.name}{pinned} is neither a path here nor a {kind} in the hub's cache "
            f"(HF_HOME), and the download failed ({brief_reason(error)}); {_command(found, kind)}"
        ) from error
    place = find_on_hub(text, kind)
    if place is None:
        raise DataError(f"{text}: {folder} lacks files of the {kind}; {_command(found, kind)}")
    report(f"{text}: downloaded, revision {_commit(place)[:12]}")
    return place


def _snapshot(found: HubId, kind: HubKind, *, is_cached: bool = False) -> Path:
    """The folder of an id's snapshot; without downloads if `is_cached`."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        found.name,
        repo_type=kind,
        revision=found.revision or None,
        allow_patterns=_files(found, kind),
        local_files_only=is_cached,
    )
    return Path(folder)


def _cached(found: HubId, kind: HubKind) -> Path | None:
    """The folder in the cache, if it is complete."""
    try:
        place = _snapshot(found, kind, is_cached=True)
    except (ImportError, OSError, ValueError, RuntimeError):  # missing or incomplete
        return None
    if kind == "dataset":
        is_there = any(place.glob(found.files or "*"))
        return place / found.files if is_there else None
    try:
        check_model_directory(place)
        index = place / "model.safetensors.index.json"
        parts = read_object(index, "index").get("weight_map") if index.is_file() else {}
    except DataError:
        return None
    names = {str(file) for file in (parts or {}).values()}
    return place if all((place / name).is_file() for name in names) else None


def _files(found: HubId, kind: HubKind) -> list[str]:
    return MODEL_FILES if kind == "model" else [found.files] if found.files else DATA_FILES


def read_gguf(file: Path) -> Path:
    """The model of a GGUF file as a Hugging Face directory, bfloat16, which is kept next to the
    hub's cache. Raises DataError if the file cannot be read."""
    try:
        importlib.import_module("gguf")  # transformers needs it
        import torch
        from huggingface_hub import constants
    except ImportError as error:
        raise DataError(
            f"{file}: reading GGUF needs {error.name}; pip install 'agentenv-rl[train]' gguf"
        ) from error
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    folder = Path(constants.HF_HOME) / "gguf" / f"{file.stem}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # damaged files raise arbitrary errors
    with reported_as(DataError, f"{file}: transformers cannot read this GGUF file", Exception):
        named = {"gguf_file": file.name}
        read = load_pretrained("AutoModelForCausalLM", file.parent, dtype=torch.float32, **named)
        tokenizer = load_pretrained("AutoTokenizer", file.parent, **named)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config  # the weights are dequantized now
    model = type(read)(read.config)
    model.load_state_dict(read.state_dict())
    with TemporaryDirectory(dir=folder.parent) as made:
        model.to(torch.bfloat16).save_pretrained(made)
        tokenizer.save_pretrained(made)
        with contextlib.suppress(OSError):  # another process was faster
            Path(made).rename(folder)
        Path(made).mkdir(exist_ok=True)  # the context manager removes it
    return folder


def _command(found: HubId, kind: HubKind) -> str:
    options = "" if kind == "model" else " --repo-type dataset"
    options += f" --revision {found.revision}" if found.revision else ""
    return (
        f"on a machine that reaches the hub, `hf download {found.name}{options}` downloads it to "
        "the cache; add `--local-dir DIR` for a folder, and name that folder here"
    )


def brief_reason(error: BaseException) -> str:
    """The first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _commit(place: Path) -> str:
    parts = place.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts else place.name
