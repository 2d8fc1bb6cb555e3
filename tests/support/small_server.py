"""A server of a few lines, with a child that is hard to end, and the state of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

# Answers with its command line on the port of --port, or of its last argument. Its child ignores
# SIGTERM and has left the process group. Both log their process ids.
SERVER = """
import http.server, os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True)
print("child", child.pid, "server", os.getpid(), "gpus", os.environ.get("GPUS"), flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(" ".join(sys.argv).encode())
    def log_message(self, *_): pass
port = sys.argv[sys.argv.index("--port") + 1 if "--port" in sys.argv else -1]
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def script(folder: Path, text: str = SERVER) -> Path:
    path = folder / "server.py"
    path.write_text(text)
    return path


def processes(log: Path) -> list[int]:
    """Child and server of the last start, from the server's log."""
    words = [line.split() for line in log.read_text().splitlines() if line.startswith("child")][-1]
    return [int(words[1]), int(words[3])]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def assert_ended(pids: list[int]) -> None:
    until(lambda: alive(pids) == [])
