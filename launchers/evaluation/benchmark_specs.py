"""The benchmarks that are known by name: where each is published, what its rows hold, and how the
papers ask and score it (ARPO, arXiv:2507.19849, section 4; Tool-Star, arXiv:2505.16410, section 4).

Lines of `published` are the columns of the published file; the reduced files that come with ARPO's
evaluation code (question, answer) are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

# What is known of a benchmark: where it is published, what its rows hold, how it is asked.

Kind = Literal["math", "qa", "deep_search"]
Metric = Literal["math", "f1", "judge"]

MAX_CALLS = {"python": 5, "search": 10}  # of one question, in the evaluation of ARPO
SPARE_TURNS = 5  # for the answer, and calls that are answered with "no more calls"
PRESETS = {"math": "python", "qa": "search", "deep_search": "search+python"}
TOOLS: dict[str, tuple[str, ...]] = {
    "math": ("python",),
    "qa": ("search",),
    "deep_search": ("search", "python"),
}
ENVS: dict[str, dict[str, Any]] = {
    "math": {"id": "agentenv/CodeInterpreter-v0"},
    "qa": {"id": "agentenv/WebSearch-v0", "kwargs": {"open_page": False}},
    "deep_search": {"id": "agentenv/DeepSearch-v0"},
}


class Source(Struct, frozen=True):
    """Where a benchmark is published: its id on huggingface.co, the part that is evaluated, its
    licence, and what has to be known or done before."""

    hub: str
    part: str
    licence: str
    note: str = ""


class Benchmark(Struct, frozen=True, kw_only=True):
    """One benchmark. `kind` says which tools are there (maths: python, QA: search, deep search:
    both) and so chooses the environment, `metric` what the papers report: mathematical equivalence
    (backed by a judge), token F1, or an LLM judge.

    `num_questions` are asked unless more are wanted; 0 is all. `group_by` maps the fields that
    scores are split by to their columns; a dot goes into an object. A row with something in
    `attachment` cannot be asked as text and is left out. `aliases` is a column of further golds,
    `solution` one whose last box is the gold where no answer stands beside it, `literal` one that
    holds an object as text. With `encrypted`, question and answer may be base64 of the text XORed
    with the row's canary. `private` is what stands for an answer that is not published.
    """

    name: str
    title: str
    kind: Kind
    metric: Metric
    source: Source
    published: tuple[str, ...]
    num_questions: int = 0
    group_by: dict[str, str] = {}
    ids: tuple[str, ...] = ("id", "_id", "task_id", "unique_id")
    attachment: str = ""
    aliases: str = ""
    solution: str = ""
    literal: str = ""
    encrypted: bool = False
    private: str = ""
    prompt: str = ""
    also: tuple[str, ...] = ()

    @property
    def preset(self) -> str:
        """The system prompt, a preset of `agentenv.prompt`."""
        return self.prompt or PRESETS[self.kind]

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that the papers give the model."""
        return TOOLS[self.kind]

    @property
    def env_id(self) -> str:
        """The environment that has these tools."""
        return str(ENVS[self.kind]["id"])

    def usual_keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """How the benchmark is asked where the configuration does not say: env and its tools with
        the calls that the papers allow, the answer alone as reward, and the prompt.

        `given` are the keys that stand above. Of an environment or grader of another kind none of
        its keys are given here, since they would not be read.
        """
        names = self.tools
        env: Mapping[str, Any] = given.get("env") or {}
        grader: Mapping[str, Any] = given.get("grader") or {}
        keys: dict[str, Any] = {"prompt": {"template": self.preset}, "grader": {}}
        if env.get("id", self.env_id) == self.env_id:
            tools = [{"name": name, "max_calls": MAX_CALLS[name]} for name in names]
            num_calls = sum(MAX_CALLS[name] for name in names)
            keys["env"] = {**ENVS[self.kind], "tools": tools}
            keys["limits"] = {
                "max_tool_calls": num_calls,
                "max_turns": num_calls + SPARE_TURNS,
                "on_limit": "result",
            }
        if not grader.get("path") and grader.get("kind") != "custom":
            keys["grader"] = {"reward": "answer"}
            if not grader.get("judge"):
                keys["grader"]["kind"] = "layered"
        return keys

    @property
    def how_to_get(self) -> str:
        """One sentence on where the file comes from."""
        source = self.source
        note = f"; {source.note}" if source.note else ""
        return (
            f"{self.title} is published at huggingface.co/datasets/{source.hub} ({source.part}; "
            f"{source.licence}), columns {', '.join(self.published)}: "
            f"`hf download {source.hub} --repo-type dataset --local-dir DIR`{note}"
        )


NUM_MATH, NUM_QA = 500, 200  # questions of a set that the papers' code asks, the first ones
COLLECTION = "evaluation/data of github.com/RUC-NLPIR/ARPO holds the papers' questions"
_MATH = ("problem", "solution", "answer")

SPECS = (
    Benchmark(
        name="aime24",
        title="AIME 2024",
        kind="math",
        metric="math",
        source=Source("HuggingFaceH4/aime_2024", "split train", "no licence stated", COLLECTION),
        published=("id", *_MATH, "url", "year"),
        also=("aime2024",),
    ),
    Benchmark(
        name="aime25",
        title="AIME 2025",
        kind="math",
        metric="math",
        source=Source("math-ai/aime25", "split test", "see its page", COLLECTION),
        published=("id", "problem", "answer"),
        also=("aime2025",),
    ),
    Benchmark(
        name="math500",
        title="MATH-500",
        kind="math",
        metric="math",
        source=Source("HuggingFaceH4/MATH-500", "split test", "see its page", COLLECTION),
        published=(*_MATH, "subject", "level", "unique_id"),
        num_questions=NUM_MATH,
        group_by={"level": "level", "subject": "subject"},
    ),
    Benchmark(
        name="gsm8k",
        title="GSM8K",
        kind="math",
        metric="math",
        source=Source("openai/gsm8k", "configuration main, split test", "MIT", COLLECTION),
        published=("question", "answer"),
        num_questions=NUM_MATH,
    ),
    Benchmark(
        name="math",
        title="MATH",
        kind="math",
        metric="math",
        source=Source("EleutherAI/hendrycks_math", "split test of all subjects", "MIT"),
        published=("problem", "level", "type", "solution"),
        num_questions=NUM_MATH,
        group_by={"level": "level", "subject": "type"},
        solution="solution",
        also=("hendrycks_math",),
    ),
    Benchmark(
        name="webwalker",
        title="WebWalkerQA",
        kind="deep_search",
        metric="judge",
        source=Source("callanwu/WebWalkerQA", "split main", "Apache-2.0", COLLECTION),
        published=("question", "answer", "root_url", "info"),
        num_questions=NUM_QA,
        group_by={
            "difficulty": "info.difficulty_level",
            "language": "info.lang",
            "hop": "info.hop",
        },
        also=("webwalkerqa",),
    ),
    Benchmark(
        name="hotpotqa",
        title="HotpotQA",
        kind="qa",
        metric="f1",
        source=Source("hotpotqa/hotpot_qa", "split validation", "CC BY-SA 4.0", COLLECTION),
        published=("id", "question", "answer", "type", "level", "supporting_facts", "context"),
        num_questions=NUM_QA,
        group_by={"type": "type", "level": "level"},
    ),
    Benchmark(
        name="2wiki",
        title="2WikiMultihopQA",
        kind="qa",
        metric="f1",
        source=Source("xanhho/2WikiMultihopQA", "dev", "Apache-2.0", COLLECTION),
        published=("id", "question", "answer", "type", "context", "evidences"),
        num_questions=NUM_QA,
        group_by={"type": "type"},
        also=("2wikimultihopqa", "2wikimqa"),
    ),
    Benchmark(
        name="bamboogle",
        title="Bamboogle",
        kind="qa",
        metric="f1",
        source=Source("chiayewken/bamboogle", "split test", "see its page", COLLECTION),
        published=("Question", "Answer"),
    ),
    Benchmark(
        name="musique",
        title="MuSiQue",
        kind="qa",
        metric="f1",
        source=Source("dgslibisey/MuSiQue", "musique_ans_v1.0_dev", "CC BY 4.0", COLLECTION),
        published=("id", "question", "answer", "answer_aliases", "answerable", "paragraphs"),
        num_questions=NUM_QA,
        aliases="answer_aliases",
    ),
    Benchmark(
        name="SimpleQA",
        title="SimpleQA",
        kind="qa",
        metric="judge",
        source=Source("basicv8vc/SimpleQA", "split test", "MIT", COLLECTION),
        published=("metadata", "problem", "answer"),
        num_questions=500,
        group_by={"topic": "metadata.topic", "answer_type": "metadata.answer_type"},
        literal="metadata",
    ),
    Benchmark(
        name="hle",
        title="Humanity's Last Exam",
        kind="deep_search",
        metric="judge",
        source=Source(
            "cais/hle",
            "split test",
            "MIT, gated, not to be republished",
            "accept its terms on that page and log in with `hf auth login` first; questions with "
            "an image are left out",
        ),
        published=("id", "question", "image", "answer", "answer_type", "raw_subject", "category"),
        num_questions=500,
        group_by={"answer_type": "answer_type", "category": "category"},
        attachment="image",
        also=("humanityslastexam",),
    ),
    Benchmark(
        name="gaia",
        title="GAIA",
        kind="deep_search",
        metric="judge",
        source=Source(
            "gaia-benchmark/GAIA",
            "2023/validation/metadata, since the answers of the test split are private",
            "gated, not to be republished",
            "accept its terms on that page and log in with `hf auth login` first; questions with "
            "a file are left out, which leaves 127 of 165, of which the papers use 103",
        ),
        published=("task_id", "Question", "Level", "Final answer", "file_name"),
        group_by={"level": "Level"},
        attachment="file_name",
        private="?",
    ),
    Benchmark(
        name="xbench",
        title="xBench DeepSearch",
        kind="deep_search",
        metric="judge",
        source=Source(
            "xbench/DeepSearch",
            "split train",
            "encrypted, not to be published in plain text",
            "give the file as it is: it is decoded in memory",
        ),
        published=("id", "prompt", "answer", "reference_steps", "canary"),
        encrypted=True,
        prompt="chinese",
        also=("xbenchdeepsearch", "deepsearch"),
    ),
)
