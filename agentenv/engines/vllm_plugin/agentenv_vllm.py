"""A vLLM plugin that moves work from the API server, which has one core, to the engine.

It is a general plugin: vLLM calls `register` in each process that has this folder on PYTHONPATH.
Then the rank of a sampled token contains the entropy of its sampling distribution (`rank_of`),
which needs no extra bytes, and a request ends at the stop strings in
`extra_args["stop_strings"]` of its sampling parameters, without `stop` and with
`detokenize: false`.

It also registers the backend that reads weights from the learner's memory (agentenv_weights.py),
and lets a worker wait for the learner before it measures the memory of a shared GPU.

It needs only vLLM: agentenv is not installed in that environment.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger(__name__)

ENTROPY = 1 << 32  # a rank with this bit has the bits of an entropy below it, float32, nats
MARK = "with_stop_strings_of_agentenv"  # marks a module whose functions are replaced
STOP_STRINGS = "stop_strings"  # key of SamplingParams.extra_args
PARTIAL = "\ufffd"  # the decoding of an incomplete character
MARGIN = 8  # extra tokens to decode before the longest stop string: the first may be incomplete
CHUNK = 1 << 24  # logits processed at once, to avoid a copy of a whole batch


def register() -> None:
    """Called by vLLM in each of its processes, possibly repeatedly. It replaces all functions or
    none: an unsupported version serves unchanged, which clients detect by their first request."""
    _skip_environment()
    _take_shared_weights()
    _wait_for_learner()
    try:
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
        sampler = importlib.import_module("vllm.v1.sample.sampler").Sampler
        gather = _with_entropies(sampler.gather_logprobs, is_normalized=True)
        replaced: list[tuple[Any, str, Any]] = [
            (scheduler, "check_stop", _stopping(scheduler.check_stop)),
            (scheduler.Scheduler, "__init__", _knowing_the_model(scheduler.Scheduler.__init__)),
            (sampler, "gather_logprobs", staticmethod(gather)),
        ]
        with contextlib.suppress(ImportError):  # of triton, where there is no GPU
            second = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")
            score = _with_entropies(second.compute_topk_scores, is_normalized=False)
            replaced.append((second, "compute_topk_scores", score))
    except (ImportError, AttributeError):
        logger.exception("agentenv's plugin does not support this version of vLLM")
        return
    if not hasattr(scheduler, MARK):
        setattr(scheduler, MARK, True)
        for owner, name, function in replaced:
            setattr(owner, name, function)


def _skip_environment() -> None:
    """Let the first `/server_info` answer at once, without "system_env", for which vLLM runs pip
    and a dozen programs. vLLM's router imports the replaced function later."""
    with contextlib.suppress(ImportError):
        collect: Any = importlib.import_module("vllm.collect_env")
        collect.get_env_info = lambda: SimpleNamespace(_asdict=dict)


IPC = "agentenv_ipc"  # of --weight-transfer-config
GATE = "AGENTENV_LEARNER_READY"  # environment variable with a file that appears with the learner
GATE_POLL_S = 0.02


def _take_shared_weights() -> None:
    """Register the backend; its module is imported when a server uses it."""
    with contextlib.suppress(ImportError, AttributeError):
        factory = importlib.import_module("vllm.distributed.weight_transfer.factory")
        engines = factory.WeightTransferEngineFactory
        if IPC not in engines._registry:
            engines.register_engine(IPC, "agentenv_weights", "SharedMemoryEngine")


def _wait_for_learner() -> None:
    """Let workers import their modules during the start of the learner, and then wait for it.
    Afterwards vLLM measures the free memory of its GPU, and fails if another process frees some."""
    gate = os.environ.get(GATE)
    if not gate:
        return
    try:
        wrapper = importlib.import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
        init = wrapper.init_device
    except (ImportError, AttributeError):
        logger.exception("this version of vLLM does not wait for the learner")
        return
    if hasattr(init, "__wrapped__"):
        return

    @wraps(init)
    def init_device(self: Any, *arguments: Any, **keys: Any) -> Any:
        began = time.monotonic()
        while not os.path.exists(gate):  # the run ends a server that waits for too long
            time.sleep(GATE_POLL_S)
        logger.warning("waited %.1f s for the learner", time.monotonic() - began)
        return init(self, *arguments, **keys)

    wrapper.init_device = init_device


# entropies


def _with_entropies(function: Callable[..., Any], *, is_normalized: bool) -> Callable[..., Any]:
    """Of a model runner: its first argument are the log-probs of the whole vocabulary, or the
    logits of sampling."""

    @wraps(function)
    def found_with_entropies(rows: torch.Tensor, *arguments: Any, **keys: Any) -> Any:
        found = function(rows, *arguments, **keys)
        ranks = ranks_of(rows, is_normalized=is_normalized)
        return found._replace(selected_token_ranks=ranks.to(found.selected_token_ranks.dtype))

    return found_with_entropies


def ranks_of(rows: torch.Tensor, *, is_normalized: bool) -> torch.Tensor:
    """ENTROPY plus the bits of each row's entropy, int64. `rows`: [tokens, vocabulary], logits or
    log-probs."""
    entropies = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    size = max(1, CHUNK // rows.shape[-1])
    for start in range(0, len(rows), size):
        logprobs = rows[start : start + size].float()
        if not is_normalized:
            logprobs = logprobs.log_softmax(-1)
        # for a token that cannot be sampled, -inf times 0 is nan
        parts = torch.where(logprobs > -torch.inf, logprobs.exp() * logprobs, 0.0)
        entropies[start : start + size] = -parts.sum(-1)
    # for a single token the sum may be -0.0, whose bits differ from those of 0.0
    return entropies.clamp_(min=0.0).abs_().view(torch.int32).to(torch.int64) + ENTROPY


# stop strings

_vocabulary: _Vocabulary | None = None  # of the served model


def _knowing_the_model(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def __init__(self: Any, *arguments: Any, **keys: Any) -> None:
        global _vocabulary
        init(self, *arguments, **keys)
        _vocabulary = _Vocabulary(self.vllm_config.model_config)

    return __init__


def _stopping(check: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    @wraps(check)
    def check_stop(request: Any, max_model_len: int) -> bool:
        extra = request.sampling_params.extra_args
        stops = extra.get(STOP_STRINGS) if extra else None
        if stops and _vocabulary is not None:
            found = _vocabulary.match(request.output_token_ids, tuple(stops))
            if found is not None:
                request.status = type(request.status).FINISHED_STOPPED
                request.stop_reason = found
                return True
        return check(request, max_model_len)

    return check_stop


class _Vocabulary:
    """The text of each token, read with the first stop string, and the tokens that can end a stop
    string."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._tokenizer: Any = None
        self._texts: list[str] = []
        self._ends: dict[tuple[str, ...], frozenset[int]] = {}

    def match(self, token_ids: Any, stops: tuple[str, ...]) -> str | None:
        """The stop string that the last token completes, the one that begins first; None if none.
        Most tokens need only a lookup in one set."""
        ends = self._ends.get(stops)
        if ends is None:
            ends = self._ends[stops] = self._ends_of(stops)
        if token_ids[-1] not in ends:
            return None
        window = max(len(stop.encode()) for stop in stops) + MARGIN
        start = max(0, len(token_ids) - window)
        text = self._decode(token_ids[start:])
        while start and text.startswith(PARTIAL):  # the cut split a character
            start -= 1
            text = self._decode(token_ids[start:])
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        return min(found)[1] if found else None

    def _ends_of(self, stops: tuple[str, ...]) -> frozenset[int]:
        if self._tokenizer is None:
            tokenizers = importlib.import_module("vllm.tokenizers")
            self._tokenizer = tokenizers.cached_tokenizer_from_config(self._model_config)
            # Each token twice: some decoders strip a space at the start, the second one has it.
            size = self._model_config.get_vocab_size()
            self._texts = [self._decode([index, index]) for index in range(size)]
        marks = {stop[-1] for stop in stops}
        if any(not mark.isascii() for mark in marks):  # a byte may complete a character
            marks.add(PARTIAL)
        texts = enumerate(self._texts)
        return frozenset(index for index, text in texts if not marks.isdisjoint(text))

    def _decode(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
