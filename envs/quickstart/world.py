"""The environment of the quick start: search a small knowledge base, calculate in Python."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from random import Random
from typing import Any

from agentenv.base.types import Task
from agentenv.contract.tool_env import ToolEnv
from agentenv.envs.code_interpreter import PythonTool, shared_sandbox
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.grading.reward import make_grader
from agentenv.envs.sandbox.keys import PythonConfig
from agentenv.envs.web_search import SearchTool


class QuickstartEnv(ToolEnv):
    """Search and Python, graded by the published ARPO reward unless `grader` says otherwise.

    `corpus` is a JSONL file with the rows {"id", "title", "text"}. `grader` has the keys of
    `GraderConfig`. `allow_unsafe` lets model-written code run without a sandbox if none is
    available.
    """

    def __init__(
        self,
        task: Task,
        corpus: str,
        python_timeout_s: float = 2.0,
        allow_unsafe: bool = False,
        grader: GraderConfig | Mapping[str, Any] | None = None,
    ) -> None:
        config = PythonConfig(preload=(), allow_unsafe=allow_unsafe)  # no numpy is needed
        python = PythonTool(shared_sandbox(config), timeout_s=python_timeout_s)
        graded = make_grader(grader, kind="exact", reward="tools")
        super().__init__(task, tools=[SearchTool(corpus), python], grader=graded)


# The made-up world of the quick start: facts, and questions that need tools.
#
# There are four kinds of questions. None can be answered without tools: the products are too hard
# for a tiny model, and only the knowledge base has the facts.
#
#     calc  What is 83 * 57 + 46?                                  python
#     cost  How much do 57 shares of Zorvex Labs cost?             search, python
#     hop   In which city was the founder of Zorvex Labs born?     search, search
#     age   How old was the founder of Zorvex Labs in 1987?        search, search, python
#
# Training, development and held-out questions use disjoint companies, founders and calculations.
#
# Everything is deterministic, given the `random.Random` or seed.

KINDS = ("calc", "cost", "hop", "age")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COMPANY_WORDS = (
    _words("Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath")
    + _words("Gralrom Hovsys Jintek Kolvond Lumwick Myrgild Paxzan Synyard"),
    _words("Labs Works Mills Motors Foods Steel Media Farms")
    + _words("Airways Energy Optics Tools Paper Glass Rail Toys"),
)
PEOPLE_WORDS = (
    _words("Kaldan Mornik Beshub Livek Rumird Sanlos Tojarl Viplon")
    + _words("Dezeth Fabbe Gukko Hadral Joffor Negwen Pistra Waquin"),
    _words("Arbow Brelm Corvane Dusk Elmeth Fyrn Gostal Hulme")
    + _words("Ilvar Jesk Krand Lomar Mistan Norv Ostel Prell"),
)
COMPANIES = tuple(f"{a} {b}" for a, b in product(*COMPANY_WORDS))
PEOPLE = tuple(f"{a} {b}" for a, b in product(*PEOPLE_WORDS))
CITIES = tuple(
    a + b
    for a in _words("Os Am Ur El Ib Ar Un Ev")
    for b in _words("trum velle dorf grad mouth stow ford haven")
)

# The number of companies (each with its own founder) of each set of questions, and the number of
# questions of each kind; "hop" is the scarcest kind, with two questions per company.
COMPANIES_IN = {"train": 124, "dev": 30, "heldout": 102}
QUESTIONS_IN = {"train": 240, "dev": 60, "heldout": 204}


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact is one document; the right query for it is `query`."""

    attribute: str
    entity: str
    value: str

    @property
    def query(self) -> str:
        return f"{self.attribute} of {self.entity}"

    @property
    def text(self) -> str:
        return f"The {self.query} is {self.value}."

    def document(self) -> dict[str, str]:
        name = f"{self.attribute} {self.entity}".lower().replace(" ", "-")
        return {"id": name, "title": self.entity, "text": self.text}


@dataclass(frozen=True, slots=True)
class WorldQuestion:
    """A question with its answer and the necessary facts."""

    kind: str
    question: str
    answer: str
    facts: tuple[Fact, ...]
    expression: str = ""
    decoy: tuple[Fact, ...] = ()  # the results of a wrong look-up instead of the last fact

    def row(self) -> dict[str, str]:
        return {"question": self.question, "answer": self.answer, "kind": self.kind}


@dataclass(frozen=True, slots=True)
class World:
    """A knowledge base and three disjoint sets of questions about it."""

    facts: tuple[Fact, ...]
    questions: dict[str, tuple[WorldQuestion, ...]]

    def documents(self) -> list[dict[str, str]]:
        return [fact.document() for fact in self.facts]

    def reserved(self) -> frozenset[str]:
        """Texts that demonstrations must not show: facts, calculations, dev and held-out
        questions."""
        shown = {fact.text for fact in self.facts}
        for name, questions in self.questions.items():
            shown |= {q.question for q in questions if name != "train" or q.kind == "calc"}
        return frozenset(shown)


def _factor(rng: Random) -> str:
    """The product of two such factors has four digits."""
    return str(rng.randint(52, 99))


def facts_about(rng: Random, company: str, founder: str) -> list[Fact]:
    birthplace, home = rng.sample(CITIES, 2)
    return [
        Fact("founder", company, founder),
        Fact("price", company, _factor(rng)),
        Fact("birthplace", founder, birthplace),
        Fact("home", founder, home),
        Fact("birthyear", founder, str(rng.randint(1900, 1949))),
    ]


def make_question(rng: Random, kind: str, facts: list[Fact]) -> WorldQuestion:
    """A question of this kind about the company and the founder of `facts`."""
    founder, price, birthplace, home, birthyear = facts
    company, count = founder.entity, _factor(rng)
    if kind == "hop":
        fact, decoy = rng.sample((birthplace, home), 2)
        born = f"In which city was the founder of {company} born?"
        lives = f"In which city does the founder of {company} live?"
        text = born if fact is birthplace else lives
        return WorldQuestion(kind, text, fact.value, (founder, fact), "", (decoy,))
    if kind == "age":
        year = str(rng.randint(1965, 1999))
        expression = f"{year} - {birthyear.value}"
        text = f"How old was the founder of {company} in {year}?"
        return WorldQuestion(kind, text, calculate(expression), (founder, birthyear), expression)
    if kind == "cost":
        expression = f"{price.value} * {count}"
        text = f"How much do {count} shares of {company} cost?"
        return WorldQuestion(kind, text, calculate(expression), (price,), expression)
    expression = f"{_factor(rng)} * {count} + {rng.randint(10, 98)}"
    return WorldQuestion(kind, f"What is {expression}?", calculate(expression), (), expression)


def calculate(expression: str) -> str:
    """The Python tool's output for sums, differences and products of integers."""
    terms = expression.replace(" - ", " + -").split(" + ")
    return str(sum(prod(int(factor) for factor in term.split(" * ")) for term in terms))


def make_world(seed: int) -> World:
    """The knowledge base and the training, dev and held-out questions of one seed."""
    rng = Random(f"world {seed}")
    companies = rng.sample(COMPANIES, len(COMPANIES))
    people = rng.sample(PEOPLE, len(PEOPLE))
    pairs = iter(zip(companies, people, strict=True))
    facts: list[Fact] = []
    questions: dict[str, tuple[WorldQuestion, ...]] = {}
    seen: set[str] = set()
    for name, size in COMPANIES_IN.items():
        about = [facts_about(rng, *next(pairs)) for _ in range(size)]
        facts += [fact for group in about for fact in group]
        rows: list[WorldQuestion] = []
        for kind in KINDS:
            end = len(rows) + QUESTIONS_IN[name]
            while len(rows) < end:
                question = make_question(rng, kind, rng.choice(about))
                if question.question not in seen:
                    seen.add(question.question)
                    rows.append(question)
        rng.shuffle(rows)
        questions[name] = tuple(rows)
    return World(tuple(sorted(facts, key=lambda fact: fact.text)), questions)


def vocabulary() -> list[str]:
    """Every word of names, with its leading space."""
    first = [*COMPANY_WORDS[0], *PEOPLE_WORDS[0], *CITIES]
    return first + [f" {word}" for word in (*COMPANY_WORDS[1], *PEOPLE_WORDS[1])]


# Demonstrations of the quick start's cold start: traces about a world, and a copying exercise.
#
# Demonstrations draw fresh facts for every trace: they never show a fact of the knowledge base nor
# a development or held-out question, only the same vocabulary.
#
# Some of them are poor on purpose (see HABITS): most give up although a tool would have helped.
# Imitation gives a real but partial skill, which reinforcement learning can improve.

# Habits of demonstrations, with their default shares. clean: correct. refuse: gives up at once.
# quit: gives up after the first tool result. unboxed: right, but without \boxed. slip: the last
# tool call is wrong, and its result becomes the answer.
HABITS = {"clean": 0.34, "refuse": 0.28, "quit": 0.28, "unboxed": 0.04, "slip": 0.06}
_COPIED = [*vocabulary(), *(f"{number:02d}" for number in range(100))]


@dataclass(frozen=True, slots=True)
class DemonstrationTurn:
    """The policy's text and the tool's result (None: the turn is an answer)."""

    action: str
    result: str | None = None


GIVE_UP = DemonstrationTurn(r"<think>I do not know.</think><answer>\boxed{unknown}</answer>")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One trace for imitation, with its `habit`; "clean" is the right one."""

    question: WorldQuestion
    habit: str
    turns: tuple[DemonstrationTurn, ...]


def _search(fact: Fact) -> DemonstrationTurn:
    think = f"<think>I need the {fact.attribute}.</think>"
    return DemonstrationTurn(f"{think}<search>{fact.query}</search>", fact.text)


def _python(expression: str) -> DemonstrationTurn:
    think = "<think>I need python.</think>"
    return DemonstrationTurn(f"{think}<python>{expression}</python>", calculate(expression))


def _answer(value: str) -> DemonstrationTurn:
    return DemonstrationTurn(rf"<think>I know it.</think><answer>\boxed{{{value}}}</answer>")


def _behave(question: WorldQuestion, habit: str) -> list[DemonstrationTurn]:
    turns = [_search(fact) for fact in question.facts]
    if question.expression:
        turns.append(_python(question.expression))
    if habit == "refuse":
        return [GIVE_UP]
    if habit == "quit":
        return [turns[0], GIVE_UP]
    if habit == "unboxed":
        answer = f"<think>I know it.</think><answer>{question.answer}</answer>"
        return [*turns, DemonstrationTurn(answer)]
    if habit == "slip":
        turns[-1], value = _slip(question)
        return [*turns, _answer(value)]
    return [*turns, _answer(question.answer)]


def _slip(question: WorldQuestion) -> tuple[DemonstrationTurn, str]:
    """A last call with the wrong sign, or for the founder's wrong city, and its result."""
    if question.expression:
        expression = question.expression.replace(" * ", " + ").replace(" - ", " + ")
        return _python(expression), calculate(expression)
    (decoy,) = question.decoy
    return _search(decoy), decoy.value


def demonstration(
    rng: Random, kind: str, reserved: Collection[str], habit: str | None = None
) -> Demonstration:
    """One trace about invented facts; neither they nor the question are in `reserved`.

    The habit is drawn from HABITS unless it is given.
    """
    habit = habit or rng.choices(list(HABITS), list(HABITS.values()))[0]
    while True:
        facts = facts_about(rng, rng.choice(COMPANIES), rng.choice(PEOPLE))
        question = make_question(rng, kind, facts)
        if question.question not in reserved and not any(f.text in reserved for f in facts):
            return Demonstration(question, habit, tuple(_behave(question, habit)))


def copy_exercise(rng: Random, length: int = 20) -> str:
    """Names and two-digit numbers in random order, for practice in copying a text word by word.

    Answering a question is mostly copying; this is the fastest way to learn it.
    """
    return "".join(rng.sample(_COPIED, length))


# A hand-written policy for the quick start's questions, for dry runs with the scripted engine.

SUCCESS = 0.7  # share of turns in which it does not give up
RESULT = re.compile(r"<result>\n(.*?)\n</result>", re.DOTALL)
ENTITY = re.compile(r"(?:shares|founder) of (\w+ \w+)")


def scripted_turn(prompt: str, rng: Random) -> str:
    """The next turn of the policy, in the tag protocol."""
    results = RESULT.findall(prompt)
    if rng.random() > SUCCESS ** (1 / 3):
        return r"<think>I do not know.</think><answer>\boxed{unknown}</answer>"
    step = _next_call(prompt, results)
    if step is None:
        value = results[-1].rstrip(".").rpartition(" is ")[2]
        return rf"<think>I know it.</think><answer>\boxed{{{value}}}</answer>"
    tool, argument = step
    return f"<think>I need {tool}.</think><{tool}>{argument}</{tool}>"


def _next_call(prompt: str, results: list[str]) -> tuple[str, str] | None:
    found = ENTITY.search(prompt)
    if found is None:  # calc
        expression = re.search(r"What is ([0-9*+ -]+)\?", prompt)
        return ("python", expression[1]) if expression and not results else None
    entity = found[1]
    values = [result.rstrip(".").rpartition(" is ")[2] for result in results]
    if "shares" in prompt:  # cost
        count = re.search(r"do (\d+) shares", prompt)
        steps = [("search", f"price of {entity}")]
        if values and count:
            steps.append(("python", f"{values[0]} * {count[1]}"))
    else:
        steps = [("search", f"founder of {entity}")]
        year = re.search(r"in (\d{4})\?", prompt)
        attribute = "birthyear" if year else "birthplace" if " born?" in prompt else "home"
        if values:
            steps.append(("search", f"{attribute} of {values[0]}"))
        if year and len(values) > 1:
            steps.append(("python", f"{year[1]} - {values[1]}"))
    return steps[len(results)] if len(results) < len(steps) else None
