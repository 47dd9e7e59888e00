"""The loss of a transformers model and the number of labels it averages over, as transformers' Trainer counts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leyden.core.errors import ConfigurationError
from leyden.strategies.base import Strategy

IGNORED = -100
"""The label of a position that counts for nothing."""


def base_model(model: Any) -> Any:
    """Returns the transformers model inside a model with adapters; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def averages_items(model: nn.Module) -> bool:
    """Returns True if the model's loss is a mean over labels, of which it takes the number: `num_items_in_batch`.

    transformers' Trainer decides by the same rule: `accepts_loss_kwargs`, else whether `forward` takes any keyword.
    """
    model = base_model(model)
    parameters = inspect.signature(model.forward).parameters.values()
    return bool(getattr(model, "accepts_loss_kwargs", any(p.kind is p.VAR_KEYWORD for p in parameters)))


def shifts_labels(model: nn.Module) -> bool:
    """Returns True if the model predicts each label from the position before it, so that a row's first label is unused.

    Encoder-decoder models shift the decoder's inputs instead.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    base = base_model(model)
    is_causal = LOSS_MAPPING.get(getattr(base, "loss_type", "")) is ForCausalLMLoss
    return is_causal and not getattr(base.config, "is_encoder_decoder", False)


def label_names(model: nn.Module) -> list[str]:
    """Returns the names of the model's inputs that are labels, such as `labels` or `start_positions`."""
    from transformers.utils import generic

    find_labels: Any = generic.find_labels
    return list(find_labels(type(base_model(model))))


def count_items(batch: Mapping[str, Any], shifts: bool) -> Tensor | None:
    """Returns the number of labels that the loss averages over, as a tensor on their device.

    Args:
        batch: a batch with `labels`, and maybe `shift_labels`, which then count instead.
        shifts: True if the model shifts labels (see `shifts_labels`).

    Returns:
        None if the batch has no tensor of labels: the loss is then a mean over the batch.

    Example:
        >>> import torch
        >>> labels = torch.tensor([[-100, 5, 6], [7, 8, -100]])
        >>> count_items({"labels": labels}, shifts=True), count_items({"labels": labels}, shifts=False)
        (tensor(3), tensor(4))
    """
    labels = batch.get("labels")
    if isinstance(batch.get("shift_labels"), Tensor):
        labels = batch["shift_labels"]
    elif isinstance(labels, Tensor) and shifts:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum() if isinstance(labels, Tensor) else None


def smoothed_loss(logits: Tensor, labels: Tensor, smoothing: float, shifts: bool, num_items: Tensor | None) -> Tensor:
    """Returns the cross entropy with label smoothing (Szegedy et al., https://arxiv.org/abs/1512.00567).

    Args:
        logits: scores of the classes, (…, C).
        labels: class indices, (…), or -100.
        smoothing: the share of the target that is spread over all classes, 0 to 1.
        shifts: True if each position predicts the next label.
        num_items: the number to divide the sum by; None for the number of labels that are not -100.
    """
    if shifts:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = F.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / ((labels != IGNORED).sum() if num_items is None else num_items)


def router_loss_weight(model: Any) -> float:
    """Returns the weight of the loss that balances the model's experts; 0 if it adds none."""
    base = base_model(model)
    config = base.config.get_text_config()
    weight: float = getattr(base, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0))
    return weight if getattr(config, "output_router_logits", False) else 0.0


def router_correction(
    model: Any, outputs: Any, mask: Tensor | None, items: Tensor, strategy: Strategy, checks: bool
) -> Tensor:
    """Returns what turns a rank's loss, a mean over its labels, into its part of the loss over all ranks' tokens.

    The model's balance loss multiplies, for each expert, the fraction of the tokens that it gets by its mean
    probability, over the tokens of this rank. Over those of all ranks, it is not the mean of the ranks' losses.

    Args:
        model: the model.
        outputs: its outputs.
        mask: the attention mask, (B, T); None if every token counts.
        items: the number of this rank's labels.
        strategy: the run's strategy.
        checks: whether to compare this rank's own balance loss with the model's, for which it waits for the device.

    Raises:
        ConfigurationError: if the model computes its balance loss in another way.
    """
    from leyden.strategies import balance_loss

    base, aux, layers = base_model(model), getattr(outputs, "aux_loss", None), getattr(outputs, "router_logits", None)
    top_k = getattr(base.config.get_text_config(), "num_experts_per_tok", 0)
    if aux is None or not layers or not top_k:
        raise _balances_differently(base)
    logits = torch.cat([layer.flatten(0, -2) for layer in layers])
    probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    indices = probabilities.topk(top_k).indices
    counted = None if mask is None else mask.flatten().repeat(len(layers))
    local = balance_loss(probabilities, indices, None, counted) if checks else None
    if local is not None and not torch.isclose(local, aux.to(local.dtype), rtol=0.05):
        raise _balances_differently(base)
    balance = balance_loss(probabilities, indices, strategy, counted)
    tokens = probabilities.new_tensor(len(logits) / len(layers)) if mask is None else mask.sum().to(balance.dtype)
    own = torch.stack([tokens, items.to(balance.dtype)])
    every = strategy.ranks.reduce(own * (not strategy.is_filling), reduction="sum").clamp(min=1)
    # Ranks are weighted by their labels, and the mean probability by tokens.
    share = tokens / every[0] * every[1] / items.clamp(min=1)
    correction: Tensor = router_loss_weight(model) * (balance * share - aux)
    return correction


def _balances_differently(base: nn.Module) -> ConfigurationError:
    return ConfigurationError(
        f"{type(base).__name__} computes the balance loss of its experts in another way than Mixtral, and on several "
        "ranks it would be that of each rank's tokens. Set model.router_aux_loss_coef = 0, and add balance_loss (from "
        "leyden.strategies) in a training_step of your own."
    )


class ChunkedHead(nn.Linear):
    """The head of a causal model, which returns the sum of the losses in place of the logits if it has labels.

    It never holds the logits of all tokens: torch computes those of a chunk of tokens, their losses and gradients, and
    goes on to the next chunk. The head computes the loss itself, since a sharding strategy has its whole weight only
    while it runs.
    """

    labels: Tensor | None = None
    """The label of each position, (B, T); None to return logits."""
    result: Tensor | None = None
    """What the head returned last."""
    is_checked = False
    """Whether the model is known to return what its head returns."""

    @staticmethod
    def put_into(model: Any) -> None:
        """Makes a model's head one. Refuses a model without such a head, and a torch without such a loss."""
        if not hasattr(F, "linear_cross_entropy"):
            raise ConfigurationError(
                f"chunked_loss needs torch.nn.functional.linear_cross_entropy of torch 2.13, and this is torch "
                f"{torch.__version__}. Upgrade torch, or set chunked_loss=False."
            )
        base = base_model(model)
        head = base.get_output_embeddings()
        if type(head) not in (nn.Linear, ChunkedHead) or not shifts_labels(model):
            raise ConfigurationError(
                f"chunked_loss is for causal models whose head is an nn.Linear without adapters, and that of "
                f"{type(base).__name__} is {type(head).__module__}.{type(head).__name__}. Set chunked_loss=False."
            )
        if getattr(base.config, "output_router_logits", False):
            raise ConfigurationError(
                "chunked_loss replaces the model's own loss, and with it the auxiliary loss of its experts. Set "
                "chunked_loss=False, or config.output_router_logits=False."
            )
        head.__class__ = ChunkedHead

    def forward(self, hidden: Tensor) -> Tensor:  # (B, T, H)
        if self.labels is None:
            return super().forward(hidden)
        if hasattr(self.weight, "placements"):
            raise ConfigurationError(
                "chunked_loss needs the whole weight of the head, which tensor parallel splits. Set chunked_loss=False."
            )
        weight = self.weight
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        losses: Tensor = F.linear_cross_entropy(
            hidden.flatten(0, -2),
            weight,
            self.labels.flatten(),
            linear_bias=self.bias,
            # Added up in float32 below: a sum in bfloat16 has two digits.
            reduction="none",
            ignore_index=IGNORED,
            options=nn.LinearCrossEntropyOptions(),
        )
        loss = losses.float().sum()
        self.result = loss.detach()
        return loss

    def loss_of(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Returns the sum of the losses over a batch's labels, and the model's outputs, which have no logits.

        If the inputs have `shift_labels`, these count instead. The first batch shows whether the model changes logits.
        """
        inputs = dict(inputs)
        labels, shifted = inputs.pop("labels"), inputs.pop("shift_labels", None)
        self.labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted
        try:
            outputs = model(**inputs)
        finally:
            self.labels = None
        loss: Tensor = outputs["logits"]
        own, self.result = self.result, None
        # The comparison reads both from the device, so only once.
        if not self.is_checked and (own is None or loss.ndim or not torch.equal(loss.detach(), own)):
            raise ConfigurationError(
                "chunked_loss: the model changes the logits after its head, for example by soft-capping, and would be "
                "trained without that. Set chunked_loss=False."
            )
        self.is_checked = True
        return loss, {name: outputs[name] for name in outputs if name != "logits"}


@dataclass(frozen=True)
class Sizes:
    """What the inputs of a model must fit, so that a wrong tokenizer or label is one clear error before the first step.

    Attributes:
        tokens: rows of the input embeddings; None if inputs are no tokens.
        classes: number of classes of the labels; None if they are no classes.
        length: the longest sequence; None without a limit.
    """

    tokens: int | None = None
    classes: int | None = None
    length: int | None = None

    @classmethod
    def of(cls, model: Any) -> Sizes:
        """Returns the sizes of a transformers model."""
        tokens, classes = (_rows(getattr(model, f"get_{end}_embeddings", None)) for end in ("input", "output"))
        config = model.config
        if classes is None and getattr(config, "problem_type", None) not in (
            "regression",
            "multi_label_classification",
        ):
            labels = getattr(config, "num_labels", 0)
            classes = labels if labels > 1 and "Classification" in type(model).__name__ else None
        return cls(tokens, classes, _positions(model))

    def check_length(self, batch: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if a sequence is longer than the model's positions."""
        ids = batch.get("input_ids")
        if self.length is None or not isinstance(ids, Tensor) or "position_ids" in batch:
            # Positions of packed sequences begin again with each.
            return
        if ids.shape[-1] > self.length:
            raise ConfigurationError(
                f"a sequence has {ids.shape[-1]} tokens, and the model {self.length} positions. Tokenize with "
                f"truncation=True, max_length={self.length}; a model with rotary positions takes more if you raise "
                "config.max_position_embeddings."
            )

    def check_values(self, batch: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for token or class numbers that the model lacks."""
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if self.tokens is not None and isinstance(ids, Tensor) and ids.numel() and int(ids.max()) >= self.tokens:
            raise ConfigurationError(
                f"the batch has the token {int(ids.max())}, and the model {self.tokens} embeddings: the tokenizer does "
                "not fit. Pass HFModule the tokenizer as processing_class, which resizes the embeddings, or use the "
                "model's own."
            )
        if self.classes is None or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= self.classes))]
        if wrong.numel():
            raise ConfigurationError(
                f"the batch has the label {int(wrong[0])}, and the model has the classes 0 to {self.classes - 1}. Use "
                f"{IGNORED} for labels to ignore; num_labels in the model's configuration sets the number of classes."
            )


def _positions(model: nn.Module) -> int | None:
    """Returns the model's number of positions: the rows of a learned table, else what its configuration says."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and name.endswith(("position_embeddings", "wpe", "embed_positions")):
            # RoBERTa counts positions from behind the padding's.
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    return positions


def _rows(embeddings: Any) -> int | None:
    try:
        weight = embeddings().weight
    except (AttributeError, NotImplementedError, TypeError):
        # Models of images and sound have no embeddings of tokens.
        return None
    return int(weight.shape[0]) if weight.ndim == 2 else None


def loss_of(outputs: Any) -> Tensor:
    """Returns the loss in a model's outputs: a mapping with `loss`, or a tuple that begins with it."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"the model returned no loss, only {', '.join(outputs)}. Add 'labels' to the batch (a collator such as "
            "DataCollatorForLanguageModeling makes them), choose a class with a head by model_class, or pass "
            "compute_loss_func."
        )
    return loss


@torch.no_grad()
def check_packing(model: Any, device: torch.device) -> None:
    """Raises ConfigurationError if documents in one row see each other, although positions begin anew with each.

    Some models make no mask from positions. Changes one of two documents, and compares what the model says of the
    other.
    """
    takes_cache = "use_cache" in inspect.signature(base_model(model).forward).parameters
    options: dict[str, Any] = {"use_cache": False} if takes_cache else {}
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        one, other = (
            model(input_ids=torch.tensor([ids], device=device), position_ids=positions, **options).logits[0, 2:]
            for ids in ([0, 1, 1, 0], [1, 0, 1, 0])
        )
    finally:
        for part, is_training in modes.items():
            part.training = is_training
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-5):
        raise ConfigurationError(
            f"{type(base_model(model)).__name__} does not tell packed documents apart by position_ids: each would see "
            "those before it in its row. Train on padded rows with an attention_mask, or use a model such as Llama or "
            "Qwen, which does."
        )
