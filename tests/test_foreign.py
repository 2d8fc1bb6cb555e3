"""Foreign data is decoded in one place, where every failure is an error of ours."""

from __future__ import annotations

import ast
import re
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from agentenv.base import untrusted
from agentenv.base.errors import AgentEnvError, ForeignError
from tests.support.sources import texts

DECODERS = re.compile(
    r"json\.(loads?|JSONDecoder)|msgspec\.(json|msgpack|yaml)\.(decode|Decoder)"
    r"|msgspec\.convert|ast\.literal_eval|(pickle|marshal|yaml)\.\w*loads?"
    r"|(response|request|reply)\.json"
)
IMPORTS = re.compile(r"from (json|pickle|msgspec\.json)\b")
# Files that decode data of this program, or the configuration, which has its own errors, or that
# run without agentenv.
OURS = {
    "agentenv/endpoint/messages.py": "a table of ours",
    "agentenv/base/installation.py": "a file of pip",
    "agentenv/rollout/archive_reader.py": "a run directory",
    "agentenv/base/config.py": "configuration",
    "training/api.py": "a run directory",
    "evaluation/sweep.py": "a sweep file, and a folder of ours",
    "agentenv/cluster/messages.py": "a process of ours",
    "agentenv/engines/remote/base.py": "a client of ours in another process",
    "agentenv/rollout/frames.py": "a run directory, or a process of ours",
    "agentenv/base/registry.py": "configuration",
    "agentenv/processes/worker_group.py": "a process of ours",
    "agentenv/base/untrusted.py": "the one place",
    "agentenv/base/tree.py": "a process of ours",
    "envs/grading/custom.py": "in a worker, a payload of ours",
    "envs/sandbox/cells.py": "in a session, a request of the host",
    "envs/sandbox/zygote.py": "in the zygote, a request of the host",
    "envs/bridges/verifiers_env.py": "what the host sends to a package's process; a row of ours",
    "envs/sandbox/program_init.py": "in the sandbox of a program, the settings of the host",
    "agentenv/processes/worker_pool.py": "in a worker, a job of the host",
    "assembly/keys/cluster.py": "a process of ours",
    "assembly/parts/environments.py": "configuration",
    "evaluation/store.py": "a result directory of ours",
    "training/loop/evaluations.py": "what was encoded before",
    "training/reports/recorder.py": "a process of ours",
    "assembly/reports/pictures.py": "a run directory",
    "assembly/checks/memory.py": "a table of ours",
    "assembly/run/rundir.py": "a run directory",
    "assembly/run/lock.py": "the holder of a run directory",
    "assembly/run/kept.py": "a run directory",
    "assembly/serving/servers.py": "configuration",
    "lab/recipes/sorting.py": "a result directory of ours",
    "training/workers/engine_worker.py": "a process of ours",
    "training/workers/ray_placement.py": "a process of ours",
    "learners/ranks/saved_checkpoint.py": "a checkpoint of ours",
    "learners/ranks/messages.py": "a process of ours",
}


class Point(Struct):
    x: float
    rest: Any = None


class Flat(Struct):
    x: float


def decoding(text: str) -> list[int]:
    """Lines of a source that decode without agentenv.base.untrusted."""
    if not DECODERS.search(text) and not IMPORTS.search(text):
        return []  # most need not be parsed
    tree = ast.parse(text)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    found = [call.lineno for call in calls if DECODERS.fullmatch(ast.unparse(call.func))]
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    found += [one.lineno for one in imports if one.module in ("json", "pickle", "msgspec.json")]
    return found


def test_foreign_data_is_decoded_only_in_untrusted() -> None:
    found = {name: lines for name, text in texts().items() if (lines := decoding(text))}
    strange = {name: lines for name, lines in found.items() if name not in OURS}
    assert not strange, f"use agentenv.base.untrusted, or say in OURS who wrote it: {strange}"
    assert found.keys() == OURS.keys()


def test_the_walk_finds_a_decoder() -> None:
    code = "import json\n\nprint(json.loads('1'))\nfrom json import loads\n"
    assert decoding(code) == [3, 4]


@pytest.mark.parametrize("data", [
    b"", b"[" * 100_000, b"[" * 500 + b"]" * 500, b'{"a":' * 5000, b"\xff", b'"\xff"', b'"\\ud800"',
    "\ud800", b"1" * 5000, b"1e999", b"NaN", b"{} x", b"\x00",
])  # fmt: skip
def test_every_failure_is_one_error(data: bytes | str) -> None:
    with pytest.raises(ForeignError, match=r"\S"):
        untrusted.decode(data)
    with pytest.raises(ForeignError):
        untrusted.decode(data, Point)
    assert issubclass(ForeignError, AgentEnvError)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 100_000, b"\xa1\xff", b"\xd5\xff" * 20])
def test_messagepack_failures_are_the_same_error(data: bytes) -> None:
    with pytest.raises(ForeignError):
        untrusted.decode(data, packed=True)


def test_valid_data_is_decoded() -> None:
    assert untrusted.decode(b'{"x": 1, "rest": [1, {}]}', Point) == Point(1.0, [1, {}])
    assert untrusted.decode('{"x": "\\u00e9"}') == {"x": "é"}
    assert untrusted.decode(msgspec.msgpack.encode({"x": 2}), Point, packed=True) == Point(2.0)
    assert untrusted.convert({"x": "3"}, Point, strict=False) == Point(3.0)
    with pytest.raises(ForeignError, match=r"`float`.*`str`.*`\$\.x`"):
        untrusted.decode(b'{"x": "3"}', Point)
    with pytest.raises(ForeignError, match="float"):
        untrusted.convert({"x": "3"}, Point)
    assert untrusted.decode_text("é".encode()) == "é"
    with pytest.raises(ForeignError):
        untrusted.decode_text(b"\xff")


def nested(depth: int) -> bytes:
    return b'[{"a":' * (depth // 2) + b"1" + b"}]" * (depth // 2)


def test_nesting_depth_is_bounded() -> None:
    """Also between texts that look like structure, and next to flat, long data."""
    untrusted.decode(nested(untrusted.MAX_DEPTH))
    with pytest.raises(ForeignError, match="nested over 100"):
        untrusted.decode(nested(untrusted.MAX_DEPTH + 2))
    with pytest.raises(ForeignError, match="nested over 100"):
        untrusted.decode(b'{"x": 1, "rest": %s}' % nested(untrusted.MAX_DEPTH + 2), Point)
    # `other` is left out.
    untrusted.decode(b'{"x": 1, "other": %s}' % nested(untrusted.MAX_DEPTH + 2), Flat)
    flat = b"[" + b'"[[\\"[{\\\\", [], {"]": {}}, ' * 5000 + b"1]"
    assert len(untrusted.decode(flat)) == 15_001
    with pytest.raises(ForeignError, match="levels"):
        untrusted.decode(flat[:-2] + b'"\\\\", ' + nested(untrusted.MAX_DEPTH) + b"]")


def test_foreign_files_may_have_nan_but_no_unpaired_surrogates() -> None:
    assert untrusted.decode_loose(b'\xef\xbb\xbf{"a": NaN}')["a"] != 0
    assert untrusted.decode_loose('"\\ud83d\\ude00"') == "😀"
    for data in ('"\\ud83d"', b"\xff", "[" * 100_000, nested(untrusted.MAX_DEPTH + 2), "{}{}"):
        with pytest.raises(ForeignError):
            untrusted.decode_loose(data)
    assert untrusted.decode_python("{'a': (1, None)}") == {"a": (1, None)}
    for text in ("f()", "(" * 5000, "1 +", "\x00", "9" * 200_000):
        with pytest.raises(ForeignError):
            untrusted.decode_python(text)


def test_unencodable_characters_are_replaced() -> None:
    assert untrusted.printable("é😀") == "é😀"
    assert untrusted.printable("a\ud800b") == "a?b"
