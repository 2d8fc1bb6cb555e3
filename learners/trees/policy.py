"""Log-probs of trained tokens from a Hugging Face causal language model on packed trees.

`LogprobHead` gives log-probs, entropies and arg-max of given tokens without logits of the whole
batch. For a token with logits z (W h + b, scaled and capped as the model does, divided by the
temperature of its turn, -inf outside the ids that its sampling kept), target y, p = softmax(z),
H = -sum p log p:

    d log p(y) / dz = onehot(y) - p          d H / dz = -p (log p + H)

Logits exist only for a chunk of tokens at a time. The backward pass recomputes them, unless they
fit into one chunk, which keeps its probabilities.
"""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.models.auto import modeling_auto as known

from agentenv.base.errors import ConfigError, MissingError
from agentenv.base.installation import install_hint
from agentenv.learners.trees.attention import NO_MASK, TreeLayout, use_tree_attention
from agentenv.learners.trees.context import ContextGroup, ContextShare, padded
from agentenv.learners.trees.partition import MicroBatch

# A family that is published with other towers only, such as Mistral 3, has no class for text alone:
# AutoModelForCausalLM gives its whole model.
for _kind, _name in known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
    known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(_kind, _name)

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # of one [tokens, vocabulary] tensor
# Of a float32 copy of some rows of the weight; on a GPU, which needs no copy, of their gradient.
TILE_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}


class LogitShape(NamedTuple):
    """A model's logits from the product z of its head: cap tanh(scale z / cap), or scale z."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitShape:
        """As the families' configurations name it: Granite and MiniCPM divide, Cohere and Falcon-H1
        multiply, Gemma caps."""
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        for name in ("logit_scale", "lm_head_multiplier"):
            scale *= getattr(config, name, None) or 1.0
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def apply(self, logits: Tensor) -> Tensor:
        """With a gradient."""
        logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def apply_(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.scale != 1.0:
            logits *= self.scale
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def back_(self, grad: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the product, in place, from that of the shaped logits."""
        if self.cap is not None:
            assert logits is not None
            grad *= 1.0 - (logits / self.cap).square_()
        if self.scale != 1.0:
            grad *= self.scale
        return grad


PLAIN = LogitShape()


class LogprobHead(nn.Linear):
    """An output head that can also return log-probs and entropies of given tokens.

    It has the parameters of the linear layer that it replaces, so that tied weights stay tied, and
    hooks of the module, which gather the weight under ZeRO-3, run at every use.
    """

    shape = PLAIN

    @classmethod
    def of(cls, linear: nn.Linear, shape: LogitShape = PLAIN) -> LogprobHead:
        """A head with the same parameters."""
        has_bias = linear.bias is not None
        head = cls(linear.in_features, linear.out_features, has_bias, device="meta")
        head.weight, head.bias, head.shape = linear.weight, linear.bias, shape
        return head.train(linear.training)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: Tensor | None = None,
        kept: Tensor | None = None,
        others: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """The product, which the model shapes; with targets log-probs, entropies and likeliest
        ids of the shaped logits, each [tokens], and with `others` (int64 [tokens, k], or k for the
        likeliest) the log-probs of these ids, and the ids.

        hidden: [tokens, width], targets: int64 [tokens], temperature: [tokens] (None: 1), which
        divides the shaped logits, kept: see MicroBatch. Log-probs and entropies (nats) are at
        least float32 and both differentiable; an unneeded gradient costs nothing.
        """
        if targets is None:
            return super().forward(hidden)
        figures: tuple[Tensor, Tensor, Tensor] = SelectedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, targets, self.shape, temperature, kept
        )
        if others is None:
            return figures
        wide = figures[0].dtype
        if isinstance(others, int):
            parts = torch.split(hidden, chunk_tokens(self.weight, wide))
            rows = (self.shape.apply_(_logits(one, self.weight, self.bias, wide)) for one in parts)
            others = torch.cat([row.topk(others).indices for row in rows])
        ids = torch.cat([targets[:, None], others], 1)
        logits = torch.einsum("tkw,tw->tk", self.weight[ids].to(wide), hidden.to(wide))
        if self.bias is not None:
            logits = logits + self.bias[ids]
        logits = self.shape.apply(logits)
        if temperature is not None:
            logits = logits / temperature[:, None]
        return *figures, figures[0][:, None] + logits[:, 1:] - logits[:, :1], others


class SelectedLogprobs(torch.autograd.Function):
    """See `LogprobHead.forward`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: LogitShape = PLAIN,
        temperature: Tensor | None = None,
        kept_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, dtype = len(targets), torch.promote_types(hidden.dtype, torch.float32)
        if temperature is not None:
            temperature = temperature.to(dtype)[:, None]
        chunks = torch.split(hidden, chunk_tokens(weight, dtype))
        logprobs, entropy, log_total = hidden.new_empty(3, num_tokens, dtype=dtype)
        likeliest = torch.empty_like(targets)
        kept = None
        start = 0
        for chunk in chunks:
            span = slice(start, start + len(chunk))
            logits = shape.apply_(_logits(chunk, weight, bias, dtype))
            if temperature is not None:
                logits /= temperature[span]
            outside = None if kept_ids is None else truncate_(logits, kept_ids[span])
            highest, likeliest[span] = logits.max(-1)
            chosen = logits.gather(-1, targets[span, None])[:, 0]
            probabilities = torch.softmax(logits, -1)
            top = probabilities.gather(-1, likeliest[span, None])[:, 0]
            log_total[span] = highest - top.log()
            logprobs[span] = chosen - log_total[span]
            if outside is not None:
                logits.masked_fill_(outside, 0.0)
            entropy[span] = log_total[span] - torch.linalg.vecdot(probabilities, logits)
            kept = probabilities if len(chunks) == 1 and shape.cap is None else None
            start = span.stop
        ctx.dtype, ctx.shape = dtype, shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(likeliest)
        given = hidden, weight, bias, targets, temperature, kept_ids
        ctx.save_for_backward(*given, log_total, entropy, kept)
        return logprobs, entropy, likeliest

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, kept_ids, *found = ctx.saved_tensors
        log_total, entropy, kept = found
        if grad is None and grad_entropy is None:
            return (None,) * 7
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks are at least float32, for any dtype of the weight.
        grad_weight = torch.zeros_like(weight, dtype=ctx.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=ctx.dtype) if ctx.needs_input_grad[2] else None
        start = 0
        for chunk in torch.split(hidden, chunk_tokens(weight, ctx.dtype)):
            span = slice(start, start + len(chunk))
            start = span.stop
            probabilities, logits = kept, None
            if probabilities is None:
                probabilities = ctx.shape.apply_(_logits(chunk, weight, bias, ctx.dtype))
                logits = probabilities.clone() if ctx.shape.cap is not None else None
                if temperature is not None:
                    probabilities /= temperature[span]
                if kept_ids is not None:
                    truncate_(probabilities, kept_ids[span])
                probabilities.sub_(log_total[span, None]).exp_()
            of_logits = torch.zeros_like(probabilities)
            if grad is not None:
                torch.mul(probabilities, -grad[span, None], out=of_logits)
                of_logits.scatter_add_(-1, targets[span, None], grad[span, None])
            if grad_entropy is not None:
                rise = torch.special.xlogy(probabilities, probabilities)
                rise.addcmul_(probabilities, entropy[span, None])
                of_logits.addcmul_(rise, grad_entropy[span, None], value=-1.0)
            if temperature is not None:
                of_logits /= temperature[span]
            ctx.shape.back_(of_logits, logits)
            if grad_bias is not None:
                grad_bias += of_logits.sum(0)
            grad_hidden[span] = _back(of_logits, chunk, weight, grad_weight)
        grads = (
            None if one is None else one.to(hidden.dtype)
            for one in (grad_hidden, grad_weight, grad_bias)
        )
        return *grads, None, None, None, None


def truncate_(logits: Tensor, kept: Tensor) -> Tensor:
    """Set the logits to -inf outside the kept ids of each row, which all are if they are -1;
    returns where."""
    outside = (kept[:, :1] >= 0).repeat(1, logits.shape[1])
    outside.scatter_(1, kept.clamp(min=0), value=False)
    logits.masked_fill_(outside, -torch.inf)
    return outside


def chunk_tokens(weight: Tensor, dtype: torch.dtype) -> int:
    """Tokens of a chunk: as many as fit into CHUNK_BYTES."""
    return max(1, CHUNK_BYTES[weight.device.type] // (weight.shape[0] * dtype.itemsize))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[tokens, vocabulary] in dtype; half precision is multiplied and summed in float32."""
    if weight.dtype == dtype:
        logits = hidden @ weight.T
    elif weight.device.type == "cuda":
        logits = _product(hidden, weight.T)
    else:
        logits = hidden.new_empty(len(hidden), len(weight), dtype=dtype)
        for rows in _tiles(weight):
            logits[:, rows] = _product(hidden, weight[rows].T)
    if bias is not None:
        logits += bias
    return logits


def _back(of_logits: Tensor, hidden: Tensor, weight: Tensor, grad_weight: Tensor | None) -> Tensor:
    """The gradient of hidden; adds that of the weight to grad_weight."""
    if weight.dtype == of_logits.dtype:
        if grad_weight is not None:
            grad_weight.addmm_(of_logits.T, hidden)
        return of_logits @ weight
    if grad_weight is not None:
        for rows in _tiles(weight):
            grad_weight[rows] += _product(of_logits[:, rows].T, hidden)
    if weight.device.type == "cuda":
        return _product(of_logits, weight)
    of_hidden = torch.zeros_like(hidden, dtype=of_logits.dtype)
    for rows in _tiles(weight):
        of_hidden += _product(of_logits[:, rows], weight[rows])
    return of_hidden


def _tiles(weight: Tensor) -> list[slice]:
    """Slices of the weight's rows that fit into TILE_BYTES in float32."""
    step = max(1, TILE_BYTES[weight.device.type] // (4 * weight.shape[1]))
    return [slice(start, start + step) for start in range(0, len(weight), step)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32, if right is half precision; tensor cores sum in float32."""
    if right.device.type == "cuda":
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    return left.float() @ right.float()


class Policy(nn.Module):
    """A causal language model that returns log-probs and entropies of the trained tokens only.

    Only positions that predict a trained token go through the head. log p(t) is read from the
    logits of t's predecessor on its path.

    The model's attention and head are replaced by equivalent ones with more functions; its
    parameters remain the same objects. Those of other towers are frozen. `checkpointing` keeps only
    the inputs of each layer for the backward pass and recomputes the rest. Raises ConfigError for
    unsupported models.
    """

    def __init__(self, model: Any, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.model = model
        self.masks = recurrent_masks(model)
        use_tree_attention(model, is_known=self.masks is not None)
        head = model.get_output_embeddings()
        if not isinstance(head, LogprobHead):
            if type(head) is not nn.Linear:
                raise ConfigError(
                    f"the output head is a {type(head).__name__}, not a linear layer; put adapters "
                    "on other layers"
                )
            shape = LogitShape.of(model.config.get_text_config())
            model.set_output_embeddings(LogprobHead.of(head, shape))
        own = text_part(model)
        for param in model.parameters():
            if id(param) not in own:
                param.requires_grad_(False)
        if checkpointing:
            _checkpoint_layers(model)
        self._balance: Any = None
        self.router_loss: Tensor | None = None  # of the last forward pass

    def balance_experts(self) -> None:
        """Let passes with gradients store the family's load-balancing loss of their tokens in
        `router_loss`. Raises ConfigError for a family without such a loss."""
        name = "load_balancing_loss_func"
        self._balance = getattr(sys.modules[type(self.model).__module__], name, None)
        if self._balance is None:
            raise ConfigError(
                f"learner.router_loss: {type(self.model).__name__} has no load-balancing loss in "
                "transformers; expected a model such as Mixtral or Qwen3-MoE, or 0"
            )

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        layout: TreeLayout,
        source: Tensor,
        targets: Tensor,
        temperature: Tensor | None = None,
        kept: Tensor | None = None,
        others: Tensor | int | None = None,
    ) -> tuple[Tensor, ...]:
        """log-probs, entropies (nats; both with gradient) and arg-max matches, [tokens]; with
        `others`, ids or their number, also their log-probs and the ids, each [tokens, k].

        Shapes as in MicroBatch. In a context group, the arguments except the layout are this
        rank's, the results those of the whole micro-batch.
        """
        keys: dict[str, Any] = {"attention_mask": NO_MASK}
        if self.masks is not None:
            keys = {"attention_mask": self.masks} | dict(
                zip(SEGMENTS, layout.segments, strict=True)
            )
        balances = self._balance is not None and torch.is_grad_enabled()
        if balances:
            keys["output_router_logits"] = True
        found = self.model.base_model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            tree_layout=layout,
            use_cache=False,
            **keys,
        )
        hidden = found.last_hidden_state
        if balances:
            logits, config = found.router_logits, self.model.config.get_text_config()
            active = config.num_experts_per_tok
            self.router_loss = self._balance(logits, logits[0].shape[-1], active)
        logprobs, entropy, likeliest, *rest = self.model.get_output_embeddings()(
            hidden.flatten(0, 1).index_select(0, source), targets, temperature, kept, others
        )
        figures = logprobs, entropy, likeliest == targets, *rest
        return figures if layout.share is None else layout.share.joined(*figures)


# Kinds of recurrent layers, which carry a state along the row, as config.json names them.
RECURRENT = {"conv", "linear_attention", "mamba"}
SEGMENTS = ("tree_cu_seqlens_q", "tree_segment_parents")  # of tree-recurrence: `layout.segments`


def recurrent_masks(model: Any) -> dict[str, Tensor | None] | None:
    """Let convolutions and recurrent layers continue a fork from the state of its path, with the
    package tree-recurrence; returns the model's masks by kind of layer, None without such layers.

    Raises ConfigError if tree-recurrence is missing, or does not support the layers.
    """
    found = recurrent_kinds(model.config)
    if not found:
        return None
    try:
        import tree_recurrence
    except ImportError as error:
        raise MissingError(
            f"{type(model).__name__}: layers of type {', '.join(found)} require tree-recurrence: "
            f"install it with {install_hint('hybrid')}"
        ) from error
    support = tree_recurrence.install(model)
    if support.mode != "tree":
        raise ConfigError(
            f"{type(model).__name__}: layers of type {', '.join(found)} do not follow a tree: "
            f"{support.reason}"
        )
    kinds = {*_kinds(model.config), "full_attention"}
    return {kind: None if kind in RECURRENT else NO_MASK for kind in kinds}


def recurrent_kinds(config: Any) -> list[str]:
    """The kinds of a model's recurrent layers."""
    return sorted(_kinds(config) & RECURRENT)


def _kinds(config: Any) -> set[str]:
    return {*map(str, getattr(config.get_text_config(), "layer_types", None) or ())}


def _checkpoint_layers(model: Any) -> None:
    # Transformers 5.2x renamed it and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    # Layers checkpoint in training mode only; the modules inside them keep their mode.
    for layer in model.get_decoder().layers:
        layer.training = True


def text_part(model: Any) -> set[int]:
    """The ids of the parameters and buffers of the text model and its head, without other towers
    such as vision."""
    text, head = model.get_decoder(), model.get_output_embeddings()
    return {*map(id, chain(text.parameters(), text.buffers(), head.parameters()))}


def tensors(
    batch: MicroBatch, device: torch.device, group: ContextGroup | None = None
) -> tuple[Any, ...]:
    """The arguments of `Policy.forward` on the device, of this rank's share in a context
    group."""
    share = None
    if group is not None:
        batch = padded(batch, group.size)
        share = ContextShare(group, batch)
        batch = share.of(batch)
    arrays = (batch.token_ids, batch.position_ids, batch.source, batch.targets)
    token_ids, position_ids, source, targets = (torch.from_numpy(a).to(device) for a in arrays)
    form = None if batch.layout == "tree" else batch.layout
    layout = TreeLayout(batch.end, device, form, share)
    given = token_ids, position_ids, layout, source, targets
    more = batch.temperature, batch.kept
    return *given, *(None if one is None else torch.from_numpy(one).to(device) for one in more)
