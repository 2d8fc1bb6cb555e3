"""A model directory: its tokenizer is the one that AutoTokenizer finds, without loading torch."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.model_files import (
    KNOWN_CLASSES,
    check_known,
    load_tokenizer,
    num_experts,
    num_positions,
    read_eos_ids,
    read_model_config,
    tokenizer_class,
    vocab_size,
)
from tests.support.snippets import run_python
from tests.support.sources import sources

SIZES = {
    "num_attention_heads", "num_key_value_heads", "hidden_size", "num_hidden_layers", "head_dim",
    "intermediate_size", "max_position_embeddings", "rope_theta", "rope_scaling", "layer_types",
    "rope_parameters", "num_experts", "n_routed_experts", "num_local_experts",
    "num_experts_per_tok", "use_sliding_window",
}  # fmt: skip
NOT_READ = {"model_check.py", "cold_start.py"}  # which set them in a small model
TEXTS = ("Wer, wenn ich schriee?", " <|im_end|>x  12345\n\n", "naïve café 漢字")


def model_directory(folder: Path, model_type: str, **settings: Any) -> Path:
    """A directory without weights, whose tokenizer has single bytes and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({char: number for number, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    told = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def test_a_multimodal_model_has_the_keys_of_its_text_model(tmp_path: Path) -> None:
    """Its type and its dtype are those of the whole."""
    inner = {"vocab_size": 9, "model_type": "llama", "num_experts": 4, "eos_token_id": 3}
    inner["max_position_embeddings"] = 64
    whole = {"model_type": "both", "dtype": "bfloat16", "vocab_size": 7, "eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": inner}))
    table = read_model_config(tmp_path)
    assert (vocab_size(tmp_path), num_positions(table), num_experts(table)) == (9, 64, 4)
    assert (table["model_type"], table["dtype"]) == ("both", "bfloat16")
    assert read_eos_ids(tmp_path) == {2, 3}


@pytest.mark.parametrize(("model_type", "name"), KNOWN_CLASSES)
def test_a_known_tokenizer_class_is_that_of_auto_tokenizer(
    tmp_path: Path, model_type: str, name: str
) -> None:
    model = model_directory(tmp_path / "model", model_type, tokenizer_class=name)
    ours = load_tokenizer(model, with_weights=False)
    theirs = AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma3_text", {"tokenizer_class": "GemmaTokenizer"}),
        ("qwen3", {"tokenizer_class": "LlamaTokenizerFast"}),
        (
            "qwen3",
            {"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": [None, "x"]}},
        ),
        ("qwen3", {}),
    ],
)
def test_unknown_tokenizers_are_loaded_by_auto_tokenizer(
    tmp_path: Path, model_type: str, settings: dict[str, Any]
) -> None:
    assert tokenizer_class(model_directory(tmp_path / "model", model_type, **settings)) is None


def test_a_known_tokenizer_class_is_loaded_without_torch(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "qwen3", tokenizer_class="Qwen2Tokenizer")
    code = (
        "import sys; from pathlib import Path; "
        "from agentenv.base.model_files import load_tokenizer; "
        f"print(len(load_tokenizer(Path({str(model)!r}), False)), 'torch' in sys.modules)"
    )
    assert run_python(code).stdout.split() == ["258", "False"]


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "qwen3", tokenizer_class="Qwen2Tokenizer")
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config.json"):
        load_tokenizer(model, with_weights=False)
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer.json is missing"):
        load_tokenizer(model, with_weights=False)


def test_every_reader_of_sizes_reads_those_of_the_text_model() -> None:
    """In published models they may be nested in config.json."""
    found = set()
    for path in sources():
        text = path.read_text()
        names = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
        if names & SIZES and path.name not in NOT_READ:
            found.add(path.name)
            assert any(
                one in text for one in ("text_table(", "read_model_config(", "text_config(")
            ), path
    assert len(found) > 5


@pytest.mark.parametrize("value", ["someone/kernel", "flash_attention_2", {"": "a/b"}])
@pytest.mark.parametrize("below", ["", "text_config"])
def test_a_kernel_of_the_hub_is_refused_by_its_key(tmp_path: Path, value: Any, below: str) -> None:
    for key in ("attn_implementation", "_attn_implementation_internal", "_experts_implementation"):
        inner = {key: value, "_attn_implementation": "sdpa"}
        model = model_directory(tmp_path / key, "qwen3")
        table = {"model_type": "qwen3", **({below: inner} if below else inner)}
        (model / "config.json").write_text(json.dumps(table))
        with pytest.raises(ConfigError, match=f"has {key} = .*never run"):
            check_known(model)


AT_ONCE = """
import sys, threading
from agentenv.base.model_files import load_pretrained

threading.Thread(target=__import__, args=["transformers.models.auto.auto_mappings"]).start()
while "transformers" not in sys.modules:
    pass
print(load_pretrained("AutoConfig", sys.argv[1]).model_type)
"""


def test_a_model_is_loaded_while_another_thread_imports_transformers(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "model", "qwen3")
    assert run_python(AT_ONCE, folder).stdout.split() == ["qwen3"]
