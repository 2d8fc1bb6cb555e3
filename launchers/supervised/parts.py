"""What supervised runs begin with: set-up, model, renderer, learner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from agentenv.errors import DataError
from agentenv.prompt import load_instruction
from agentenv.renderer import read_eos_ids
from launchers.assembly import load_function, load_tokenizer, make_renderer, read_model_config
from launchers.checkpoints import find_checkpoint
from launchers.rundir import RunDirectory
from launchers.supervised.chat_config import ChatDataConfig
from launchers.supervised.chat_encoding import ChatEncoder
from launchers.supervised.dpo_config import DPORunConfig
from launchers.supervised.sft_config import SFTRunConfig
from launchers.view import View
from learners.deepspeed_learner import DeepSpeedLearner
from learners.encoding import EncodedTree
from learners.grpo import GRPO
from learners.learner import Learner, LearnerConfig, Score

SCORED_AT_ONCE = 64  # sequences


@dataclass
class Start:
    """`model` is where the weights begin, also of a resumed run, whose `checkpoint` is loaded
    over them: adapters are of that model."""

    run: RunDirectory
    model: Path
    encoder: ChatEncoder
    checkpoint: Path | None

    async def learner(
        self, config: LearnerConfig, seed: int, stack: AsyncExitStack
    ) -> DeepSpeedLearner:
        """The learner, with the weights of the model; `stack` closes it."""
        learner = await DeepSpeedLearner.start(
            config, GRPO(), self.model, self.run.path / "learner.log", seed=seed
        )
        stack.push_async_callback(learner.close)
        return learner


async def begin(
    config: SFTRunConfig | DPORunConfig, run: RunDirectory, view: View, resume: str
) -> Start:
    """Set-up and checks. Raises ConfigError or DataError for the user's mistakes."""
    checkpoint = run.checkpoints.to_resume(resume) if resume else None
    if config.run.setup and checkpoint is None:
        setup = load_function(config.run.setup, "run.setup")
        told = await asyncio.to_thread(setup, run.path, config.run.seed)
        if isinstance(told, str):
            view.say(told)
    model = find_checkpoint(run.resolve(config.model.path))
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    encoder = ChatEncoder(
        make_renderer(config.renderer, config.prompt, tokenizer, model),
        read_eos_ids(model, tokenizer),
        load_instruction(config.prompt, run.resolve),
        compat=config.data.compat == "reference",
    )
    return Start(run, model, encoder, checkpoint)


def check_lengths(lengths: Sequence[int], start: Start, data: ChatDataConfig) -> None:
    """Refuse sequences that the model has no positions for."""
    context = read_model_config(start.model).get("max_position_embeddings")
    if context and max(lengths) > context:
        raise DataError(
            f"data.max_length = {data.max_length}: a sequence has {max(lengths)} tokens, "
            f"and {start.model} was made for {context}; set data.max_length={context} to cut it"
        )


async def scored_in_parts(
    learner: Learner, sequences: Iterable[EncodedTree], *, adapters: bool = True
) -> AsyncIterator[list[Score]]:
    """Scores of many sequences, some at once."""
    rest = iter(sequences)
    while part := list(islice(rest, SCORED_AT_ONCE)):
        yield await learner.score(part, adapters=adapters)
