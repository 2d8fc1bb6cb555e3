"""The judge as [roles.judge] starts it: a real vLLM server behind the OpenAI routes. Its model is
untrained, so its free replies are nonsense."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.evaluation import EvaluateConfig
from agentenv.assembly.serving.servers import ServerFactory, check_roles, fill_roles, start_servers
from agentenv.base.config import build_config
from agentenv.base.errors import GraderError
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grade, Grader, close_shared
from agentenv.envs.grading import judge
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.grading.reward import check_grader, make_grader
from agentenv.envs.quickstart.setup import build_model
from tests.engines.server_process import FORKING
from tests.engines.vllm_server import forking_python, require_vllm

pytestmark = pytest.mark.engine_vllm

TASK = Task("t", "e", "Which city is the capital of France?", ("Paris",))
CHOICE = {"structured_outputs": {"choice": ["CORRECT", "INCORRECT"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model, with room for the judge's prompt in bytes."""
    path = tmp_path_factory.mktemp("judge") / "model"
    build_model(path, seed=0)
    keys = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(keys | {"max_position_embeddings": 4096}))
    return path


async def grade(grader: Grader, answer: str) -> Grade:
    return await grader.grade(TASK, [Message("assistant", rf"\boxed{{{answer}}}")], {})


def grader_of(config: EvaluateConfig, **judge: Any) -> Grader:
    assert config.grader is not None
    assert config.grader.judge is not None
    keys = {"url": config.grader.judge.url, "model": "judge", "num_retries": 0, **judge}
    table = {"kind": "judge", "math": False, "judge": keys}
    return make_grader(build_config(GraderConfig, table, "grader"))


@pytest.mark.usefixtures("services")
async def test_a_judge_started_by_the_run_grades_and_caches_its_verdicts(
    model: Path, tmp_path: Path
) -> None:
    require_vllm()
    role: dict[str, Any] = {"model": str(model), "python": str(forking_python()), "device": "cpu"}
    role |= {"dtype": "float32", "env": {"PYTHONPATH": FORKING}}
    grader = {"kind": "judge", "judge": {"url": "{role:judge}/v1", "model": "judge"}}
    raw = {"roles": {"judge": role}, "grader": grader}
    cache = str(tmp_path / "verdicts.db")
    log: list[str] = []
    async with AsyncExitStack() as stack:
        factory = ServerFactory(tmp_path, stack, log.append)
        config = build_config(EvaluateConfig, raw, "test")
        check_roles(config)
        config = fill_roles(config, await start_servers(config.roles, Path, factory))

        plain = grader_of(config, cache=cache)
        await check_grader(plain, [TASK])
        assert (await grade(plain, "paris")).parts == {"accuracy": 1.0, "rule": 1.0}
        answers = [f"the city of number {number}" for number in range(24)]
        grades = await asyncio.gather(*(grade(plain, answer) for answer in answers))
        for one in grades:  # nonsense is no verdict, and no right answer
            assert one.parts == {"accuracy": 0.0, "rule": 0.0, "judge_unparsed": 1.0}

        bound = grader_of(config, when="always", extra_body=CHOICE)
        for answer in ("Paris", "Lyon"):  # held to the two words, it gives verdicts
            one = await grade(bound, answer)
            assert one.parts["judge_unparsed"] == 0.0
            assert one.success == bool(one.parts["rule"] or one.parts["judge"])

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(judge, "MAX_ANSWER_CHARS", 9000)
            with pytest.raises(GraderError, match="answered 400"):
                await grade(grader_of(config), "x " * 4500)
        with pytest.raises(GraderError, match=r"answered 404: .*no-such-model"):
            await grade(grader_of(config, model="no-such-model"), "Lyon")
        await close_shared()

    again = grader_of(config, cache=cache)  # the server is gone, the verdicts are not
    assert (await grade(again, answers[0])).parts["judge_unparsed"] == 1.0
    with pytest.raises(GraderError, match="failed"):
        await grade(again, "another city")
