"""An answer and its critics, whose mean score decides whether it is written again."""

import sys

from openai import OpenAI

client = OpenAI()


def ask(messages):
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message


talk = [{"role": "user", "content": sys.argv[1]}]
talk.append(ask(talk).model_dump(exclude_none=True))
text = "You check the {}: score the answer from 0 to 9."
asked = [{"role": "user", "content": text.format(one)} for one in ("spelling", "facts", "style")]
mean = sum(int(ask([*talk, one]).content.split()[-1]) for one in asked) / len(asked)
talk.append({"role": "user", "content": f"Your score is {mean:.2f}. Once more."})
print(ask(talk).content)
