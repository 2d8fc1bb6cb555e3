"""Stored evaluations for tests and benchmarks: answers of real pairs in invented trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from agentenv.assembly.keys.evaluation import resolve_sets
from agentenv.assembly.reports.records import EvalRow
from agentenv.envs.grading.text import clean
from agentenv.envs.grading.words import is_wordy
from agentenv.evaluation.store import CONFIG_FILE, ROWS_FILE, Saved

PAIRS = Path(__file__).parent.parent / "fixtures" / "answer_pairs.json"
QUICK = {"kind": "layered", "math": False}  # a grader without math-verify
FILLER = "Let us look at what is known, write it down and check each step before going on. "


def trajectory(answer: str, length: int = 1, **keys: Any) -> EvalRow:
    """A trajectory with one search and one Python call that ends with `answer`; of about 300
    characters a turn for each `length`."""
    rng = Random(answer)
    thought = FILLER * rng.randint(2 * length, 6 * length)
    segments = [
        {"env": f"system\nAnswer in tags.\nuser\n{keys.get('question', '')}\nassistant\n"},
        {"policy": f"<think>{thought}</think><search>{keys.get('question', '')}</search>"},
        {"env": f" <result>\n{FILLER * 6}\n</result>"},
        {"policy": f"<think>{thought}</think><python>print({rng.randint(0, 99)})</python>"},
        {"env": f" <result>\n{rng.randint(0, 99)}\n</result>"},
        {
            "policy": rf"<think>{thought}</think><answer>\boxed{{{answer}}}</answer>",
            "eos": "<|im_end|>",
        },
    ]
    calls = [
        {"name": name, "arguments": {"text": "x"}, "ok": True, "error": None, "duration_s": 0.2}
        for name in ("search", "python")
    ]
    filled: dict[str, Any] = {
        "dataset": "qa", "task": "1", "sample": 0, "prediction": answer, "segments": segments,
        "tool_calls": calls, "num_turns": 3, "action_tokens": len(thought) // 4,
        "prompt_tokens": 60, "tool_tokens": 150, "seconds": rng.uniform(1, 20),
        "end": "terminated", "policy_versions": [3],
    }  # fmt: skip
    return EvalRow(**(filled | keys))


def mixed_rows(
    num_questions: int, num_samples: int, seed: int = 0, length: int = 1
) -> list[EvalRow]:
    """Questions of mathematics and of facts, half of each: the golds and answers of the labeled
    pairs, with digits changed so that few questions are alike. A question has a right answer and
    three wrong ones, which its samples give."""
    rng = Random(seed)
    kinds: dict[str, list[tuple[str, str, int]]] = {"maths": [], "facts": []}
    pairs = json.loads(PAIRS.read_text(encoding="utf-8"))
    for gold, answer, label in pairs:
        gold = gold if isinstance(gold, str) else gold[0]
        kinds["facts" if is_wordy(clean(gold)) else "maths"].append((answer, gold, label))
    rows = []
    for number in range(num_questions):
        dataset = ("maths", "facts")[number % 2]
        answer, gold, label = rng.choice(kinds[dataset])
        digits = str.maketrans("123456789", "".join(rng.sample("123456789", 9)))
        if dataset == "maths":
            answer, gold = answer.translate(digits), gold.translate(digits)
        others = [one[0].translate(digits) for one in rng.choices(kinds[dataset], k=3)]
        for sample in range(num_samples):
            right = rng.random() < 0.6
            given = rng.choice(others) if not right else answer if label else gold
            question = f"Question {number} of {dataset}: what is it?"
            rows.append(
                trajectory(
                    given,
                    length,
                    dataset=dataset,
                    task=str(number),
                    sample=sample,
                    kind=dataset,
                    question=question,
                    answers=[gold],
                    metadata={"level": 1 + number % 3},
                    success=right,
                    reward=float(right),
                )
            )
    return rows


def write_evaluation(
    folder: Path,
    rows: Sequence[EvalRow],
    grader: dict[str, Any] | None = None,
    env: str = "agentenv/QAGrader-v0",
    benchmark: str = "",
) -> Path:
    """An evaluation directory that holds these rows, of sets of `benchmark`."""
    keys: dict[str, Any] = {"env": {"id": env}}
    names = {row.dataset for row in rows}
    keys["sets"] = {name: {"path": f"{name}.jsonl", "benchmark": benchmark} for name in names}
    if grader is not None:
        keys["grader"] = grader
    config = msgspec.to_builtins(resolve_sets(keys, "test"))
    folder.mkdir(parents=True, exist_ok=True)
    saved = Saved(subject={"name": "a model"}, run=str(folder), config=config)
    (folder / CONFIG_FILE).write_bytes(msgspec.json.encode(saved))
    (folder / ROWS_FILE).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return folder


def row(task: str = "1", sample: int = 0, success: bool = True, **keys: Any) -> EvalRow:
    """A trajectory that answered 7, which is right, by default."""
    answer = str(keys.pop("answer", "7"))
    filled = {"task": task, "sample": sample, "success": success, "answers": ["7"], **keys}
    return trajectory(answer, **filled)


def failed(task: str, sample: int, error: str = "EngineError: down") -> EvalRow:
    """A trajectory that infrastructure ended."""
    return EvalRow(dataset="qa", task=task, sample=sample, end="failed", error=error)


def rows_of(answers: dict[str, list[str]], gold: str = "Paris", **keys: Any) -> list[EvalRow]:
    """Trajectories by question: one for each answer that it was given."""
    rows = []
    for task, given in answers.items():
        for sample, answer in enumerate(given):
            right = answer == gold
            filled = keys | {"question": f"Question {task}?", "reward": float(right)}
            rows.append(row(task, sample, right, answer=answer, answers=[gold], **filled))
    return rows
