"""Cost of a captured call in the proxies of other projects (peers), with the same programs.

    PYTHON captures.py DRIVER.py WORK.json     in the interpreter of the peer

The `main(work)` of a driver (drivers/) starts its peer's proxy with `work["programs"]` sessions,
calls `measured` with their keys, and writes the microseconds and the captured turns with
`write_line`.
The programs are those of `benchmarks.parts.captured`, in another process. The engine takes time but
no CPU. In a peer's interpreter this file needs only the standard library.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.peers.contest import Peer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def measured(url: str, keys: Sequence[str]) -> float:
    """Return the CPU microseconds of this process while the programs with these keys call `url`."""
    write_line({"url": url, "keys": list(keys)})
    sys.stdin.readline()
    begun = time.process_time()
    sys.stdin.readline()
    return (time.process_time() - begun) * 1e6


def write_line(found: dict[str, Any]) -> None:
    """Write a line of JSON to the benchmark's process."""
    print(json.dumps(found), flush=True)


def peers() -> dict[str, Peer]:
    """Return the peers by name. Each has its own virtual environment."""
    from benchmarks.peers.contest import peer

    return {
        "openenv": peer("openenv", "openenv", "openenv_capture.py"),
        "verifiers": peer("verifiers_interception", "verifiers", "verifiers_interception.py"),
    }


def work_in(folder: Path, num_programs: int, num_calls: int) -> Path:
    """Write the file that a driver reads, and a tokenizer next to it. It is the tokenizer of our
    own figure with the tags of Qwen's template."""
    from random import Random

    from benchmarks.parts import captured

    tokenizer = captured.make_tokenizer()
    marks = ("tool_call", "tool_response", "think")
    tokenizer.add_tokens([f"<{slash}{mark}>" for mark in marks for slash in ("", "/")])
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(folder / "tokenizer")
    work = {
        "programs": num_programs,
        "calls": num_calls,
        "context": captured.CONTEXT,
        "turn": captured.TURN,
        "result": captured.RESULT,
        "latency_s": captured.LATENCY_S,
        "text": captured.words(captured.TURN * 4 // 5, Random(1)),
        "tokenizer": str(folder / "tokenizer"),
    }
    path = folder / "work.json"
    path.write_text(json.dumps(work), encoding="utf-8")
    return path


def us_a_call(python: Path, peer: Peer, work: Path) -> float:
    """Return the CPU microseconds per call in one round of a peer. Raises PeerError."""
    from benchmarks.peers.environments import PeerError, last_line

    task = json.loads(work.read_text(encoding="utf-8"))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    assert peer.driver is not None
    command = [python, Path(__file__), peer.driver, work]
    with (
        (work.parent / "errors").open("w+", encoding="utf-8") as errors,
        subprocess.Popen(command, stderr=errors, **pipes) as proxy,
    ):
        try:
            one = _read_line(proxy)
            client = [sys.executable, "-m", "benchmarks.parts.captured", "programs", one["url"]]
            client += [str(task["calls"]), *one["keys"]]
            with subprocess.Popen(client, cwd=ROOT, **pipes) as programs:
                assert programs.stdout is not None
                programs.stdout.readline()  # "ready"
                _signal(proxy)
                programs.communicate("\n")
            _signal(proxy)
            found = _read_line(proxy)
        except (ValueError, OSError):
            errors.seek(0)
            raise PeerError(last_line(errors.read())) from None
        finally:
            proxy.kill()
    expected = task["programs"] * task["calls"]
    if found["turns"] != expected:
        raise PeerError(f"it captured {found['turns']} of {expected} turns")
    cost: float = found["us"] / expected
    return cost


def _read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def _signal(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


if __name__ == "__main__":
    sys.modules["captures"] = sys.modules[__name__]
    _, driver, file = sys.argv
    sys.path.insert(0, str(Path(driver).parent))
    given = json.loads(Path(file).read_text(encoding="utf-8"))
    importlib.import_module(Path(driver).stem).main(given)
