"""Whether policy, renderer, engine and learner agree: calls, special tokens, log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentenv.engines.scripted import ScriptedConfig
from agentenv.errors import ConfigError
from agentenv.native import NativeRenderer
from agentenv.offload import in_thread
from agentenv.pipelines.rl.parts import TrainingAssembly
from agentenv.pipelines.rl.publishing import ParityProbe
from agentenv.pipelines.setup.assembly import TRAINED, Assembly
from agentenv.pipelines.setup.checks import Skip
from agentenv.renderer import Renderer, ToolSchemas
from agentenv.tags import takes_object, written_arguments
from agentenv.types import Completion, Message, ToolCall

ARGUMENT = "1"


async def calls(assembly: TrainingAssembly) -> str:
    """What a policy writes to call each tool comes back from the parser as that call."""
    renderers, episodes = await assembly.renderers(), await assembly.episodes()
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


async def special_tokens(assembly: TrainingAssembly) -> str:
    """Special tokens and tags that a tool writes become ordinary text."""
    renderers, episodes = await assembly.renderers(), await assembly.episodes()
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


async def packed_model(assembly: Assembly[Any]) -> str:
    """A small model of the family, computed as the learner does, equals transformers' own."""
    from agentenv.learners.model_check import TOLERANCE, check_model  # loads torch

    team = assembly.config.learner.context_parallel
    await in_thread(check_model, await assembly.model(), team)
    return f"within {TOLERANCE:g} nats"


async def adapters(assembly: Assembly[Any]) -> None:
    """The adapters of [learner.lora] fit the model."""
    lora = assembly.config.learner.lora
    if lora is None:
        raise Skip("no adapters are trained")
    from agentenv.learners.lora import check_adapters  # loads torch

    await in_thread(check_adapters, await assembly.model(), lora)


async def parity(assembly: TrainingAssembly) -> str:
    """Engine and learner give the same tokens the same log-probs."""
    config, train = assembly.config, assembly.config.train
    if isinstance(config.engine, ScriptedConfig):
        raise Skip("the scripted engine has no model")
    if config.resources.colocated:
        raise Skip("engine and learner have their GPUs in turn; the run checks its first publish")
    learner, engine = await assembly.learner_and_engine()
    probe = ParityProbe(engine, learner, await assembly.probe_prompts())
    probe.start()
    gap = await probe.finish()
    if gap is None:
        raise Skip("the engine gave no answer in time")
    message = f"at most {gap.max:.2g} nats, {gap.mean:.2g} on average, over {gap.num_tokens} tokens"
    if gap.mean > max(train.stop_logprob_gap, train.max_logprob_gap):
        raise ConfigError(
            f"{gap.worst or 'the engine'} and the learner disagree by {message}, more than "
            f"train.stop_logprob_gap = {train.stop_logprob_gap:g}; look for another dtype, "
            "quantization or model path"
        )
    if gap.max > train.max_logprob_gap:
        message += f" (beyond train.max_logprob_gap = {train.max_logprob_gap:g}: the run will warn)"
    return message
