"""Generation in validation and test: prompts from batches, the model's `generate`, and samples for the loggers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from leyden.core.errors import ConfigurationError, kind_of, nearest
from leyden.data.rng import isolated_rng, rng_state, set_rng_state
from leyden.hf.loss import IGNORED, base_model, label_names
from leyden.strategies.readers import Readers

if TYPE_CHECKING:
    from leyden.strategies.base import Strategy

COLUMNS = ("prompt", "generated", "label")
"""The columns of a table of samples."""
_NO_PROMPT = frozenset({"position_ids", "shift_labels"})
"""Inputs of a causal model, beside its labels, that do not describe its prompt: `generate` counts positions itself."""


def generate_arguments(generation: Any) -> dict[str, Any] | None:
    """Returns the arguments of `generate` that `HFModule(generation=)` stands for; None if it is off."""
    from transformers import GenerationConfig

    if generation is None or isinstance(generation, bool):
        return {} if generation else None
    if isinstance(generation, GenerationConfig):
        return {"generation_config": generation}
    if isinstance(generation, Mapping):
        return dict(generation)
    raise ConfigurationError(
        f"generation is {kind_of(generation)}: use True, a transformers.GenerationConfig, or a mapping of generate()'s "
        "arguments, such as {'max_new_tokens': 20}."
    )


class Generator:
    """Generates a model's answers to the prompts of a batch.

    The prompt of an encoder-decoder model is its input. That of a causal model is the part of a row before its first
    label; prompts are padded on the left, as `generate` needs them.

    Args:
        arguments: arguments of the model's `generate`.
        model: a model of transformers.
        processing_class: a tokenizer, whose padding token is used if the model names none.

    Raises:
        ConfigurationError: if the model cannot generate, or an argument is unknown or invalid.
    """

    def __init__(self, arguments: Mapping[str, Any], model: Any, processing_class: Any = None) -> None:
        base = base_model(model)
        _check(arguments, base)
        self._arguments = _merged(arguments)
        self._is_causal = not base.config.is_encoder_decoder
        self._unused = {*label_names(base), *_NO_PROMPT} if self._is_causal else {*label_names(base)}
        eos = _setting("eos_token_id", arguments, base)
        self._eos: list[int] = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        # In place of the end's token, on which generate() falls back with a warning per batch.
        named = _setting("pad_token_id", arguments, base)
        found = (named, getattr(processing_class, "pad_token_id", None), *self._eos)
        self._pad: int | None = next((token for token in found if token is not None), None)
        if named is None:
            self._arguments = _merged(self._arguments | {"pad_token_id": self._pad})
        self._rng: dict[str, Any] | None = None

    def check_strategy(self, strategy: Strategy) -> None:
        """Raises ConfigurationError if the strategy cuts the model into stages, or its sequences into parts."""
        if strategy.outputs.are_split:
            raise ConfigurationError(
                "generation does not work with context parallelism, whose ranks hold parts of a prompt. Use a mesh "
                "without cp, or leave out generation, and generate after the fit from what save_pretrained writes."
            )
        if strategy.outputs.are_in_parts:
            raise ConfigurationError(
                "generation does not work in a pipeline, whose ranks hold stages of the model. Use a mesh without pp, "
                "or leave out generation, and generate after the fit from what save_pretrained writes."
            )

    def begin(self) -> None:
        """Begins a pass over the data: what it samples starts from the random state of the run."""
        self._rng = None

    def generate(self, model: Any, batch: Mapping[str, Any], strategy: Strategy | None) -> Tensor:
        """Returns the generated tokens, (B, T), without the prompt of a causal model. After a row's end they are -100.

        Ranks that hold parts of one model go on until the last of them has finished.
        """
        inputs, start = self._inputs(batch)
        shares_weights = strategy is not None and not strategy.replicates and strategy.ranks.world_size > 1
        options = {"synced_gpus": shares_weights} | self._arguments
        # Sampling has random numbers of its own: the weights of a run do not depend on what it generates.
        with isolated_rng():
            if self._rng is not None:
                set_rng_state(self._rng)
            found = _gathering(model)(**inputs, **options)
            self._rng = rng_state()
        sequences: Tensor = found if isinstance(found, Tensor) else found.sequences
        return self._ended(sequences, start)

    def prompts(self, batch: Mapping[str, Any], count: int) -> list[list[int]]:
        """Returns the tokens of the first prompts of a batch; [] each if the model's input is no text."""
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor):
            return [[]] * count
        mask = self._prompt_mask(batch)
        return [row[there].tolist() for row, there in zip(ids[:count], mask[:count], strict=True)]

    def _inputs(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Returns the inputs of `generate`, and the number of tokens with which its sequences start."""
        inputs = {name: value for name, value in batch.items() if name not in self._unused}
        if self._is_causal:
            return self._prompt_inputs(inputs, batch)
        decoder, labels = inputs.get("decoder_input_ids"), batch.get("labels")
        if decoder is not None and (labels is None or decoder.shape != labels.shape):
            # The beginning of the answer.
            return inputs, decoder.shape[1]
        # Those that a collator makes from the labels would give the answer away.
        return {k: v for k, v in inputs.items() if k not in ("decoder_input_ids", "decoder_attention_mask")}, 1

    def _prompt_inputs(self, inputs: dict[str, Any], batch: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        if not isinstance(inputs.get("input_ids"), Tensor):
            raise ConfigurationError("generation: a causal model needs 'input_ids' in the batch.")
        mask = self._prompt_mask(batch)
        lengths = mask.sum(-1)
        if not lengths.all():
            raise ConfigurationError(
                "generation: a row of the batch has no prompt, which is the part before its first label. Set the "
                f"labels of a prompt to {IGNORED}, as encode_chat does, or leave out generation."
            )
        width = int(lengths.max())
        # The prompt's positions come last, in their order.
        order = mask.long().argsort(dim=-1, stable=True)[:, -width:]
        shape = inputs["input_ids"].shape
        aligned = {
            name: value.gather(1, order) if isinstance(value, Tensor) and value.shape == shape else value
            for name, value in inputs.items()
        }
        kept = mask.gather(1, order)
        aligned["input_ids"] = aligned["input_ids"].masked_fill(~kept, self._pad or 0)
        return aligned | {"attention_mask": kept.long()}, width

    def _prompt_mask(self, batch: Mapping[str, Any]) -> Tensor:
        """Returns True for the tokens of each row's prompt, (B, T)."""
        ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))
        assert ids is not None
        is_prompt = mask.bool() if mask is not None and mask.shape == ids.shape else torch.ones_like(ids).bool()
        if self._is_causal and labels is not None:
            is_prompt = is_prompt & ((labels != IGNORED).cumsum(-1) == 0)
        return is_prompt

    def _ended(self, sequences: Tensor, start: int) -> Tensor:
        """Replaces by -100 what fills a row after its end, so that a row does not depend on those beside it."""
        new = sequences[:, start:]
        is_end = torch.isin(new, new.new_tensor(self._eos)) if self._eos else torch.zeros_like(new).bool()
        is_over = is_end.cumsum(-1) - is_end.long() > 0
        if self._pad is not None and self._pad not in self._eos:
            # Rows that a stop string ended.
            is_over |= (new != self._pad).flip(-1).cumsum(-1).flip(-1) == 0
        new = new.masked_fill(is_over, IGNORED)
        return new if self._is_causal else torch.cat([sequences[:, :start], new], dim=-1)


class SampleTable:
    """A table of the first samples of one validation loader: prompt, generated text and label; `count` rows."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._batches: list[list[tuple[list[int], ...]]] = []
        self.missing = count
        """The number of rows that this rank may still contribute."""

    def add(self, prompts: Iterable[list[int]], generated: Tensor, labels: Any) -> None:
        """Keeps the tokens of a batch's first rows: of prompts, of generated text, (B, T), and of labels, (B, T)."""
        answers = generated[: self.missing].tolist()
        wanted = labels[: self.missing].tolist() if isinstance(labels, Tensor) else [[]] * len(answers)
        self._batches.append(list(zip(prompts, answers, wanted, strict=False)))
        self.missing -= len(answers)

    def rows(self, strategy: Strategy, processing_class: Any) -> list[list[str]] | None:
        """Returns the first rows of all ranks as text, on rank 0, and None on other ranks. All ranks call it.

        Without a tokenizer or processor that decodes, the text is the numbers of the tokens.
        """
        gathered = Readers(strategy).gather_object(self._batches)
        if gathered is None:
            return None
        rows = [row for turn in zip_longest(*gathered) for batch in turn for row in batch or ()]
        return [[_text(tokens, processing_class) for tokens in row] for row in rows[: self._count]]


def _text(tokens: Sequence[int], processing_class: Any) -> str:
    kept = [token for token in tokens if token != IGNORED]
    if not hasattr(processing_class, "decode"):
        return " ".join(map(str, kept))
    return str(processing_class.decode(kept, skip_special_tokens=True))


def _check(arguments: Mapping[str, Any], base: Any) -> None:
    import transformers

    config_class: Any = transformers.GenerationConfig
    if not (hasattr(base, "can_generate") and base.can_generate()):
        raise ConfigurationError(
            f"generation: {type(base).__name__} cannot generate. Use a class that can, such as "
            "model_class='AutoModelForCausalLM' or 'AutoModelForSeq2SeqLM', or leave out generation."
        )
    settings = {name for name in vars(config_class()) if not name.startswith("_")}
    functions = (type(base).generate, type(base).forward)
    known = settings.union(*(inspect.signature(function).parameters for function in functions))
    for name in arguments:
        if name not in known:
            raise ConfigurationError(f"generation: generate() takes no {name!r}. {nearest(name, known)}")
    try:
        config_class(**{name: value for name, value in arguments.items() if name in settings})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"generation={dict(arguments)}: {error}") from error
    if (_setting("num_return_sequences", arguments, base) or 1) > 1:
        raise ConfigurationError(
            "generation: metrics compare one answer with each label, and num_return_sequences asks for more. Set it to "
            "1."
        )


def _merged(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `generate` with all settings in the configuration, if there is one: it takes no others."""
    rest = dict(arguments)
    config = copy.deepcopy(rest.pop("generation_config", None))
    return rest if config is None else {"generation_config": config, **config.update(**rest)}


def _setting(name: str, arguments: Mapping[str, Any], base: Any) -> Any:
    """Returns a setting of generation: the argument, else that of the configuration passed, else the model's own."""
    sources = (arguments.get("generation_config"), base.generation_config)
    values = [arguments.get(name), *(getattr(source, name, None) for source in sources)]
    return next((value for value in values if value is not None), None)


def _gathering(model: Any) -> Any:
    """Returns the model's `generate`.

    A strategy that shards gathers the weights in each forward. Those of the model itself, if it is a group of its own,
    must be there before: `generate` calls the encoder without the model's forward.
    """
    if not isinstance(model, FSDPModule):
        return model.generate
    # torch registers a method by name. The attribute is removed again, so the model does not change.
    register_fsdp_forward_method(model, "generate")  # type: ignore[arg-type]
    return model.__dict__.pop("generate")
