"""A tree of thoughts: each of the best two is continued twice, at the same time."""

import asyncio
import sys

from openai import AsyncOpenAI

client = AsyncOpenAI()


def user(text):
    return {"role": "user", "content": text}


async def ask(messages):
    chat = await client.chat.completions.create(model="policy", messages=messages)
    return chat.choices[0].message.model_dump(exclude_none=True)


async def grow(path):
    path = [*path, await ask(path)]
    score = await ask([*path, user("Score this thought from 0 to 9.")])
    return int(score["content"].split()[-1]), path


async def search(question):
    best = [[user(question)]]
    for _ in range(2):
        found = await asyncio.gather(*(grow(path) for path in best for _ in range(2)))
        found.sort(key=lambda one: one[0])
        best = [[*path, user("Go on.")] for _, path in found[-2:]]
    print((await ask(best[-1]))["content"])


asyncio.run(search(sys.argv[1]))
