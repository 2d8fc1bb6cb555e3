"""Whether policy, renderer, engine and learner mean the same: calls, special tokens, log-probs, the
prefix cache, the distribution that is sampled from.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median, pstdev
from typing import Any

from msgspec.structs import replace

from agentenv.engine import Engine
from agentenv.engines.scripted import ScriptedConfig
from agentenv.errors import ConfigError, DataError
from agentenv.native import NativeRenderer
from agentenv.offload import in_thread
from agentenv.pipelines.diagnosis.context import Patient
from agentenv.pipelines.diagnosis.results import Probe, Skip
from agentenv.pipelines.rl.publishing import ParityProbe
from agentenv.pipelines.setup.assembly import TRAINED
from agentenv.renderer import Renderer, ToolSchemas
from agentenv.tags import takes_object, written_arguments
from agentenv.types import Completion, Message, SamplingParams, ToolCall

NUM_TOKENS = 16  # of a completion that is looked at
NUM_SAMPLES = 32
FORK_TOKENS = 256  # of the prefix that two siblings share
LEAST_HIT = 0.5  # of such a prefix; caches keep whole blocks
SHARP = 0.05  # nats: what a distribution with one token left is at most from 0
WIDE = 0.3  # nats: how wide the policy's own distribution has to be for that to say anything
MAX_Z = 5.0  # deviations by which surprise and entropy may differ
ARGUMENT = "1"


async def calls(patient: Patient) -> str:
    """What a policy writes to call each tool comes back from the parser as that call."""
    renderers, episodes = await patient.assembly.renderers(), await patient.assembly.episodes()
    renderer, (messages, info) = renderers[TRAINED], episodes[TRAINED]
    tools = info.get("tools", ())
    if not tools:
        raise Skip("the environment has no tools")
    prompt = renderer.prompt(messages, tools)
    for tool in tools:
        refuse_lost_call(renderer, prompt, tools, tool)
    return ", ".join(str(tool["name"]) for tool in tools)


def refuse_lost_call(
    renderer: Renderer, prompt: Sequence[int], tools: ToolSchemas, tool: dict[str, Any]
) -> None:
    """Raises ConfigError if a call of this tool does not come back."""
    wanted = sample_call(tool, every=isinstance(renderer, NativeRenderer))
    name, stop = wanted.name, None
    if isinstance(renderer, NativeRenderer):
        text = renderer.calling("", [wanted])
    else:
        text = f"<{name}>{written_arguments(wanted.arguments, tool)}</{name}>"
        stop = f"</{name}>"
    written = Completion(renderer.encode(text), [], [], "stop", [], stop)
    found = renderer.parse(written, tools, prompt).tool_calls
    if list(found) != [wanted]:
        got = ", ".join(f"{one.name}({one.arguments})" for one in found) or "no call"
        raise ConfigError(
            f"the tool {name!r}: what calls it, {text!r}, comes back as {got}; choose another "
            "renderer.name, renderer.style or name of the tool"
        )


def sample_call(tool: dict[str, Any], *, every: bool) -> ToolCall:
    """A call with a value for the first parameter, or for each that is required: with `every`, and
    where the arguments are an object."""
    parameters = tool.get("parameters", {})
    names = list(parameters.get("properties", {}))
    if every or takes_object(tool):
        required = [name for name in names if name in parameters.get("required", names)]
        kinds = {name: parameters["properties"][name].get("type") for name in required}
        values = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
        arguments = {name: values.get(str(kind), ARGUMENT) for name, kind in kinds.items()}
        return ToolCall(str(tool["name"]), arguments)
    return ToolCall(str(tool["name"]), dict.fromkeys(names[:1], ARGUMENT))


async def special_tokens(patient: Patient) -> str:
    """Special tokens and tags that a tool writes become ordinary text."""
    renderers, episodes = await patient.assembly.renderers(), await patient.assembly.episodes()
    renderer, (_, info) = renderers[TRAINED], episodes[TRAINED]
    tokenizer, tools = renderer.tokenizer, info.get("tools", ())
    texts = [str(one) for one in getattr(tokenizer, "all_special_tokens", ())]
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    texts += [text for text in added if text not in texts]
    tags = [f"<{kind}{tool['name']}>" for tool in tools for kind in ("", "/")]
    check_special(renderer, tools, [*texts, *tags, "</result>", "<answer>"])
    return f"{len(texts)} special tokens, {len(tags) + 2} tags"


def check_special(renderer: Renderer, tools: ToolSchemas, texts: Sequence[str]) -> None:
    """Raises ConfigError if one of the texts, in a tool's result, is read as more than text."""
    name = str(tools[0]["name"]) if tools else "tool"
    special = set(getattr(renderer.tokenizer, "all_special_ids", ()))

    def of(text: str) -> tuple[int, str]:
        ids = list(renderer.observation([Message("tool", text, name=name)], tools, 512))
        return sum(one in special for one in ids), renderer.decode(ids)

    harmless, _ = of("harmless")
    for text in texts:
        number, read = of(f"before {text} after")
        frame = of("before  after")[1]
        if number > harmless or read.count(text) > frame.count(text):
            raise ConfigError(
                f"a tool that writes {text!r} writes a token or tag of the protocol; this is a bug "
                "of the renderer: report it, with the name of the tokenizer"
            )


async def packed_model(patient: Patient) -> str:
    """A small model of the family, computed as the learner does, equals transformers' own."""
    from agentenv.learners.model_check import TOLERANCE, check_model  # loads torch

    model = await patient.assembly.model()
    learner = patient.config.learner
    await in_thread(check_model, model, learner.context_parallel)
    return f"within {TOLERANCE:g} nats"


# With the learner and the engine.


def needs_engine(patient: Patient) -> None:
    """Raises Skip where no engine with a model is there to be asked."""
    if patient.is_quick:
        raise Skip("--quick starts no engine")
    if isinstance(patient.config.engine, ScriptedConfig):
        raise Skip("the scripted engine has no model")
    if patient.config.resources.colocated:
        raise Skip("engine and learner have their GPUs in turn; the run looks at its first publish")


async def parity(patient: Patient) -> str:
    """Engine and learner give the same tokens the same log-probs."""
    needs_engine(patient)
    assembly, train = patient.assembly, patient.config.train
    learner, engine = await assembly.learner_and_engine()
    probe = ParityProbe(engine, learner, await assembly.probe_prompts())
    probe.start()
    gap = await probe.finish()
    if gap is None:
        raise Skip("the engine gave no answer in time")
    told = f"at most {gap.max:.2g} nats, {gap.mean:.2g} on average, over {gap.num_tokens} tokens"
    if gap.mean > max(train.stop_logprob_gap, train.max_logprob_gap):
        raise ConfigError(
            f"{gap.worst or 'the engine'} and the learner disagree by {told}, more than "
            f"train.stop_logprob_gap = {train.stop_logprob_gap:g}; look for another dtype, "
            "quantization or model path"
        )
    if gap.max > train.max_logprob_gap:
        told += f" (beyond train.max_logprob_gap = {train.max_logprob_gap:g}: the run will warn)"
    return told


async def prefix_hit(patient: Patient) -> str:
    """A second branch behind a prefix finds it in the engine's cache."""
    needs_engine(patient)
    engine = await patient.assembly.engine()
    limits = patient.config.limits
    size = min(FORK_TOKENS, limits.max_prompt_tokens + limits.max_response_tokens - NUM_TOKENS)
    prompts = list(chain.from_iterable(await patient.assembly.probe_prompts()))
    prefix = (prompts * (1 + size // max(1, len(prompts))))[:size]
    return await check_prefix_hit(engine, prefix)


async def check_prefix_hit(engine: Engine, prefix: Sequence[int]) -> str:
    """Raises ConfigError when a sibling's prefix is computed again."""
    for seed in range(2):
        sampling = SamplingParams(2, seed=seed)
        found = await engine.generate(prefix, sampling, session="doctor-fork")
    share = found.num_cached_tokens / len(prefix)
    told = f"{share:.0%} of {len(prefix)} tokens"
    if share < LEAST_HIT:
        raise ConfigError(
            f"a fork finds {told} of its prefix in the engine's cache; switch the prefix cache on, "
            "give it more memory, and of models with recurrent layers see docs/engines.md"
        )
    return told


async def sampling(patient: Patient) -> str:
    """The log-probs that the engine gives are those of the distribution that it samples from."""
    needs_engine(patient)
    engine, prompts = await patient.assembly.engine(), await patient.assembly.probe_prompts()
    return await check_sampling(engine, prompts[0])


async def check_sampling(engine: Engine, prompt: Sequence[int]) -> str:
    """Raises ConfigError when log-probs are not those of the sampled distribution.

    Where temperature or truncation leave one token, its log-prob is 0. At temperature 1 the mean
    surprise of what is sampled is the mean entropy, where the engine tells the exact one.
    """
    plain = await _sampled(engine, prompt, SamplingParams(NUM_TOKENS))
    surprise = [-one for completion in plain for one in completion.logprobs]
    if not surprise:
        raise DataError("the engine sampled nothing")
    if min(-one for one in surprise) > 1e-6 or any(math.isnan(one) for one in surprise):
        raise ConfigError("the engine's log-probs are no log-probs; look at its version and patch")
    if fmean(surprise) < WIDE:
        raise Skip(f"the policy is nearly sure of every token here ({fmean(surprise):.2g} nats)")
    for key, value in (("temperature", 0.01), ("top_p", 1e-6), ("top_k", 1)):
        chosen = replace(SamplingParams(NUM_TOKENS), **{key: value})
        found = await _sampled(engine, prompt, chosen, number=4)
        left = median(-one for completion in found for one in completion.logprobs)
        if left > SHARP:
            raise ConfigError(
                f"with {key} = {value:g} one token is left to sample, and the engine gives it a "
                f"log-prob of {-left:.2g}, which is not that of the sampled distribution; "
                "choose processed log-probs (vLLM: logprobs_mode = processed_logprobs)"
            )
    entropies = [one for completion in plain for one in completion.entropies]
    exact = all(completion.entropy_kind == "exact" for completion in plain)
    if not exact or len(entropies) != len(surprise) or any(map(math.isnan, entropies)):
        return "temperature, top_p and top_k; entropies are not exact and not compared"
    apart = [one - other for one, other in zip(surprise, entropies, strict=True)]
    z = abs(fmean(apart)) / max(1e-9, pstdev(apart) / math.sqrt(len(apart)))
    if z > MAX_Z and abs(fmean(apart)) > SHARP:
        raise ConfigError(
            "the engine samples from another distribution than it tells: the mean surprise of "
            f"sampled tokens is {fmean(surprise):.3g} nats, their entropy {fmean(entropies):.3g}; "
            "look at the engine's version, its sampling defaults (generation_config.json) and patch"
        )
    return f"temperature, top_p, top_k; surprise and entropy {fmean(apart):+.2g} nats apart"


async def _sampled(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, number: int = NUM_SAMPLES
) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(prompt, replace(params, seed=seed), session=f"doctor{seed}")
            for seed in range(number)
        )
    )


PROTOCOL = (
    Probe("calls come back", calls),
    Probe("special tokens in results", special_tokens),
    Probe("packed model", packed_model),
)
STARTED = (
    Probe("log-prob parity", parity),
    Probe("prefix hit of a fork", prefix_hit),
    Probe("sampling contract", sampling),
)
