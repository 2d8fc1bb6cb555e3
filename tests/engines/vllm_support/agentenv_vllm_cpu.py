"""What vLLM lacks on the CPU to take new weights; loaded by its workers, not by agentenv.

Start the server with --worker-extension-cls agentenv_vllm_cpu.WorkerExtension.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker; its methods are called through /collective_rpc."""

    def reload_and_repack(self: Any, weights_path: str) -> None:
        """Load a directory, then pack a tied output head again.

        On the CPU the head multiplies with a packed copy of its weight. Loading new weights
        packs each layer that was loaded; a tied head is not loaded, it shares the embeddings.
        """
        self.reload_weights(weights_path=weights_path)
        self.repack_tied_head()

    def repack_tied_head(self: Any) -> None:
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
        if head is not None and embeddings is not None and head.weight is embeddings.weight:
            head.quant_method.process_weights_after_loading(head)
