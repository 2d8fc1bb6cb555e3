"""A supervised run with any objective: parts, order of rows, steps, checkpoints, curves.

Each epoch has its own order of rows, determined by the seed. Step n takes the next rows of that
order, so a resumed run continues bit for bit with the same rows.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.keys.supervised import DPOLoopConfig, SupervisedRunConfig
from agentenv.assembly.parts.assembly import Assembly, once
from agentenv.assembly.reports.pictures import panels, png, read_metrics
from agentenv.assembly.run.checkpoints import Saver, load_state
from agentenv.assembly.run.kept import checkpoint_to_resume, keep_best, resume_from
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.deadline import uncancelled
from agentenv.base.disk import write_whole
from agentenv.base.offload import in_thread
from agentenv.data.dataset import shuffled
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.keys import Metrics, Score
from agentenv.learners.optimizer import lr_factor
from agentenv.learners.ranks import dpo
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.trees.encoded_tree import EncodedTree
from agentenv.text.prompt import load_instruction
from agentenv.text.renderer import Renderer
from agentenv.training.supervised.data import Loaded, RowLoader
from agentenv.training.supervised.encoding import ChatEncoder

SMOOTHING = 0.9  # of the plotted running mean


def plot_losses(run: Path, name: str, keys: tuple[str, ...]) -> None:
    """Plot loss.png, with a panel per key: each step, their running mean, and the held-out rows."""
    rows = read_metrics(run)
    figure, places = panels(len(keys), (5.5 * len(keys), 4.2), run.name)
    for axes, key in zip(places, keys, strict=True):
        trained, held_out = (
            np.array([(row["step"], row[full]) for row in rows if full in row]).reshape(-1, 2).T
            for full in (f"{name}/{key}", f"eval/{key}")
        )
        axes.plot(*trained, alpha=0.35, label="steps")
        axes.plot(trained[0], smoothed(trained[1].tolist()), color="C0", label="running mean")
        if held_out.size:
            axes.plot(*held_out, "o-", color="C1", markersize=4, label="held out")
        axes.set(title=key, xlabel="step")
        axes.locator_params(axis="x", integer=True)
    write_whole(run / "loss.png", png(figure))


def smoothed(values: list[float]) -> list[float]:
    """Exponential running mean, with bias correction."""
    from scipy.signal import lfilter  # takes half a second

    means = lfilter([1 - SMOOTHING], [1, -SMOOTHING], values)
    found: list[float] = (means / (1 - SMOOTHING ** np.arange(1, len(values) + 1))).tolist()
    return found


class SupervisedAssembly(Assembly[SupervisedRunConfig]):
    """Builds the parts of one run of agentenv sft or agentenv dpo."""

    @once
    async def model(self) -> Path:
        """The directory of the initial weights. A resumed run needs it too: its checkpoint is
        loaded over them, and adapters belong to that model."""
        return await self.own_model(self.config.model.path)

    @once
    async def renderers(self) -> Mapping[str, Renderer]:
        return {"": await self.renderer(self.config.prompt)}

    @once
    async def encoder(self) -> ChatEncoder:
        """The encoder of dialogues."""
        compat = self.config.data.compat == "reference"
        instruction = load_instruction(self.config.prompt, self.resolve)
        return ChatEncoder((await self.renderers())[""], instruction, compat=compat)

    @once
    async def rows(self) -> Loaded[Any]:
        """Training and held-out rows: sequences, or preference pairs."""
        loader = RowLoader(self.config, self.resolve, self.report, self.ends)
        return await in_thread(loader.load, await self.encoder())

    @once
    async def learner(self) -> DeepSpeedLearner:
        """The learner with the initial weights; the checkpoint is loaded later."""
        config, model = self.config, await self.model()
        learner = await DeepSpeedLearner.start(
            config.learner, GRPO(), model, self.folder / "learner.log", seed=config.run.seed
        )
        self.stack.push_async_callback(learner.close)
        return learner


class SupervisedState(Struct):
    """The state in a checkpoint, besides the learner's own."""

    step: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    best: float | None = None
    first_eval: Metrics = {}
    last_eval: Metrics = {}
    wall_s: float = 0.0


def rows_of_step(num_rows: int, rows_per_step: int, seed: int, step: int) -> list[int]:
    """Rows of step `step`, counted from 0; the last step of an epoch may have fewer."""
    epoch, place = divmod(step, -(-num_rows // rows_per_step))
    return shuffled(f"{seed}/order/{epoch}", num_rows)[place * rows_per_step :][:rows_per_step]


async def train_supervised(
    kind: type[SupervisedTraining],
    config: SupervisedRunConfig,
    run: RunDirectory,
    view: View,
    resume: str,
) -> None:
    """A whole run of agentenv sft or agentenv dpo, of the class `kind`."""
    checkpoint = checkpoint_to_resume(run.checkpoints, resume) if resume else None
    async with AsyncExitStack() as stack:
        assembly = SupervisedAssembly(config, run.path, stack, view.log, checkpoint)
        await refuse(assembly)
        learner, loaded = await assembly.learner(), await assembly.rows()
        training = kind(config, run, view, learner, loaded.train, loaded.eval, checkpoint)
        await training.run_all()


@dataclass(eq=False)
class SupervisedTraining(ABC):
    """The loop of a run over `rows`; with a checkpoint, it loads the learner's state. `name` is the
    prefix of its metrics, `plotted` are the plotted ones."""

    config: SupervisedRunConfig
    run: RunDirectory
    view: View
    learner: DeepSpeedLearner
    rows: Sequence[Any]
    held_out: Sequence[Any]
    checkpoint: Path | None
    name: ClassVar[str]
    plotted: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        self.loop, self.state = self.config.loop, SupervisedState()
        if self.checkpoint is not None:
            self.state = load_state(self.checkpoint, SupervisedState)
        self.saver = Saver(
            self.config.checkpoint,
            self.run.checkpoints,
            self.learner,
            self.view,
            step=lambda: self.state.step,
            snapshot=lambda: self.state,
        )
        self.num_rows = len(self.rows)
        self.steps_per_epoch = -(-self.num_rows // self.loop.rows_per_step)
        self.num_steps = self.loop.count_steps(self.num_rows)

    @abstractmethod
    async def train_on(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on these rows."""

    @abstractmethod
    async def measure(self) -> Metrics:
        """Metrics of the held-out rows, which exist, including "loss"."""

    async def run_all(self) -> None:
        """Run all steps; any end of the run saves a checkpoint."""
        self._announce()
        if self.checkpoint is not None:
            await self.learner.load(self.checkpoint / "trainer")
        elif not self.state.step:
            await self._measure()
        self.view.begin(self.name, self.num_steps, self.state.step, "the report")
        try:
            async with self.saver.finishing():
                while self.state.step < self.num_steps:
                    with self.view.doing(f"step {self.state.step + 1}"):
                        await uncancelled(self._step())
                    if self.saver.is_due():
                        await self.saver.save()
        finally:
            self.view.end()
        await self.saver.save()
        self._finish()

    def _announce(self) -> None:
        loop = self.loop
        if self.checkpoint is None:
            self.run.forget_metrics_after(-1)  # rows of an interrupted start
            self.run.begin(self.config)
        else:
            resume_from(self.run, self.config, self.state.step, self.view.log)
        self.view.log(
            f"{self.name}: {self.num_rows} rows, {self.num_steps} steps, "
            f"{self.num_steps / self.steps_per_epoch:.2f} epochs; a step takes "
            f"{loop.batch_size} x {loop.gradient_accumulation} = {loop.rows_per_step} rows"
        )

    async def _step(self) -> None:
        """One optimizer step, and a measurement if it is due."""
        state, start = self.state, asyncio.get_running_loop().time()
        scale = lr_factor(self.config.learner, state.step, self.num_steps)
        shape = self.num_rows, self.loop.rows_per_step, self.config.run.seed
        async with self.saver.moving():
            metrics = await self.train_on(rows_of_step(*shape, state.step), scale)
            state.step += 1
            state.num_tokens += int(metrics["num_tokens"])
            state.num_skipped += int(metrics["num_skipped"])
            state.wall_s += asyncio.get_running_loop().time() - start
        row = {
            "step": state.step,
            "epoch": state.step / self.steps_per_epoch,
            "learning_rate": self.config.learner.learning_rate * scale,
            **{f"{self.name}/{name}": value for name, value in metrics.items()},
        }
        await in_thread(self.run.write_metrics, row)
        self.run.monitors.log(row)
        shown = " ".join(f"{key} {metrics[key]:.4f}" for key in self.plotted)
        self.view.log(
            f"step {state.step:>4}/{self.num_steps} {shown} lr {row['learning_rate']:.2e}"
        )
        self.view.advance(state.step)
        last = state.step == self.num_steps
        if last or (self.loop.eval_every and state.step % self.loop.eval_every == 0):
            await self._measure()

    async def _measure(self) -> None:
        if not self.held_out:
            return
        state, start = self.state, asyncio.get_running_loop().time()
        metrics = await self.measure()
        state.wall_s += asyncio.get_running_loop().time() - start
        state.first_eval = state.first_eval or metrics
        state.last_eval = metrics
        row = {"step": state.step, **{f"eval/{name}": metrics[name] for name in metrics}}
        await in_thread(self.run.write_metrics, row)
        self.run.monitors.log(row)
        shown = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.view.log(f"held out after step {state.step}: {shown}")
        is_best = state.best is None or metrics["loss"] < state.best
        if self.config.checkpoint.keep_best and is_best:
            state.best = metrics["loss"]
            if state.step:
                await self.saver.save()
                await in_thread(keep_best, self.run.checkpoints, state.step)

    def _finish(self) -> None:
        state = self.state
        counts = {"num_rows": self.num_rows, "num_steps": state.step}
        counts |= {"num_skipped": state.num_skipped, "num_tokens": state.num_tokens}
        figures = {"before": state.first_eval, "after": state.last_eval}
        summary = {**counts, **figures, "wall_s": round(state.wall_s, 2)}
        self.run.write_json("summary.json", summary)
        plot_losses(self.run.path, self.name, self.plotted)
        self.view.log(
            f"results in {self.run.path}: summary.json, loss.png, metrics.jsonl, "
            f"checkpoints/{self.run.checkpoints.path(state.step).name}"
        )


# Supervised runs: imitation of examples (agentenv sft), and preferences (agentenv
# dpo).

SCORED_AT_ONCE = 64  # sequences


class ImitationTraining(SupervisedTraining):
    """Supervised fine-tuning. A row is an Example; none is padded."""

    name = "sft"
    plotted = ("loss",)

    async def train_on(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over all policy tokens of the rows."""
        return await self.learner.imitate([self.rows[row].encoded() for row in rows], lr_scale)

    async def measure(self) -> Metrics:
        """On the held-out rows: mean negative log-likelihood per token (nats), share of tokens that
        are the most likely, and share of sequences whose tokens all are."""
        count, exact = 0, 0
        sums = np.zeros(2)
        encoded = (example.encoded() for example in self.held_out)
        for score in await score_all(self.learner, encoded):
            count += len(score.logprobs)
            sums += [-sum(score.logprobs), sum(score.matches)]
            exact += all(score.matches)
        return {
            "loss": float(sums[0] / count),
            "token_accuracy": float(sums[1] / count),
            "exact_match": exact / len(self.held_out),
        }


class PreferenceTraining(SupervisedTraining):
    """Preference training. A row is a pair, an EncodedTree."""

    name = "dpo"
    plotted = ("loss", "accuracy", "margin")

    async def run_all(self) -> None:
        """As SupervisedTraining; first adds the log-probs of the reference policy to the pairs: the
        initial policy of the run, whose weights the learner has until it loads a checkpoint."""
        assert isinstance(self.config.loop, DPOLoopConfig)
        self.beta = self.config.loop.beta
        scored = await with_reference_scores(self.learner, [*self.rows, *self.held_out])
        self.rows, self.held_out = scored[: self.num_rows], scored[self.num_rows :]
        await super().run_all()

    async def train_on(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on the mean loss over the pairs."""
        return await self.learner.prefer([self.rows[row] for row in rows], self.beta, lr_scale)

    async def measure(self) -> Metrics:
        """Metrics of the held-out pairs, see `agentenv.learners.ranks.dpo.preference_metrics`."""
        found = await preference_figures(self.learner, self.held_out, self.beta)
        return {name: value for name, value in found.items() if not name.startswith("num_")}


async def score_all(learner: DeepSpeedLearner, sequences: Iterable[EncodedTree]) -> list[Score]:
    """The scores of many sequences, of which some are sent at once."""
    found: list[Score] = []
    rest = iter(sequences)
    while part := list(islice(rest, SCORED_AT_ONCE)):
        found += await learner.score(part)
    return found


async def with_reference_scores(
    learner: DeepSpeedLearner, pairs: Sequence[EncodedTree]
) -> list[EncodedTree]:
    """The pairs with the log-probs of the reference policy, the learner's current weights."""
    scores = await score_all(learner, pairs)
    return [
        dpo.with_reference(pair, score.logprobs) for pair, score in zip(pairs, scores, strict=True)
    ]


async def preference_figures(
    learner: DeepSpeedLearner, pairs: Sequence[EncodedTree], beta: float
) -> Metrics:
    """Metrics of the pairs under the learner's current weights, see
    `agentenv.learners.ranks.dpo.preference_metrics`."""
    scores = await score_all(learner, pairs)
    logprobs = np.concatenate([score.logprobs for score in scores])
    return dpo.preference_metrics([dpo.preference_sums(dpo.PairTokens(pairs), logprobs, beta)])
