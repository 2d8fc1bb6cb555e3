"""The parts of a training run that depend on provinces: demonstrations of its cold start, an engine
for evaluations, and the place of new weights."""

from __future__ import annotations

from functools import partial

from agentenv.assembly.checks.memory import WeightPassage, find_passage, stored_bytes
from agentenv.assembly.parts.assembly import TRAINED, once
from agentenv.assembly.run.checkpoints import COLD_START
from agentenv.assembly.serving.gpus import trains_on_gpu
from agentenv.base.disk_errors import SHARED_MEMORY
from agentenv.base.offload import in_thread
from agentenv.contract.env import tally
from agentenv.training.loop.parts import LoopAssembly
from agentenv.training.supervised.data import Demonstrations, check_stages, load_demonstrations


class TrainingAssembly(LoopAssembly):
    """All parts of one training run, with the demonstrations of its cold start."""

    @once
    async def demonstrations(self) -> tuple[Demonstrations, Demonstrations] | None:
        sft = self.config.sft
        resumed = self.checkpoint
        if sft is None or not (resumed is None or resumed.name.startswith(COLD_START)):
            return None
        renderer = (await self.renderers())[TRAINED]
        messages, info = (await self.episodes())[TRAINED]
        tools = list(info.get("tools", ()))
        system = next((one.content for one in messages if one.role == "system"), "")
        most = self.config.limits.max_tool_result_tokens
        trained, gate = [
            await in_thread(load_demonstrations, self.resolve(path), renderer, tools, system, most)
            for path in (sft.data, sft.gate)
        ]
        for tool, number in getattr(renderer, "num_results", {}).items():
            if num_cut := tally(f"num_results_cut/{tool}").number:
                self.report(f"sft: {num_cut} of {number} results of {tool} are cut, as in rollouts")
        check_stages(sft, trained)
        return trained, gate

    @once
    async def passage(self) -> WeightPassage:
        """The place of new weights: on one machine, shared memory if it has enough space."""
        config, model = self.config, await self.model()
        chosen = config.resources.weights_dir
        place = self.resolve(chosen).expanduser() if chosen else None
        path = self.resolve(config.model.path) if model is None else model
        learner = config.learner.resolved(on_gpu=trains_on_gpu(config))
        size = stored_bytes(path, learner, config.engine)
        find = partial(find_passage, is_wide=self.is_wide, memory=SHARED_MEMORY)
        return await in_thread(find, self.folder, size, chosen=place)
