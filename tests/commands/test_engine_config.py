"""[engine], [roles], [sampling]: one key changes the engine, mistakes are refused at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.servers import check_roles, fill_roles
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.contract.server_config import RoleConfig
from agentenv.engines.sglang import SGLangConfig
from agentenv.engines.vllm import VLLMConfig
from tests.support.warehouse import ROOT


def test_the_engine_is_changed_by_one_key() -> None:
    for name, kind in (("vllm", VLLMConfig), ("sglang", SGLangConfig)):
        config = load_config(TrainConfig, ROOT / "configs/quickstart.toml", [f"engine.name={name}"])
        assert isinstance(config.engine, kind)
        assert config.engine.servers is None  # one server, as by default


def test_sglang_never_fills_its_whole_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert VLLMConfig().max_context(tmp_path) == 1024
    assert SGLangConfig().max_context(tmp_path) == 1022
    assert SGLangConfig(max_model_len=512).max_context(tmp_path) == 512
    assert SGLangConfig(max_model_len=1024).max_context(tmp_path) == 1022


class Reader(msgspec.Struct):
    roles: dict[str, RoleConfig]
    env: dict[str, Any]
    grader: dict[str, Any] | None = None


def test_roles_are_read_by_name() -> None:
    role = RoleConfig(url="http://judge:1/")
    config = Reader({"judge": role}, {"url": "{role:judge}/v1", "list": ["{role:judge}", 3]})
    check_roles(config)
    filled = fill_roles(config, {"judge": "http://judge:1"})
    assert filled.env == {"url": "http://judge:1/v1", "list": ["http://judge:1", 3]}
    with pytest.raises(ConfigError, match=r"\{role:refiner\}"):
        check_roles(Reader({"judge": role}, {"a": "{role:refiner} {role:judge}"}))
    with pytest.raises(ConfigError, match=r"roles\.judge is unused"):
        check_roles(Reader({"judge": role}, {}))
    with pytest.raises(ConfigError, match=r"roles\.policy: \[engine\]"):
        check_roles(Reader({"policy": role}, {}))
    with pytest.raises(ConfigError, match=r"roles\.jugde: unknown role"):
        check_roles(Reader({"jugde": role}, {}))
    with pytest.raises(ConfigError, match=r"roles\.judge: set"):
        check_roles(Reader({"judge": RoleConfig()}, {}))


def test_an_evaluation_may_sample_from_another_distribution(warehouse: Path) -> None:
    keys = ("top_p=0.9", "top_k=5", "min_p=0.1", "repetition_penalty=1.1", "temperature=0.5")
    load_config(TrainConfig, warehouse, [f"sampling.eval.{key}" for key in keys])
