"""A typical package for verifiers: a customer asks where a parcel is, the agent names the parcel to
the tracker, and passes the answer on."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["ParcelsEnv", "ParcelsTaskset"]

NAMES = """
Zorvex Veltron Quandex Trilab Nexor Balmat Dynix Fexpath Gralrom Hovsys Jintek Kolvond Lumwick
Myrgild Paxzan Synyard
"""
PLACES = NAMES.split()


class ParcelData(vf.TaskData):
    parcels: dict[str, str]
    answer: str


class ParcelTask(vf.Task[ParcelData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        found = re.search(r"<answer>(.*?)</answer>", trace.last_reply or "")
        return float(found is not None and found[1].strip() == self.data.answer)

    @vf.metric
    async def tracked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 1)


class ParcelsConfig(vf.TasksetConfig):
    seed: int = 0
    number: int = 1000


class ParcelsTaskset(vf.Taskset[ParcelTask, ParcelsConfig]):
    def load(self) -> Iterator[ParcelTask]:
        rng = random.Random(self.config.seed)
        for _ in range(self.config.number):
            parcels = {str(n): rng.choice(PLACES) for n in rng.sample(range(1000, 10_000), 6)}
            number = rng.choice(list(parcels))
            prompt = f"Where is my parcel {number}?"
            data = ParcelData(prompt=prompt, parcels=parcels, answer=parcels[number])
            yield ParcelTask(data, self.config.task)


class ParcelsEnv(vf.SingleAgentEnv):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            trace = await talk.turn()
            while not trace.terminated and "<answer>" not in trace.last_reply:
                known = [one for one in task.data.parcels if one in trace.last_reply]
                place = task.data.parcels[known[0]] if known else "no place that I know of"
                trace = await talk.turn(f"It is in {place}.")
