"""By command: gated and encrypted sets from the user's files, real envs, a judge behind HTTP, and
the scores by GAIA level and by HLE type and category. Only policy and judge are scripted."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentenv.envs.quickstart.setup import build_model
from tests.support.exams import GAIA, HLE, judged, write_exams
from tests.support.json_files import change_json, rows_in
from tests.support.judge_server import JudgeServer, judge_server
from tests.support.tea_house import HOUSES, write_world
from tests.support.warehouse import ROOT


def write_setup(folder: Path, judge: JudgeServer) -> Path:
    """Model directory, the three sets, and the configuration, whose path is returned."""
    build_model(folder / "model", seed=0)
    change_json(folder / "model" / "config.json", max_position_embeddings=8192)
    corpus, xbench = write_world(folder)
    gaia, hle = write_exams(folder)
    config = folder / "config.toml"
    config.write_text(
        f"""
[engine]
name = "scripted"
script = "tests.support.exams:turn"
max_model_len = 8192
[search]
backend = {{ name = "bm25", corpus = "{corpus}" }}
max_results = 1
[grader]
kind = "judge"
judge = {{ url = "{judge.url}", model = "m", when = "always", cache = "{folder}/verdicts.db" }}
[sets]
gaia = {{ benchmark = "gaia", path = "{gaia}" }}
hle = {{ benchmark = "hle", path = "{hle}" }}
xbench = {{ benchmark = "xbench", path = "{xbench}" }}
""",
        encoding="utf-8",
    )
    return config


async def evaluate(config: Path, out: Path) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Rows, summary, and the output on the terminal."""
    command = [sys.executable, "-m", "agentenv.launchers", "evaluate"]
    command += [str(config.parent / "model"), "--config", str(config), "--out", str(out)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, **pipes)
    shown, _ = await process.communicate()
    assert process.returncode == 0, shown.decode()
    rows = rows_in(out / "rows.jsonl")
    return rows, json.loads((out / "summary.json").read_text()), shown.decode()


async def test_sets_of_user_files_are_evaluated_judged_and_scored_by_group(tmp_path: Path) -> None:
    async with judge_server() as judge:
        judge.replies = [judged]
        config = write_setup(tmp_path, judge)
        rows, summary, shown = await evaluate(config, tmp_path / "out")

        assert len(rows) == len(GAIA) + len(HLE) + 2 * len(HOUSES)
        flat = " ".join(shown.split())
        for name, column in (("gaia", "file_name"), ("hle", "image")):
            assert f"{name}: 1 questions with an attachment (column '{column}'" in flat

        success = {row["task"]: row.get("success", False) for row in rows}
        assert {name: success[name] for name in ("g0", "g1", "g2", "g3", "g4")} == {
            "g0": True,  # both report it
            "g1": True,  # the judge alone
            "g2": True,  # the rules alone
            "g3": False,
            "g4": False,  # the judge refuses
        }
        assert all(success[row["task"]] for row in rows if row["dataset"] == "xbench")

        groups = summary["groups"]
        assert shares(groups["dataset"]) == {"gaia": 3 / 5, "hle": 2 / 4, "xbench": 1.0}
        assert shares(groups["gaia level"]) == {"1": 1.0, "2": 1 / 2, "3": 0.0}
        assert shares(groups["hle answer_type"]) == {"exactMatch": 1 / 2, "multipleChoice": 1 / 2}
        assert shares(groups["hle category"]) == {"Biology": 0.0, "Math": 2 / 3}

        agreement = groups["dataset"]["gaia"]["agreement"]
        cells = [agreement[k] for k in ("both_right", "only_judge", "only_rules", "both_wrong")]
        assert cells == [1, 1, 1, 1], "the refusal is no verdict"

        asked = [request["messages"][-1]["content"] for request in judge.requests]
        assert len(set(asked)) == len(asked), "each of them once"
        for row in rows:
            question, answer = (
                json.dumps(row[name], ensure_ascii=False) for name in ("question", "prediction")
            )
            assert any(question in text and answer in text for text in asked)


def shares(figures: dict[str, Any]) -> dict[str, float]:
    return {name: one["estimates"]["success"]["value"] for name, one in figures.items()}
