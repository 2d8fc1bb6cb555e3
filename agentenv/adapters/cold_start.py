"""Inputs of a cold start: demonstrations, and a small untrained model with a custom vocabulary.

    def solve(task, results):                       # the whole text of the next turn
        if not results:
            return f"<think>I look.</think><stock>{task.metadata['item']}</stock>"
        return f"<think>I know it.</think><answer>{results[-1]}</answer>"

    played = demonstrate(WarehouseEnv, rows, solve, stage="clean")
    write_rows("data/sft.jsonl", played)
    tiny_model("model", texts_of(played), tools=["stock"])

Demonstrations run in the environment itself: tool results are real, and each row has its reward.
The model is a Qwen3 of about half a million parameters, with the words of the texts as its
vocabulary. Its weights are random until the cold start trains them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.base.disk import write_whole
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.installation import require_train
from agentenv.base.offload import in_new_thread, result_of
from agentenv.base.retries import through_outage
from agentenv.base.types import Message, NextTurn, Task
from agentenv.contract.env import Env, check_observation, check_reset, check_step, isolated_shared
from agentenv.contract.tool_env import grades_state
from agentenv.data.data_files import plain
from agentenv.data.file_formats import RawRow
from agentenv.data.rows import RowReader, RowsConfig
from agentenv.text.tags import TAGS, tag_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


Make = Callable[[Task], Env]
Turn = Callable[[Task, Sequence[str]], str | Message]

MAX_TURNS = 100
MAX_FAILURES = 4  # retries of an episode
NUM_CONCURRENT = 16


def demonstrate(
    make: Make,
    tasks: Iterable[Task | Mapping[str, Any]],
    turn: Turn,
    *,
    stage: str = "",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Play one demonstration per task, or per row of a dataset. A returned row has "messages"
    (prompt included), "kind", "stage", "reward" and "success".

    `turn` returns the next turn of the policy, from the task and the texts of all results so far: a
    text in the tag protocol, or a Message with `tool_calls`, whose rows also have "tools" and suit
    any renderer. A turn without a call ends the episode. If an event loop is running, as in a
    notebook, the episodes run in a thread. An episode whose infrastructure fails is retried. Raises
    DataError for an episode that does not end or opens a context, CrashError for invalid results of
    the environment, and the environment's own errors for bugs and long outages.
    """
    reader = RowReader(RowsConfig(), "demonstrated")
    reader.needs_answer = lambda _: not grades_state(make)
    read = [
        one if isinstance(one, Task) else reader.task(RawRow(Path("row"), number, plain(one)))
        for number, one in enumerate(tasks, 1)
    ]
    places = asyncio.Semaphore(NUM_CONCURRENT)

    async def one(task: Task) -> dict[str, Any]:
        play = partial(_demonstration, make, task, turn, stage, seed)
        what = f"the demonstration of task {task.id}"
        async with places:
            return await through_outage(play, what, task.id, outage_s=0.0, num_retries=MAX_FAILURES)

    async def played() -> list[dict[str, Any]]:
        async with isolated_shared():
            return await asyncio.gather(*map(one, read))

    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no running loop
        return asyncio.run(played())
    return result_of(in_new_thread(lambda: asyncio.run(played()), "demonstrate"))


async def _demonstration(
    make: Make, task: Task, turn: Turn, stage: str, seed: int
) -> dict[str, Any]:
    env = make(task)
    try:
        messages, info = check_reset(await env.reset(seed=seed))
        shown, results = list(messages), list[str]()
        for _ in range(MAX_TURNS):
            action = turn(task, results)
            if isinstance(action, str):
                shown.append(Message("assistant", action))
                action = Message("assistant", action, tag_calls(action, info.get("tools", ())))
            else:
                shown.append(action)
            outcome = check_step(await env.step(action))
            found, reward, terminated, truncated, step_info = outcome
            then = step_info.get("turn")
            if isinstance(then, NextTurn) and then.prompt:
                raise DataError(
                    f"task {task.id}: after {action.content!r:.80} the program began another "
                    f"context ({then.kind}/{then.cause}), and a demonstration has only one; some "
                    'programs need env.kwargs.program.thoughts = "text", others turns without '
                    "thoughts"
                )
            shown += found
            results += [message.content for message in found]
            if terminated or truncated:
                break
            check_observation(found)
        else:
            raise DataError(
                f"task {task.id}: the demonstration has not ended after {MAX_TURNS} turns; a turn "
                "without a tool call ends it"
            )
    finally:
        await env.close()
    row = {
        "stage": stage,
        "kind": task.kind,
        "reward": reward,
        "success": bool(step_info.get("success", reward > 0)),
        "messages": [_message(one) for one in shown],
    }
    calls = any(one.tool_calls for one in shown)
    return {**row, "tools": list(info.get("tools", ()))} if calls else row


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [
            {"function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found


def texts_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All texts of demonstrations, for the vocabulary of a `tiny_model`."""
    return [message["content"] for row in rows for message in row["messages"]]


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write these rows to a JSONL file, and create its parent folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (f"{json.dumps(plain(row), ensure_ascii=False)}\n".encode() for row in rows))
    return path


PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Lower-case words and signs absorb the spaces around them, so that a name is the same token in any
# position; digits form pairs, and the punctuation between names and values of a JSON object is one
# token. This shortens the traces and makes copying easy to learn.
PIECE = r"\\boxed\{| ?[a-z]+ ?| ?[A-Z][a-z]+|[0-9]{1,2}| [*+-] |\{\"|\": \"|\": |\", \"|, \"|\"\}"


def tiny_model(
    path: str | Path,
    texts: Iterable[str],
    seed: int = 0,
    *,
    tools: Iterable[str] = (),
    words: Iterable[str] = (),
    max_tokens: int = 1024,
) -> Path:
    """Write model and tokenizer to the folder `path`, and return it.

    Every word of `texts`, each of `words`, and the tags of `tools` become tokens; other text is
    encoded as bytes. So `texts` should cover questions, tool results and demonstrations.
    `max_tokens` is the maximum sequence length, prompt included. Equal arguments give equal files.
    Needs the extra `train`. Raises ConfigError.
    """
    require_train("torch", "tokenizers", "transformers")
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tiny_tokenizer(texts, tools=tools, words=words, max_tokens=max_tokens)
    ids: Mapping[str, int] = tokenizer.get_vocab()
    # Every serving engine has kernels for head size 64. The output head is a separate tensor (vLLM
    # on CPU does not reload tied weights correctly), but starts equal to the embedding, so that
    # copying a token works before its output row has been trained.
    config = Qwen3Config(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_tokens,
        initializer_range=0.08,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.generation_config = GenerationConfig(eos_token_id=ids[END], pad_token_id=ids[PAD])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def tiny_tokenizer(
    texts: Iterable[str],
    *,
    tools: Iterable[str] = (),
    words: Iterable[str] = (),
    max_tokens: int = 1024,
) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per word of the texts, and bytes for the rest: any text survives a
    round trip.

    Tags are ordinary tokens (they remain in decoded text), chat markers are special tokens.
    """
    require_train("tokenizers", "transformers")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [
        "".join(piece for piece, _ in to_bytes.pre_tokenize_str(text))
        for text in _pieces(texts, words)
    ]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PIECE), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (PAD, START, END)])
    first, *rest = TAGS
    tags = [text for tag in (first, *tools, *rest) for text in (f"<{tag}>", f"</{tag}>")]
    backend.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(tags)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
    )


def _pieces(texts: Iterable[str], words: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, str):
        raise ConfigError("tiny_model: texts is a string; expected a list of strings")
    yield from words
    yield from (f"{number:02d}" for number in range(100))
    found = {"user", "assistant"}
    for text in texts:
        found.update(re.findall(PIECE, text))
    yield from sorted(found)
