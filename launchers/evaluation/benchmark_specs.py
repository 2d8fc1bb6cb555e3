"""The benchmarks that are known by name: where each is published, what its rows hold, and how the
papers ask and score it (ARPO, arXiv:2507.19849, section 4; Tool-Star, arXiv:2505.16410, section 4).

Lines of `published` are the columns of the published file; the reduced files that come with ARPO's
evaluation code (question, answer) are read as well.
"""

from __future__ import annotations

from launchers.evaluation.benchmark_types import Benchmark, Source

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
