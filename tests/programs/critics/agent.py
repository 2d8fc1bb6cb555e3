"""An answer and its critics, whose mean score decides whether it is written again."""

import sys

from openai import OpenAI

client = OpenAI()


def ask(messages):
    chat = client.chat.completions.create(model="policy", messages=messages)
    return chat.choices[0].message


talk = [{"role": "user", "content": sys.argv[1]}]
talk.append(ask(talk).model_dump(exclude_none=True))
notes = []
for role in ("spelling", "facts", "style"):
    asked = {"role": "user", "content": f"You check the {role}: score the answer from 0 to 9."}
    notes.append(ask([*talk, asked]).content)
mean = sum(int(note.split()[-1]) for note in notes) / len(notes)
talk.append({"role": "user", "content": f"Your score is {mean:.2f}. Once more."})
print(ask(talk).content)
