"""TRL's rollout loop of asynchronous GRPO: the object that its worker's process runs.

Runs: rendering the whole conversation by the chat template and encoding it at each turn, parsing
the answer, its tool calls, reconciling the tokens to rows, rewards and advantages of groups of 16,
the queue to the trainer's process (which only takes rows here, and is counted as a child). Not run:
HTTP, in whose place `_post` is overridden.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Any

from accelerate.state import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

if TYPE_CHECKING:
    from benchmarks.peers.work import Work


START_S = 120.0


def take(samples: Any, ready: Any) -> None:
    """The trainer's side of the queue; what it has to import is loaded by now."""
    ready.set()
    while samples.get() is not None:
        pass


def luck(completions: list[Any], **others: Any) -> list[float]:
    return [float(number % 2) for number in range(len(completions))]


class Loop(_AsyncRolloutLoop):  # type: ignore[misc]  # of a package that mypy does not read
    """Asks the work in place of vLLM."""

    work: Work
    results_end: int  # the token that ends a result

    async def _post(
        self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3
    ) -> dict[str, Any]:
        num_results = payload["prompt"].count(self.results_end)
        token_ids, logprobs = await self.work.turn("json", num_results)
        return {"choices": [{"token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}}]}


async def run(work: Work) -> None:
    PartialState()
    tokenizer = AutoTokenizer.from_pretrained(work.tokenizer)
    tokenizer.chat_template = qwen3_instruct_2507_chat_template

    async def search(query: str) -> str:
        """Search.

        Args:
            query: What is looked for.
        """
        return await work.result()

    context = multiprocessing.get_context("spawn")
    samples = context.Queue()
    ready = context.Event()
    trainer = context.Process(target=take, args=(samples, ready), daemon=True)
    trainer.start()
    if not ready.wait(timeout=START_S):
        raise RuntimeError(f"the process that takes samples did not start within {START_S:g} s")
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in work.task["questions"]]
    loop = Loop(
        model_name="policy",
        dataset=Dataset.from_list(rows),
        reward_funcs=[luck],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=samples,
        model_version_value=context.Value("i", 0),
        heartbeat_value=context.Value("d", 0.0),
        failed_event=context.Event(),
        exception_info_queue=context.Queue(maxsize=1),
        metrics_queue=context.Queue(maxsize=4096),
        tools=[search],
        num_generations=work.group_size,
        max_inflight_tasks=work.at_once,
        max_tokens=256,
    )
    loop.work = work
    loop.results_end = tokenizer.convert_tokens_to_ids("</tool_response>")
    try:
        await loop._run_loops(loop._stop_event)
    finally:
        loop._loop.close()
        samples.put(None)
        trainer.join(timeout=START_S)
