"""What leaves a process passes the one redactor (agentenv/base/secrets.py): every process seals its
output, and no other file makes a log handler or writes to standard output or error."""

from __future__ import annotations

import re

from tests.support.sources import texts

SINK = re.compile(
    r"logging\.(?:\w*Handler|basicConfig|handlers|config)|^ *import logging as|addHandler"
    r"|\.handlers\b|logging import.*(?:Handler|Config)|(?:Stream|File)Handler"
    r"|setLogRecordFactory|excepthook"
    r"|[( ]Console\b|import print\b|traceback\.print_|import print_|\"/dev/std(?:out|err)\""
    r"|sys\.(?:__)?std(?:out|err)(?:__|\.\w+|$| =)|sys import.*std(?:out|err)|redirect_std"
    r"|(?:os\.write|fdopen|\bopen)\([12],|sys, \"std(?:out|err)\"",
    re.MULTILINE,
)
SPELLED = """
from logging import StreamHandler as S; import logging as L; log.handlers.append(h)
import logging.config; logging.config.dictConfig(d); from sys import stderr; out = sys.stdout
from rich.console import Console as C; from rich import print; from traceback import print_exc
open("/dev/stderr", "w"); open(2, "w"); os.fdopen(1, "w"); contextlib.redirect_stdout(f)
getattr(sys, "stdout").write(text); os.write(2, data); sys.stderr = f; logging.basicConfig()
"""
JSON = "JSON or help as a whole, on the sealed output"
SINKS = {
    "agentenv/base/secrets.py": "the one place",
    "agentenv/processes/guard.py": "the name of a command that does not start",
    "assembly/run/terminal.py": "the terminal and run.log: records and streams are sealed",
    "assembly/run/exits.py": "after seal_output",
    "agentenv/engines/server_key/agentenv_key.py": "removes an engine's key",
    "training/workers/worker_process.py": "sealed records, for the controller too",
    "learners/ranks/rank_process.py": "after seal_output",
    "envs/sandbox/cells.py": "in the sandbox: the output of a call, which env.check_step cleans",
    "envs/sandbox/program_init.py": "in the sandbox of a program, likewise",
    **dict.fromkeys(("launchers/__main__.py", "launchers/ctl.py", "launchers/doctor.py"), JSON),
    **dict.fromkeys(("lab/diagnosis/audit.py", "lab/diagnosis/signs.py"), JSON),
    "assembly/keys/help.py": JSON,
}
SEALS = re.compile(r"seal_output\(\)|worker_process import main")
UNSEALED = {"agentenv/processes/guard.py", "agentenv/processes/worker_pool.py"}
UNSEALED |= {"agentenv/engines/server_key/agentenv_key.py"}  # removes its key itself
UNSEALED |= {"envs/sandbox/program_init.py", "envs/sandbox/zygote.py"}
UNSEALED |= {"envs/bridges/verifiers_env.py"}  # runs without agentenv


def test_no_other_file_logs_or_prints_and_each_process_seals_its_output() -> None:
    found = texts()
    assert {name for name, text in found.items() if SINK.search(text)} == SINKS.keys()
    assert [one for one in re.split("[;\n] *", SPELLED.strip()) if not SINK.search(one)] == []
    started = {name for name, text in found.items() if 'if __name__ == "__main__"' in text}
    assert {name for name in started if not SEALS.search(found[name])} == UNSEALED
