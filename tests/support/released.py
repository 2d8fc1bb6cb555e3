"""A folder as docs/reproduce.md makes it, in small: files of a few rows in the schemas of the
released data sets, and models of the public shapes with a small tokenizer, whose weights are holes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
from pyarrow import parquet

from agentenv.assembly.checks.memory import KNOWN, ModelShape
from agentenv.assembly.keys.benchmarks import BENCHMARKS
from agentenv.base.model_files import load_config
from agentenv.envs.quickstart.setup import build_model
from agentenv.learners.lora import empty_model
from tests.commands.benchmark_files import encrypted
from tests.support.json_files import write_rows

Row = dict[str, Any]

SYSTEM = "Think, then use <search> or <python>, and answer in <answer> with \x08oxed{}."
QUESTIONS = (
    ("What is 6 times 7?", "42", "math"),
    ("Who wrote Hamlet?", "William Shakespeare", "qa"),
)
NUM_ROWS = 6
CHAIN = (
    "<think>a sum</think><python>print(6 * 7)</python><result>42</result>"
    "<think>done</think><answer>The answer is \\boxed{42}</answer>"
)
BROKEN_CHAIN = "<think>a sum</think><python>print(6 * 7)</python><result>42<answer>42</answer>"
STAR = "sft-tool-star/final.jsonl"
MODELS = (
    "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen2.5-72B-Instruct-GPTQ-Int4",
    "Qwen2.5-72B-Instruct", "Llama-3.1-8B-Instruct", "Qwen3-8B", "Qwen3-14B", "QwQ-32B",
)  # fmt: skip


def arpo_row(place: int, *, system: bool = True, answer: str | None = None) -> Row:
    """A row of ARPO's parquet files; Tool-Star's have the same columns without a system prompt."""
    question, gold, ability = QUESTIONS[place % len(QUESTIONS)]
    messages = [{"content": question, "role": "user"}]
    if system:
        messages.insert(0, {"content": SYSTEM, "role": "system"})
    return {
        "data_source": "DR_grpo_mix",
        "prompt": messages,
        "ability": ability,
        "reward_model": {"ground_truth": gold if answer is None else answer, "style": "rule"},
        "extra_info": {"index": place, "question": question, "split": "train"},
    }


def tool_star_row(place: int, *, answer: str | None = None) -> Row:
    """A row of Tool-Star's parquet files, whose prompt its code builds as it loads them."""
    question, gold, ability = QUESTIONS[place % len(QUESTIONS)]
    return {
        "data_source": "grpo_mix",
        "question": question,
        "ability": ability,
        "reward_model": {"ground_truth": gold if answer is None else answer, "style": "rule"},
        "extra_info": {"index": place, "split": "train"},
    }


def sharegpt_row(place: int, chain: str = CHAIN) -> Row:
    """A row of ARPO-SFT-54K."""
    human = {"from": "human", "value": f"{QUESTIONS[0][0]} ({place})"}
    return {"conversations": [human, {"from": "gpt", "value": chain}], "system": SYSTEM}


def preference_row(place: int) -> Row:
    """A row of a set of preferences as LLaMA-Factory reads it."""
    return {
        "conversations": [{"from": "human", "value": f"{QUESTIONS[0][0]} ({place})"}],
        "chosen": {"from": "gpt", "value": CHAIN},
        "rejected": {"from": "gpt", "value": CHAIN.replace("\\boxed{42}", "41")},
        "system": SYSTEM,
    }


def write_parquet(path: Path, rows: list[Row]) -> None:
    """With the types that the rows have."""
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def benchmark_rows(name: str) -> list[Row]:
    """Rows as the released evaluation has them: of gated sets in the columns of their source."""
    question, gold, _ = QUESTIONS[name not in ("aime24", "aime25", "gsm8k", "math500", "math")]
    text: Row = {"question": question, "answer": [gold]}
    number = int(gold) if gold.isdigit() else gold
    rows: dict[str, Row] = {
        "aime24": {"id": 60, "problem": question, "solution": "6 * 7", "answer": gold},
        "aime25": {"problem": question, "answer": number, "id": "0"},
        "gsm8k": {"question": question, "answer": f"6 * 7 = <<6*7=42>>42\n#### {gold}"},
        "math500": {"question": question, "answer": gold},
        "math": {"problem": question, "level": "Level 1", "type": "Algebra",
                 "solution": f"It is $\\boxed{{{gold}}}$."},
        "webwalker": {"question": question, "answer": gold},
        "hle": {"id": "h", "question": question, "image": "", "answer": gold,
                "answer_type": "exactMatch", "raw_subject": "Arts", "category": "Humanities"},
        "gaia": {"task_id": "g", "Question": question, "Level": 1, "Final answer": gold,
                 "file_name": ""},
        "xbench": encrypted(question, gold, 1),
    }  # fmt: skip
    made = rows.get(name, text)
    return [{**made, **({"id": f"{name}-{n}"} if "id" in made else {})} for n in range(NUM_ROWS)]


def make_data(folder: Path) -> None:
    """data/ as section 2 of docs/reproduce.md leaves it."""
    data = folder / "data"
    (data / "eval").mkdir(parents=True)
    (data / "sft").mkdir()
    rows = [arpo_row(place) for place in range(NUM_ROWS)]
    for name in ("valid", "hard_search_1k", "gaia_test", "hle_test"):
        write_parquet(data / f"{name}.parquet", rows)
    write_parquet(data / "train_10k.parquet", [*rows, arpo_row(1, answer="")])
    stars = [tool_star_row(place) for place in range(NUM_ROWS)]
    write_parquet(data / "grpo_mix_test.parquet", stars)
    write_parquet(data / "grpo_mix_train_shuffle.parquet", [*stars, tool_star_row(1, answer="")])
    dialogues = [sharegpt_row(place) for place in range(240)]  # some hundred are held out
    write_rows(data / "sft" / "final.jsonl", [*dialogues, sharegpt_row(0, BROKEN_CHAIN)])
    columns = {"messages": "conversations", "system": "system"}
    entry = {"file_name": "sft/final.jsonl", "formatting": "sharegpt", "columns": columns}
    (data / "sft-tool-star").mkdir()
    write_rows(data / "sft-tool-star" / "final.jsonl", dialogues)
    registry = {"final_5w4_still": entry, "tool_star": entry | {"file_name": STAR}}
    (data / "dataset_info.json").write_text(json.dumps(registry), encoding="utf-8")
    found = json.dumps({QUESTIONS[1][0]: "Page 1: A play by William Shakespeare."})
    (data / "search_cache.json").write_text(found, encoding="utf-8")
    for name in BENCHMARKS:
        write_rows(data / "eval" / f"{name}.jsonl", benchmark_rows(name))
    pairs = folder / "runs" / "tool_star_critic" / "pairs"
    pairs.mkdir(parents=True)
    write_rows(pairs / "round-000001.jsonl", [preference_row(place) for place in range(NUM_ROWS)])
    page = {"id": "1", "title": "Hamlet", "text": "A play by William Shakespeare."}
    write_rows(data / "wiki.jsonl", [page])


def make_model(path: Path, template: Path, shape_of: str = "") -> None:
    """The tokenizer of `template` and the shape of a public model, by default the one that the
    path names."""
    path.mkdir(parents=True)
    for file in template.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (path / file.name).symlink_to(file)
    shape = KNOWN[shape_of or max((name for name in KNOWN if name in path.name), key=len)]
    config = {"model_type": "qwen3" if shape.qk_norm else "qwen2", **keys_of(shape)}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_holes(path)
    if "GPTQ-Int4" in path.name:
        config["quantization_config"] = {"bits": 4}
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")


def keys_of(shape: ModelShape) -> dict[str, Any]:
    """In the configuration of a model."""
    return {
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary, "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip


def write_holes(path: Path) -> None:
    """A file of weights that are holes: names, shapes and sizes are right, the disk holds none."""
    names, size = dict[str, Row](), 0
    for name, one in empty_model(load_config(path)).state_dict().items():
        start, size = size, size + 2 * one.numel()
        names[name] = {"dtype": "BF16", "shape": [*one.shape], "data_offsets": [start, size]}
    header = json.dumps(names).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def make_folder(folder: Path) -> Path:
    """The whole folder, and the models that its first steps leave."""
    make_data(folder)
    build_model(folder / "template", seed=0)
    for engine in ("vllm", "sglang"):
        python = folder / f".venv-{engine}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    for name in MODELS:
        make_model(folder / "models" / name, folder / "template")
        made = name.removesuffix("-Instruct") + "-sft"
        make_model(folder / "runs" / made, folder / "template")
    for name in ("Qwen2.5-3B-tool-star-sft", "tool_star_rl_3b"):
        make_model(folder / "runs" / name, folder / "template", "Qwen2.5-3B")
    return folder
