"""The missing part of vLLM's weight updates on the CPU; loaded by its workers, not by agentenv.

Start the server with --worker-extension-cls agentenv_vllm_cpu.WorkerExtension.
"""

from __future__ import annotations

from typing import Any

from agentenv_vllm_broadcast import repack_experts, repack_tied_head  # type: ignore[import-not-found]


class WorkerExtension:
    """Mixed into vLLM's worker; its methods are called through /collective_rpc."""

    def reload_and_repack(self: Any, weights_path: str) -> None:
        """Load a directory, and repack the weights that stay packed.

        On the CPU the head multiplies with a packed copy of its weight. Loading new weights
        packs each layer that was loaded; a tied head is not loaded, it shares the embeddings.
        Experts are packed by the first load only.
        """
        model = self.model_runner.get_model()
        repack_experts(model)
        self.reload_weights(weights_path=weights_path)
        repack_tied_head(model)
