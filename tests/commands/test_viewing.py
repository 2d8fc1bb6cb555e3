"""launchers/view.py without a browser: its replies, its access control, and the content of an
export."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from agentenv.base.errors import DataError
from agentenv.endpoint.listener import encode
from agentenv.evaluation.figures import figures_of, questions_of
from agentenv.evaluation.store import read_rows
from agentenv.lab.viewing.folder import Folder
from agentenv.lab.viewing.page import HEADERS, FolderServer, export
from agentenv.launchers import view
from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import columns_of, read_step
from agentenv.text.encoder import token_texts
from tests.support.golden import Golden
from tests.support.snippets import run_python
from tests.support.viewed_run import HOSTILE, ViewedRun, make_run, row_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> ViewedRun:
    return make_run(tmp_path / "run")


@pytest.fixture
def folder(run: ViewedRun) -> Folder:
    return Folder(run.folder)


@pytest.fixture
async def server(run: ViewedRun) -> AsyncIterator[FolderServer]:
    server = FolderServer(Folder(run.folder))
    await server.start()
    yield server
    await server.close()


async def get(server: FolderServer, path: str, **keys: Any) -> tuple[int, Any, str]:
    url = f"http://127.0.0.1:{server.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url, **keys) as reply:
        return reply.status, reply.headers, await reply.text()


def cookies(server: FolderServer) -> dict[str, str]:
    return {server.cookie: server.token}


# access control


async def test_the_page_requires_the_token(server: FolderServer) -> None:
    for path in ("/", "/?token=x", "/static/viewer.js", "/api/run", "/api/state"):
        status, _, text = await get(server, path)
        assert status == 401
        assert "token" in text
        assert server.token not in text
    status, headers, text = await get(server, f"/?token={server.token}")
    assert status == 200
    assert '<div id="app">' in text
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    status, _, text = await get(server, "/api/run", cookies=cookies(server))
    assert status == 200
    assert json.loads(text)["name"] == "run"
    # the token in an address opens the page alone
    assert (await get(server, f"/api/run?token={server.token}"))[0] == 401


async def test_every_response_has_a_strict_security_policy(server: FolderServer) -> None:
    paths = (f"/?token={server.token}", "/static/viewer.js", "/api/run", "/api/nothing", "/x")
    for path in paths:
        _, headers, _ = await get(server, path, cookies=cookies(server))
        assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


async def test_unknown_paths_and_writes_are_refused(server: FolderServer) -> None:
    for path in (
        "/static/../api.py",
        "/static/%2e%2e%2fapi.py",
        "/api/steps/%2e%2e/trees/1",
        "/api/steps/-1",
        "/api/evaluations/..%2f..",
        "/api/evaluations/before_sft/rows/x",
        "/api/run/more",
    ):
        status, _, _ = await get(server, path, cookies=cookies(server))
        assert status == 404, path
    url = f"http://127.0.0.1:{server.port}/api/run"
    async with (
        aiohttp.ClientSession(cookies=cookies(server)) as session,
        session.post(url, data=b"{}") as reply,
    ):
        assert reply.status == 405


# replies


def test_a_tree_has_the_tokens_of_the_archive(run: ViewedRun) -> None:
    """Text, figures and credit of each token of each trajectory."""
    step = read_step(steps_of(run.folder / "trees")[2])
    kept = step.tree(step.entries[0])
    found = json.loads(encode(Folder(run.folder).answer("steps/2/trees/3")))
    assert found["fate"] == "trained"
    assert found["learner_version"] == 2
    for leaf in kept.tree.leaves():
        columns = columns_of(kept, leaf)
        nodes = [found["nodes"][node.index] for node in kept.tree.path(leaf)]
        at = columns.mask
        assert [i for node in nodes for i in node["ids"]] == columns.token_ids[at].tolist()
        for name, own in (
            ("logprobs", "logprobs"),
            ("learner_logprobs", "learner"),
            ("proximal", "proximal"),
            ("entropies", "entropies"),
        ):
            values = [value for node in nodes for value in node[own]]
            np.testing.assert_allclose(values, getattr(columns, name)[at], atol=1e-4)
        for name in ("adv_pos", "adv_neg", "weight"):
            values = [node[name] for node in nodes for _ in node["ids"]]
            assert values == getattr(columns, name)[at].tolist()
        spans = [span for node in nodes for span in node["versions"]]
        versions = [version for version, start, end in spans for _ in range(start, end)]
        assert versions == columns.version[at].tolist()
    first = found["nodes"][1]
    assert "".join(first["texts"]) == f"look {HOSTILE}"
    assert first["calls"][0]["info"] == {"cached": True}
    assert first["num_forks"] == 1
    assert found["nodes"][0]["return"] is None  # nan


def test_characters_of_several_tokens_stay_whole(run: ViewedRun) -> None:
    texts = token_texts(run.tokenizer)
    text = "héllo ✓ 😀"
    found = texts(run.ids(text))
    assert len(found) == len(text.encode())
    assert "".join(found) == text
    assert texts(run.ids("é")[:1]) == ["\ufffd"]  # cut off
    assert texts([]) == []


def test_why_a_tree_was_not_trained(folder: Folder) -> None:
    index = folder.answer("steps")
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]
    assert [(row["fate"], row["why"]) for row in rows[:3]] == [
        ("trained", ""),
        ("filtered", "with equal returns"),
        ("failed", "OutageError"),
    ]
    assert rows[0]["rewards"] == [1.0, -1.0, 0.0]
    assert rows[0]["staleness"] == 1
    details = folder.answer("steps/1")["trees"]
    assert details[2]["failures"] == {"OutageError": 1}
    assert details[0]["gap"] == pytest.approx(0.01)
    assert details[1]["gap"] is None


def test_trees_are_found_by_their_text(folder: Folder) -> None:
    for text, found in (("SEVEN", [3, 4, 5]), ("number 4?", [4]), ("closed", [5]), ("none", [])):
        assert folder.answer("steps/2/search", {"q": text})["trees"] == found


def test_without_a_tokenizer_tokens_are_numbers(run: ViewedRun) -> None:
    (run.folder / "model" / "tokenizer.json").unlink()
    folder = Folder(run.folder)
    tree = folder.answer("steps/1/trees/0")
    assert not tree["has_texts"]
    assert not folder.run()["has_texts"]
    node = tree["nodes"][1]
    assert node["texts"] == [f"⟨{one}⟩" for one in node["ids"]]


def test_a_truncated_file_shows_its_complete_trees(run: ViewedRun) -> None:
    path = steps_of(run.folder / "trees")[3]
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    folder = Folder(run.folder)
    index = folder.answer("steps")
    assert index["cut_off"] == [3]
    rows = [row[1] for row in index["rows"] if row[0] == 3]
    assert rows == [6]
    assert not folder.answer("steps/3")["is_whole"]
    path.write_bytes(data)
    assert folder.answer("steps/3")["is_whole"]


def test_a_damaged_tree_is_named_and_the_others_are_shown(run: ViewedRun) -> None:
    path = steps_of(run.folder / "trees")[1]
    step = read_step(path)
    data = bytearray(path.read_bytes())
    data[step.entries[1].place + 40] ^= 255
    path.write_bytes(data)
    folder = Folder(run.folder)
    with pytest.raises(DataError, match="tree 1"):
        folder.answer("steps/1/trees/1")
    assert ["damaged" in one for one in folder.answer("steps/1")["trees"]] == [False, True, False]
    assert folder.answer("steps/1/trees/2")["fate"] == "failed"


def test_a_partial_last_row_is_awaited(run: ViewedRun, folder: Folder) -> None:
    before = folder.metrics()
    path = run.folder / "metrics.jsonl"
    whole = path.read_bytes()
    run.row({"step": 4, "reward/mean": 0.5}, torn=True)
    torn = path.read_bytes()
    after = folder.metrics(len(before["rows"]), str(before["epoch"]))
    assert after["rows"] == []
    assert after["num_unreadable"] == 0
    path.write_bytes(whole)
    run.row({"step": 4, "reward/mean": 0.5})
    assert path.read_bytes().startswith(torn)
    assert folder.metrics(len(before["rows"]), "0")["rows"] == [{"step": 4, "reward/mean": 0.5}]


def test_rows_removed_by_a_resume_are_dropped(run: ViewedRun, folder: Folder) -> None:
    before = folder.metrics()
    path = run.folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    after = folder.metrics(len(before["rows"]), str(before["epoch"]))
    assert after["from"] == 0
    assert len(after["rows"]) == 2
    assert after["epoch"] != before["epoch"]


def test_a_row_with_nan_is_read_and_an_invalid_one_is_counted(run: ViewedRun) -> None:
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "learner/loss": NaN}\nnonsense\n')
    found = json.loads(encode(Folder(run.folder).answer("metrics")))
    assert found["rows"][-1] == {"step": 9, "learner/loss": None}
    assert found["num_unreadable"] == 1


def test_the_state_changes_with_every_change_of_the_run(run: ViewedRun, folder: Folder) -> None:
    seen = [folder.state()]
    for change in (
        run.step,
        lambda: run.row({"step": 9}),
        lambda: run.evaluation("step-000004", [1.0]),
        lambda: (run.folder / "lock").write_text('{"pid": 1, "host": "other", "since": ""}'),
    ):
        change()
        seen.append(folder.state())
    assert all(seen.count(one) == 1 for one in seen)
    assert seen[0]["status"] == "finished"
    assert seen[-1]["status"] == "elsewhere"


# evaluations


def test_rows_and_figures_of_an_evaluation(run: ViewedRun, folder: Folder) -> None:
    assert list(folder.evaluations()) == ["before_sft", "after_rl"]
    index = folder.answer("evaluations/after_rl")
    assert len(index["rows"]) == 8
    (row, *_) = folder.answer("evaluations/after_rl/rows/0")
    assert row["segments"][1] == {"policy": HOSTILE}
    assert row["reason"].startswith("the judge said")
    figures = folder.answer("evaluations/after_rl/figures")
    ours = figures_of(questions_of(read_rows(run.folder / "eval" / "after_rl")), (1, 2))
    success = msgspec.to_builtins(ours.estimates["success"])
    assert figures["overall"]["estimates"]["success"] == success
    assert figures["overall"]["pass_at"][2]["value"] == 0.75
    assert folder.answer("evaluations/after_rl/search", {"q": "QUESTION 3"})["rows"] == [6, 7]


def test_figures_of_a_report_are_used_unless_rows_are_newer(run: ViewedRun, folder: Folder) -> None:
    path = run.folder / "eval" / "after_rl"
    (path / "summary.json").write_text('{"name": "as reported"}')
    assert folder.answer("evaluations/after_rl/figures") == {"name": "as reported"}
    (path / "summary.json").unlink()
    assert folder.answer("evaluations/after_rl/figures")["overall"]["num_questions"] == 4


def test_rows_follow_the_file(run: ViewedRun, folder: Folder) -> None:
    """New rows, partial ones, a repeated one, and all of them regraded."""
    path = run.folder / "eval" / "after_rl" / "rows.jsonl"
    assert len(folder.answer("evaluations/after_rl")["rows"]) == 8
    line = msgspec.json.encode(row_of(9, 0, True)) + b"\n"
    with path.open("ab") as file:
        file.write(line[:30])
    assert len(folder.answer("evaluations/after_rl")["rows"]) == 8
    with path.open("ab") as file:
        file.write(line[30:])
        file.write(msgspec.json.encode(row_of(0, 0, False)) + b"\n")
    rows = folder.answer("evaluations/after_rl")["rows"]
    assert len(rows) == 9
    assert (rows[0][6], rows[-1][1]) == (False, "q-00009")
    assert not folder.answer("evaluations/after_rl/rows/0")[0]["success"]
    new = path.with_name("new")
    new.write_bytes(line)
    new.replace(path)
    assert [row[1] for row in folder.answer("evaluations/after_rl")["rows"]] == ["q-00009"]
    assert folder.answer("evaluations/after_rl/rows/0")[0]["task"] == "q-00009"


def test_two_evaluations_are_compared_by_question(run: ViewedRun) -> None:
    found = Folder(run.folder).answer("compare/before_sft/after_rl")
    assert found["num_questions"] == 4
    *kinds, (name, success) = found["success"]
    assert (name, success["first"], success["second"]) == ("all", 0.125, 0.625)
    assert len(kinds) == len({kind for kind, _ in kinds}) > 1
    assert [one["task"] for one in found["changed"]] == ["q-00000", "q-00003"]


def test_a_single_evaluation_and_others_to_compare(run: ViewedRun, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    own = run.folder / "eval" / "after_rl"
    folder = Folder(own, [other.folder / "eval" / name for name in ("after_rl", "before_sft")])
    assert not folder.run()["is_run"]
    assert list(folder.evaluations()) == ["after_rl", "after_rl-2", "before_sft"]
    assert folder.answer("compare/after_rl/before_sft")["num_questions"] == 4
    with pytest.raises(DataError, match="unknown evaluation 'x'"):
        folder.answer("evaluations/x")


# the command, and exports


@pytest.mark.golden("view")
def test_mistakes_are_one_line(run: ViewedRun, tmp_path: Path, golden: Golden) -> None:
    for arguments in (["nowhere"], [tmp_path], [run.folder, tmp_path]):
        golden.run(view, *arguments, status=2)
    golden.run(view, run.folder, "--export", run.folder, status=2)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    golden.run(view, tmp_path / "sweep", status=2)


def embedded(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="text/plain" data-path="([^"]*)">([^<]*)</script>', page)
    return {path: json.loads(gzip.decompress(base64.b64decode(data))) for path, data in found}


def test_one_file_holds_all_of_a_small_run(run: ViewedRun, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "run.html"
    assert view.main([str(run.folder), "--export", str(out)]) == 0
    page = out.read_text()
    answers = embedded(page)
    folder = Folder(run.folder)
    for path in ("metrics", "steps", "steps/2", "steps/2/trees/3", "evaluations/after_rl/rows/0"):
        assert answers[path] == json.loads(encode(folder.answer(path)))
    assert sum(path.count("/trees/") for path in answers) == 9
    assert answers["run"]["exported"]["left_out"] == []
    assert HOSTILE not in page
    assert "src=" not in re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    assert "connect-src" not in page  # default-src 'none' holds for it


def test_trees_beyond_the_size_limit_are_omitted_and_reported(
    run: ViewedRun, tmp_path: Path
) -> None:
    lines = list(export(Folder(run.folder), tmp_path / "run.html", 0.012))
    answers = embedded((tmp_path / "run.html").read_text())
    kept = [path for path in answers if "/trees/" in path]
    assert 0 < len(kept) < 9
    assert kept[0].startswith("steps/3/")
    left = f"left out: {9 - len(kept)} trees of earlier steps; raise --max-mb to include more"
    assert left in lines
    assert answers["run"]["exported"]["left_out"]


def test_the_help_of_the_command_loads_no_heavy_module() -> None:
    code = "import sys, agentenv.launchers.view as v\n"
    code += "try: v.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'aiohttp', 'numpy', 'rich'} & set(sys.modules)))"
    done = run_python(code)
    assert "--export" in done.stdout
    assert done.stdout.rstrip().endswith("[]")
