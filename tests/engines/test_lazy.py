"""An engine imports no module of another engine, and HTTP only if it has servers."""

from __future__ import annotations

import pytest

from tests.support.snippets import run_python

HTTP = ("aiohttp", "agentenv.contract.http_client")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("agentenv.contract.engine", (*HTTP, "agentenv.engines")),
        ("agentenv.engines.scripted", (*HTTP, "agentenv.engines.pool")),
        pytest.param("agentenv.engines.embedded.engine", HTTP),
        (
            "agentenv.engines.pool.pooled_engine",
            ("agentenv.engines.vllm", "agentenv.engines.sglang"),
        ),
        ("agentenv.engines.vllm", ("vllm", "agentenv.engines.sglang")),
        ("agentenv.engines.sglang", ("sglang", "agentenv.engines.vllm")),
        ("agentenv.assembly.serving.servers", ("agentenv.engines.sglang",)),
    ],
)
def test_an_engine_imports_no_module_of_another(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    assert run_python(code).stdout.strip() == "[]"
