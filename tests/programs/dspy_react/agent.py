"""ReAct of DSPy."""

import sys

import dspy


def price(item: str) -> str:
    """The price of an item."""
    return f"{len(item)} for {item}"


dspy.configure(lm=dspy.LM("openai/policy", cache=False))
print(dspy.ReAct("question -> answer", tools=[price])(question=sys.argv[1]).answer)
