"""What the client of a vLLM server costs, beside the package openai on the same server.

    python benchmarks/parts/bench_engines.py [--streams 256] [--rounds 2] [--tokens 64] [--repeat 3]

A real vLLM server of a tiny model (.venv-vllm, made by `sh .ci/engine-vllm`), 256 streams at once.
Each client runs in a process of its own, in the same environment, and only the CPU time of that
process counts (getrusage), so the figures hold on a loaded machine; the server's speed does not
enter. The clients take turns. See bench_engines_client.py for what each of them does.

"at once" asks for turns of one token: what a request costs beside its tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engines.reference import VOCAB
from tests.engines.vllm_server import LOGPROBS, PYTHON, SCALE_OUT, VLLMProcess
from tests.engines.world import World

KINDS = ("pool", "openai", "bytes")
CLIENT = Path(__file__).with_name("bench_engines_client.py")


def run_client(kind: str, url: str, model: Path, tokens: int, args: argparse.Namespace) -> Any:
    command = [str(PYTHON), str(CLIENT), kind, url, "--model", str(model), "--vocab", str(VOCAB)]
    command += ["--streams", str(args.streams), "--rounds", str(args.rounds)]
    command += ["--tokens", str(tokens), "--top-k", str(args.top_k)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def equal_share(found: dict[str, Any]) -> float:
    """Share of requests for which both clients got the same tokens."""
    ours, theirs = found["pool"]["digests"], found["openai"]["digests"]
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = World(Path(folder) / "model", tied=False, num_models=1).paths[0]
        flags = (*SCALE_OUT, *LOGPROBS, "--max-num-seqs", str(args.streams))
        server = VLLMProcess(model, Path(folder) / "server.log", flags)
        try:
            server.wait_ready()
            for tokens in (args.tokens, 1):
                print(f"\n{args.streams} streams, {tokens} tokens a turn, top {args.top_k}")
                costs: dict[str, list[float]] = {kind: [] for kind in KINDS}
                for _ in range(args.repeat):
                    found = {k: run_client(k, server.url, model, tokens, args) for k in KINDS}
                    for kind, one in found.items():
                        costs[kind].append(one["us_per_request"])
                        print(
                            f"{kind:8s} {one['us_per_request']:8.0f} CPU us a request "
                            f"{one['us_per_token']:7.1f} a token {one['wall_s']:6.1f} s wall",
                            flush=True,
                        )
                    print(f"         equal tokens in {equal_share(found):.3f} of the requests")
                ours = median(costs["pool"])
                for kind in KINDS[1:]:
                    print(f"{kind} / pool = {median(costs[kind]) / ours:.2f}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
