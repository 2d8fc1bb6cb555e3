"""A vote: the most frequent of five answers, which is then checked."""

import sys
from collections import Counter

from openai import OpenAI

client = OpenAI()


def ask(messages):
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message


question = [{"role": "user", "content": sys.argv[1]}]
answers = [ask(question) for _ in range(5)]
((best, _),) = Counter(one.content for one in answers).most_common(1)
chosen = next(one for one in answers if one.content == best)
check = [*question, chosen.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
print(ask(check).content)
