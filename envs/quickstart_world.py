"""The made-up world of the quick start: facts, and questions that need tools.

Four kinds of question. None can be answered from the question alone: the products are too long
for the head of a tiny model, and facts stand only in the knowledge base.

    calc  What is 83 * 57 + 46?                                  python
    cost  How much do 57 shares of Zorvex Labs cost?             search, python
    hop   In which city was the founder of Zorvex Labs born?     search, search
    age   How old was the founder of Zorvex Labs in 1987?        search, search, python

Training, development and held-out questions speak of disjoint companies and founders and of
disjoint calculations.

Everything is deterministic in the `random.Random` or seed that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from random import Random

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

# How many companies (each with its own founder) every set of questions speaks of, and how many
# questions of each kind it holds; "hop" is the scarcest kind, with two questions a company.
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
class Question:
    """A question with its answer and the facts that lead to it."""

    kind: str
    question: str
    answer: str
    facts: tuple[Fact, ...]
    expression: str = ""
    decoy: tuple[Fact, ...] = ()  # what a careless look-up finds instead of the last fact

    def row(self) -> dict[str, str]:
        return {"question": self.question, "answer": self.answer, "kind": self.kind}


@dataclass(frozen=True, slots=True)
class World:
    """A knowledge base and three disjoint sets of questions about it."""

    facts: tuple[Fact, ...]
    questions: dict[str, tuple[Question, ...]]

    def documents(self) -> list[dict[str, str]]:
        return [fact.document() for fact in self.facts]

    def reserved(self) -> frozenset[str]:
        """What demonstrations must not show: facts, calculations, dev and held-out questions."""
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


def ask(rng: Random, kind: str, facts: list[Fact]) -> Question:
    """A question of this kind about the company and the founder of `facts`."""
    founder, price, birthplace, home, birthyear = facts
    company, count = founder.entity, _factor(rng)
    if kind == "hop":
        fact, decoy = rng.sample((birthplace, home), 2)
        born = f"In which city was the founder of {company} born?"
        lives = f"In which city does the founder of {company} live?"
        text = born if fact is birthplace else lives
        return Question(kind, text, fact.value, (founder, fact), "", (decoy,))
    if kind == "age":
        year = str(rng.randint(1965, 1999))
        expression = f"{year} - {birthyear.value}"
        text = f"How old was the founder of {company} in {year}?"
        return Question(kind, text, calculate(expression), (founder, birthyear), expression)
    if kind == "cost":
        expression = f"{price.value} * {count}"
        text = f"How much do {count} shares of {company} cost?"
        return Question(kind, text, calculate(expression), (price,), expression)
    expression = f"{_factor(rng)} * {count} + {rng.randint(10, 98)}"
    return Question(kind, f"What is {expression}?", calculate(expression), (), expression)


def calculate(expression: str) -> str:
    """What the Python tool prints for sums, differences and products of integers."""
    terms = expression.replace(" - ", " + -").split(" + ")
    return str(sum(prod(int(factor) for factor in term.split(" * ")) for term in terms))


def make_world(seed: int) -> World:
    """The knowledge base and the training, dev and held-out questions of one seed."""
    rng = Random(f"world {seed}")
    companies = rng.sample(COMPANIES, len(COMPANIES))
    people = rng.sample(PEOPLE, len(PEOPLE))
    pairs = iter(zip(companies, people, strict=True))
    facts: list[Fact] = []
    questions: dict[str, tuple[Question, ...]] = {}
    asked: set[str] = set()
    for name, size in COMPANIES_IN.items():
        about = [facts_about(rng, *next(pairs)) for _ in range(size)]
        facts += [fact for group in about for fact in group]
        rows: list[Question] = []
        for kind in KINDS:
            end = len(rows) + QUESTIONS_IN[name]
            while len(rows) < end:
                question = ask(rng, kind, rng.choice(about))
                if question.question not in asked:
                    asked.add(question.question)
                    rows.append(question)
        rng.shuffle(rows)
        questions[name] = tuple(rows)
    return World(tuple(sorted(facts, key=lambda fact: fact.text)), questions)


def vocabulary() -> list[str]:
    """Every word that names are made of, as it follows the text before it."""
    first = [*COMPANY_WORDS[0], *PEOPLE_WORDS[0], *CITIES]
    return first + [f" {word}" for word in (*COMPANY_WORDS[1], *PEOPLE_WORDS[1])]
