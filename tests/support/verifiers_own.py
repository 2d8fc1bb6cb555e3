"""Plays a row of a verifiers package with the package's own client, in the interpreter that has it:
reads {"name", "folder", "args"}, prints the first row, reads turns, prints {"reward", "metrics"}.

Its model is a server of one branch: to a request with n messages of the assistant it replies with
turn n, {"text", "calls": [{"name", "arguments"}]}, streamed on request.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def server(turns: list[dict[str, Any]]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = sum(one["role"] == "assistant" for one in request["messages"])
            turn = turns[number]
            calls = [
                {
                    "index": place,
                    "id": f"call_{number}_{place}",
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": json.dumps(call["arguments"], separators=(",", ":")),
                    },
                }
                for place, call in enumerate(turn.get("calls", ()))
            ]
            message = {"role": "assistant", "content": turn.get("text") or None}
            message |= {"tool_calls": calls} if calls else {}
            finish = "tool_calls" if calls else "stop"
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reply = {"id": "1", "created": 0, "model": "policy", "usage": usage}
            if request.get("stream"):
                kind = {"object": "chat.completion.chunk"}
                choices = [{"index": 0, "delta": message, "finish_reason": finish}]
                text = f"data: {json.dumps({**reply, **kind, 'choices': choices})}\n\n"
                body, media = f"{text}data: [DONE]\n\n".encode(), "text/event-stream"
            else:
                choices = [{"index": 0, "message": message, "finish_reason": finish}]
                whole = {**reply, "object": "chat.completion", "choices": choices}
                body, media = json.dumps(whole).encode(), "application/json"
            self.send_response(200)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


class Classic:
    def __init__(self, settings: dict[str, Any]) -> None:
        import verifiers as vf

        self.env = vf.load_environment(settings["name"], **settings["args"])
        self.row = dict(self.env.get_dataset()[0])

    async def play(self, url: str) -> dict[str, Any]:
        from verifiers.types import ClientConfig

        client = ClientConfig(api_base_url=url, api_key_var="THE_KEY")
        outputs = await self.env.generate([self.row], client=client, model="policy")
        (made,) = outputs["outputs"]
        return {"reward": made["reward"], "metrics": made["metrics"]}


class Taskset:
    def __init__(self, settings: dict[str, Any]) -> None:
        from verifiers.v1.utils import loaders

        args = settings["args"]
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        raw = {**args, "taskset": {"id": settings["name"]}, settings["role"] or "agent": agent}
        self.env = loaders.load_environment(loaders.resolve_env_config(raw))
        self.task = next(iter(self.env.taskset))
        self.row = self.task.data.model_dump(mode="json")

    async def play(self, url: str) -> dict[str, Any]:
        import verifiers.v1 as vf
        from verifiers.v1.clients import ModelContext

        client = vf.EvalClientConfig(base_url=url, api_key_var="THE_KEY")
        async with self.env.serving():
            (slot,) = self.env.slots(self.task)
            episode = await self.env.run_slot(slot, ModelContext("policy", client))
        (trace,) = episode.traces
        if episode.errors or trace.errors:
            raise RuntimeError(str([*episode.errors, *trace.errors]))
        scores = {name: one.score for name, one in trace.rewards.items()}
        return {"reward": trace.reward, "metrics": {**trace.metrics, **scores}}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    os.chdir(settings["folder"])
    sys.path[0] = os.environ["PYTHONPATH"] = settings["folder"]
    os.environ["THE_KEY"] = "key"
    module = __import__(settings["name"].replace("-", "_"))
    own = (Classic if hasattr(module, "load_environment") else Taskset)(settings)
    print(json.dumps(own.row), file=out, flush=True)
    running = server(json.loads(sys.stdin.readline()))
    threading.Thread(target=running.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{running.server_address[1]}/v1"
    print(json.dumps(asyncio.run(own.play(url))), file=out, flush=True)


if __name__ == "__main__":
    main()
