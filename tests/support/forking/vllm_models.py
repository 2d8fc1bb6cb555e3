"""The inspection of a model's class by vLLM before it serves it, done once for all servers of
tests.

vLLM inspects it in a separate process, since the class could touch a GPU, and that process imports
vLLM again, for 15 CPU seconds. There is no GPU here; the answers go to the same cache on the disk.
"""

from vllm.model_executor.models import registry

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # others when a server has one


def inspect() -> None:
    registry._run_in_subprocess = lambda inspect_model: inspect_model()
    for name in ARCHITECTURES:
        registry.ModelRegistry.models[name].inspect_model_cls()
