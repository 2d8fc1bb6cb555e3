"""Which families of models are computed over packed trees as transformers computes them."""

from __future__ import annotations

import json
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, Qwen3ForCausalLM

from agentenv.base.errors import ConfigError, MissingError
from agentenv.learners.ranks import model_check as check

MLA_AND_EXPERTS = ("deepseek_v2", "deepseek_v3")
LONG = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131_072}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * n for n in range(48)],
    "long_factor": [2.0 + n for n in range(48)],
}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 4, "num_hidden_layers": 12}
AS_THEY_ARE = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo2", "olmoe", "glm4", "glm4_moe",
    "smollm3", "ernie4_5", "gemma", "phi", "ministral3", "internlm3", *MLA_AND_EXPERTS,
    "gemma3_text", "cohere2", "olmo3", "exaone4",  # windows
    "minicpm3", "glm4_moe_lite", "longcat_flash", "youtu", "axk1",  # scaled logits
    "gemma3n_text", "phimoe", "minimax_m2",  # layers that share keys, or have another width
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "nemotron_h",  # recurrent ones
)  # fmt: skip
RIGHT: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in AS_THEY_ARE]
RIGHT += [
    ("hunyuan_v1_dense", {"head_dim": 128}),
    # windows, with and without a list of the layers that have them
    ("mistral", {"sliding_window": 4096}),
    ("mixtral", {"sliding_window": 4096}),
    ("phi3", {"sliding_window": 2047}),
    ("starcoder2", {"sliding_window": 4096}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}),
    # scaled logits
    ("granite", {"logits_scaling": 8.0}),
    ("granitemoe", {"logits_scaling": 6.0}),
    ("cohere", {"logit_scale": 0.0625}),
    ("gemma4_text", {"num_kv_shared_layers": 18}),
    # convolutions and recurrent layers
    ("lfm2", CONVOLUTIONS),
    ("lfm2_moe", {**CONVOLUTIONS, "num_dense_layers": 1}),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4}),
    ("bamba", {"attn_layer_indices": [1, 3], "num_hidden_layers": 4}),
    # positions that are scaled alike at every length
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
     "original_max_position_embeddings": 32768}}),
]  # fmt: skip
REFUSED = [
    ("minimax", {}, "layers of type linear_attention do not follow a tree"),
    ("jamba", {}, "layers of type linear_attention do not follow a tree"),
    ("lfm3", {}, "layers of type conv do not follow a tree"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 36}, "attention with s_aux"),
    ("gpt_oss", {}, "attention with s_aux"),
    ("gemma2", {}, "attention with softcap"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = dynamic"),
    ("phi3", {"rope_scaling": LONGROPE, **LONG}, "rope_type = longrope"),
    ("nemotron", {}, "its forward pass"),
    ("llama4_text", {}, "its forward pass"),
]


def name_of(value: Any) -> str:
    return str(value)[:40]


@pytest.mark.parametrize(("family", "changes"), RIGHT, ids=name_of)
def test_the_log_probs_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    model = check.random_model(check.small(CONFIG_MAPPING[family](**changes)))
    assert check.distance(model) < check.TOLERANCE / 50
    check.check_export(model)


@pytest.mark.parametrize(("family", "changes", "why"), REFUSED, ids=name_of)
def test_an_unsupported_model_is_refused_with_its_family_and_the_reason(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[family](**changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{family} .*{why}"):
        check.check_model(tmp_path)


@pytest.mark.parametrize(("family", "changes"), RIGHT, ids=name_of)
def test_sizes_that_differ_differ_in_the_small_model(family: str, changes: dict[str, Any]) -> None:
    real = CONFIG_MAPPING[family](**changes)
    made = check.small(real)
    for names in (*check.RATIOS, *(names for names, _, _ in check.ORDERED)):
        tables = ({**vars(one), **one.per_layer_config[-1].to_dict()} for one in (real, made))
        whole, narrow = tables
        sizes = [(whole.get(name), narrow.get(name)) for name in names]
        for (left, first), (right, second) in combinations(sizes, 2):
            if type(left) is type(right) is int:
                assert (left < right, left == right) == (first < second, first == second)
    shares = [getattr(one, "num_kv_shared_layers", 0) > 0 for one in (real, made)]
    assert shares[0] == shares[1]


@pytest.mark.parametrize("family", ["phi4_multimodal", "got_ocr2", "qwen2_5_vl", "gemma3"])
def test_towers_are_narrow(family: str) -> None:
    """Those of the source stay."""
    config = CONFIG_MAPPING[family]()
    before = config.to_dict()
    assert (
        sum(param.numel() for param in check.random_model(check.small(config)).parameters()) < 2e6
    )
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ImportError("X requires timm"), MissingError, "qwen3: X requires timm"),
        (MemoryError(), ConfigError, "qwen3 cannot be tried on this machine: MemoryError"),
        (RuntimeError("DefaultCPUAllocator: no"), ConfigError, "tried on this machine: Runtime"),
        (OSError(28, "No space left"), ConfigError, "this machine: OSError.* No space left"),
        (KeyError("x"), ConfigError, "qwen3 is not supported: no small model could be made"),
    ],
    ids=str,
)
def test_a_failure_keeps_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type, says: str
) -> None:
    def fails(self: Any, *_: Any) -> None:
        raise error

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", fails)
    CONFIG_MAPPING["qwen3"]().save_pretrained(tmp_path)
    with pytest.raises(kind, match=says):
        check.check_model(tmp_path)


def test_a_model_that_cannot_be_made_small_has_another_message(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["qwen3"](num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    table["hidden_act"] = "no such function"
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=r"made \(KeyError"):
        check.check_model(tmp_path)


def test_an_export_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    CONFIG_MAPPING["hrm_text"]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r" twice"):
        check.check_model(tmp_path)


def test_recurrent_layers_without_their_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tree_recurrence", None)
    CONFIG_MAPPING["lfm2"](**CONVOLUTIONS).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"tree-recurrence: .*\[hybrid\]"):
        check.check_model(tmp_path)


def test_a_small_model_keeps_one_layer_of_each_kind() -> None:
    kinds = ["full_attention", "sliding_attention"] * 12
    config = CONFIG_MAPPING["qwen2"](
        num_hidden_layers=24, layer_types=kinds, use_sliding_window=True, sliding_window=4096
    )
    made = check.small(config)
    assert made.layer_types == ["full_attention", "sliding_attention"]
    assert (made.num_hidden_layers, made.sliding_window) == (2, 5)
    assert (config.num_hidden_layers, config.sliding_window) == (24, 4096), "the original is kept"
    assert check.small(CONFIG_MAPPING["deepseek_v3"]()).first_k_dense_replace == 1
