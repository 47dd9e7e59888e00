"""HFModule: trains a model of transformers under any strategy, with the loss of transformers' Trainer."""

from __future__ import annotations

import inspect
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leyden.callbacks.base import Callback
from leyden.callbacks.throughput_monitor import ThroughputMonitor
from leyden.checkpoint.checkpoint_ranks import CheckpointRanks
from leyden.checkpoint.frozen import FrozenPart, digests_of
from leyden.checkpoint.hugging_face import HuggingFaceFolder
from leyden.checkpoint.reader import CheckpointReader
from leyden.core.errors import ConfigurationError, kind_of, nearest, needs
from leyden.hf.adapters import (
    check_base,
    check_prompt,
    is_prompt,
    merged_model,
    plain_config,
    whole_copy,
    with_adapters,
)
from leyden.hf.generation import COLUMNS, Generator, SampleTable, generate_arguments
from leyden.hf.loss import (
    ChunkedHead,
    Sizes,
    averages_items,
    base_model,
    check_packing,
    count_items,
    label_names,
    loss_of,
    router_correction,
    router_loss_weight,
    shifts_labels,
    smoothed_loss,
)
from leyden.hf.metrics import Predictions
from leyden.optim import Muon, parameter_groups, split_parameters
from leyden.strategies.base import Strategy
from leyden.trainer.engine.toggling import evaluation_weights
from leyden.trainer.module import TrainModule

_HUB = ("revision", "token", "cache_dir")
"""The arguments in `model_kwargs` that choose what is downloaded."""
_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|[._])norm(\.|$)", re.IGNORECASE)
"""Names of parameters without weight decay, as in transformers' Trainer; nor do those of nn.LayerNorm decay."""


class HFModule(TrainModule):
    """A model of transformers with its loss, optimizer and learning-rate schedule.

    The loss is that of transformers' Trainer: a mean over the labels of the whole accumulation window on all ranks
    that are not -100, where the model averages over labels; else a mean over the batch. Every batch counts by its
    labels, so an auxiliary loss is averaged too; in training, that which balances a mixture of experts
    (`output_router_logits`) counts the tokens of all ranks, under FSDP and on a mesh. Batches are dicts, as the
    collators of transformers make them. Logs `loss`, `val_loss` and `test_loss`.

    Args:
        model: a model of transformers, or the name of a folder or repository that `from_pretrained` accepts. With a
            name, the model is built when a run starts, and under a sharding strategy each rank reads only its part.
        processing_class: the tokenizer or processor, which is saved with the model. If a tokenizer has more tokens than
            the model has embeddings, the embeddings are resized.
        model_class: a class of transformers for `model` as a name, or that class's name, such as
            "AutoModelForSequenceClassification"; `load_from_checkpoint` needs a class again, and finds a name. Default:
            the class in the folder's config.json.
        model_kwargs: arguments of `from_pretrained` for `model` as a name, such as `{"num_labels": 3}`.
        lr: the highest learning rate.
        optimizer: a name in `torch.optim`, in any case, or a callable that gets the parameter groups and `lr=`. "muon"
            is `leyden.optim.Muon`, with AdamW for what is no matrix.
        weight_decay: weight decay of all parameters but biases and norms.
        scheduler: a name that `transformers.get_scheduler` accepts; a callable that gets the optimizer and the number
            of steps; or None for a constant learning rate.
        scheduler_kwargs: further arguments of the schedule with that name, such as `{"num_cycles": 2}`.
        warmup_steps: steps in which the learning rate grows from 0; below 1, a fraction of all steps.
        compute_loss_func: a function of `(outputs, labels, num_items_in_batch=)` that returns the sum over the labels
            divided by `num_items_in_batch`.
        label_smoothing: the share of each target that is spread over all classes.
        chunked_loss: compute a causal model's loss in chunks of tokens, so that the logits of a batch, which are large
            with a long vocabulary, are never in memory at once. Outputs of training have no logits. Needs torch 2.13.
        compute_metrics: a function of a `transformers.EvalPrediction` that returns metrics by name. Called once per
            validation with the predictions for all samples on all ranks, in their order. Logged as `val_…`.
        preprocess_logits_for_metrics: a function of `(logits, labels)` whose result is kept for `compute_metrics`.
        generation: how the model generates in validation and test: True for its own generation config, a
            `transformers.GenerationConfig`, or a mapping of generate()'s arguments, such as `{"max_new_tokens": 20}`.
            `compute_metrics` then gets the generated tokens in place of logits, as with `predict_with_generate` of
            transformers' Seq2SeqTrainer. The prompt of a causal model is the part of a row before its first label.
        generation_samples: the number of rows in the table of prompts, generated texts and labels that each validation
            sends to loggers with `log_table`; `processing_class` decodes them. 0 for no table.
        throughput: log tokens per second, padding included, the share of the device's peak rate (MFU) and the peak
            memory, and show them in the progress bar.
        peft_config: a configuration of peft, such as `LoraConfig`, or its `to_dict()`, for training adapters. For
            checkpoints without the model under them, use `ModelCheckpoint(trainable_only=True)`.

    Raises:
        ConfigurationError: if an argument is invalid.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> module = HFModule(model, lr=1e-3, scheduler="cosine", warmup_steps=0.1)
        >>> ids = torch.arange(8).view(2, 4)
        >>> module.training_step({"input_ids": ids, "labels": ids}, 0)["num_items"]
        tensor(6)
    """

    balances_over_ranks = True
    """`MeshStrategy(ep=…)` leaves the balance loss of the model in it to this module."""
    gathers_shards = True
    """Sharding strategies leave `save_pretrained` as it is: all ranks call it, and it gathers."""

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str],
        processing_class: Any = None,
        *,
        model_class: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        lr: float = 5e-5,
        optimizer: str | Callable[..., Optimizer] = "adamw",
        weight_decay: float = 0.0,
        scheduler: str | Callable[..., Any] | None = "linear",
        scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: float = 0,
        compute_loss_func: Callable[..., Tensor] | None = None,
        label_smoothing: float = 0.0,
        chunked_loss: bool = False,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        generation: Any = None,
        generation_samples: int = 4,
        throughput: bool = False,
        peft_config: Any = None,
    ) -> None:
        super().__init__()
        with needs("transformers", "hf", "HFModule"):
            import transformers  # noqa: F401
        if not 0 <= label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={label_smoothing}: use a share from 0 to below 1.")
        if warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps={warmup_steps}: use a number of steps, or a fraction below 1.")
        if label_smoothing and compute_loss_func is not None:
            raise ConfigurationError("label_smoothing has no effect with compute_loss_func. Pass one of the two.")
        if generation_samples < 0:
            raise ConfigurationError(f"generation_samples={generation_samples}: use a number of rows, or 0.")
        if chunked_loss and (label_smoothing or compute_loss_func is not None):
            other = "label_smoothing" if label_smoothing else "compute_loss_func"
            raise ConfigurationError(f"chunked_loss does not work with {other}. Pass one of the two.")
        is_model = isinstance(model, nn.Module)
        if is_model and (model_class is not None or model_kwargs):
            raise ConfigurationError(
                "model_class and model_kwargs are for a model that is given by name. Build this one with them instead."
            )
        if peft_config is not None:
            peft_config = plain_config(peft_config)
        self.save_hyperparameters(
            *(() if is_model else ("model", "model_kwargs")),
            "scheduler_kwargs",
            *(("model_class",) if isinstance(model_class, str) else ()),
            *("lr", "weight_decay", "warmup_steps", "label_smoothing", "chunked_loss"),
            *(("peft_config",) if peft_config is not None else ()),
            *(("optimizer",) if isinstance(optimizer, str) else ()),
            *(("scheduler",) if scheduler is None or isinstance(scheduler, str) else ()),
        )
        self.model: Any = model if is_model else None
        self.processing_class = processing_class
        self.lr, self.optimizer, self.weight_decay = lr, optimizer, weight_decay
        self.scheduler, self.scheduler_kwargs, self.warmup_steps = scheduler, scheduler_kwargs, warmup_steps
        self.compute_loss_func, self.label_smoothing = compute_loss_func, label_smoothing
        self.chunked_loss = chunked_loss
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.generation_samples, self.throughput, self.peft_config = generation_samples, throughput, peft_config
        self._name = None if is_model else os.fspath(model)  # type: ignore[arg-type]
        self._model_class, self._model_kwargs = model_class, dict(model_kwargs or {})
        self._unread: Path | None = None
        self._counts_items = self._shifts = self._takes_items = self._takes_cache = False
        self._sizes = Sizes()
        self._label_names: list[str] = []
        self._is_checked = False
        self._checks_routers = True
        self._predictions: dict[int, Predictions] = {}
        self._generation = generate_arguments(generation)
        self._generator: Generator | None = None
        self._samples: dict[int, SampleTable] = {}
        if is_model:
            if not hasattr(base_model(model), "config"):
                raise ConfigurationError(
                    f"HFModule trains a model of transformers, not {kind_of(model)}. Subclass TrainModule for your own."
                )
            self._finish()

    # building ---------------------------------------------------------------------------------------------------------
    def prepare_data(self) -> None:
        if self._name is not None and not Path(self._name).is_dir():
            self._download()

    def configure_model(self) -> None:
        if self.model is None:
            self._build()
            self._finish()
        if self._trainer is None:
            return
        if self._generator is not None:
            self._generator.check_strategy(self._trainer.strategy)
        if is_prompt(self.model):
            check_prompt(self.model, self._trainer.strategy)

    def _finish(self) -> None:
        """Prepares the model for training: embeddings, adapters, and how it counts its loss."""
        check_base(self.model)
        self._resize_embeddings()
        if self.peft_config is not None:
            self.model = with_adapters(self.model, self.peft_config, is_read=self._unread is None)
        self._settle()
        # from_pretrained returns a model in eval mode.
        self.model.train()

    def _build(self) -> None:
        import transformers
        from transformers.initialization import no_init_weights

        folder = self._folder()
        config, kwargs = transformers.AutoConfig.from_pretrained(
            folder, return_unused_kwargs=True, **self._model_kwargs
        )
        model_class: Any = self._model_class or (config.architectures or ("",))[0]
        if isinstance(model_class, str):
            name, model_class = model_class, getattr(transformers, model_class, None)
        if model_class is None:
            where = "model_class" if self._model_class else f"config.json of {folder}"
            raise ConfigurationError(
                f"transformers has no class {name!r}, which {where} names. Pass model_class, such as "
                "model_class='AutoModelForCausalLM'."
            )
        if torch.empty(0).device.type != "meta":
            self.model = model_class.from_pretrained(folder, **self._model_kwargs)
            return
        # The strategy shards the model before it has values; each rank then reads its part.
        build = getattr(model_class, "from_config", None) or model_class._from_config
        taken = {name: value for name, value in kwargs.items() if name not in (*_HUB, "subfolder")}
        try:
            with no_init_weights():
                self.model = build(config, **taken)
        except TypeError as error:
            raise ConfigurationError(
                f"model_kwargs: a sharding strategy builds the model from its configuration, which takes none of "
                f"{', '.join(taken)}, but dtype and attn_implementation. Save the model as it should start, and pass "
                f"that folder. {error}"
            ) from error
        self._unread = folder / self._model_kwargs.get("subfolder", "")
        self._initialize_missing(self._unread)
        if (self._unread / "generation_config.json").is_file() and self.model.can_generate():
            self.model.generation_config = transformers.GenerationConfig.from_pretrained(self._unread)

    def _initialize_missing(self, folder: Path) -> None:
        """Initializes the tensors that a folder lacks, such as a new head. Those that will be read are not drawn."""
        read = HuggingFaceFolder(folder).within(self.model).names()
        state = self.model.state_dict(keep_vars=True)
        for name in state.keys() & set(read):
            # The mark by which transformers leaves out what is loaded.
            state[name]._is_hf_initialized = True
        # Restores the random state: adapters start as they do where the whole model is read.
        with torch.random.fork_rng(devices=[]):
            self.model.init_weights()

    def _folder(self) -> Path:
        assert self._name is not None
        folder = Path(self._name) if Path(self._name).is_dir() else self._download(local_files_only=True)
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ConfigurationError(
                f"{folder} holds adapters without their model. Load them with PeftModel.from_pretrained(base, folder, "
                "is_trainable=True), and pass the result."
            )
        return folder

    def _download(self, **kwargs: Any) -> Path:
        """Returns the folder of a repository on the hub, downloaded unless it is there."""
        from huggingface_hub import snapshot_download

        name = str(self._name)
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigurationError(f"HFModule({name!r}): there is no such folder.")
        chosen = {key: self._model_kwargs[key] for key in _HUB if key in self._model_kwargs}
        try:
            return Path(snapshot_download(name, allow_patterns=_FILES, **chosen, **kwargs))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"HFModule({name!r}): it is neither a folder, nor a repository that can be downloaded or is in the "
                f"cache. {error}"
            ) from error

    def configure_weights(self, load: Callable[[str | Path], None]) -> None:
        if self._unread is not None:
            load(self._unread)
            self._unread = None

    def _resize_embeddings(self) -> None:
        tokens = len(self.processing_class) if hasattr(self.processing_class, "get_vocab") else 0
        rows = self.model.get_input_embeddings().weight.shape[0] if tokens else 0
        if tokens <= rows:
            return
        if self._unread is not None:
            raise ConfigurationError(
                f"the tokenizer has {tokens} tokens and the model {rows} embeddings, which cannot be resized before "
                "their shards are read. Call model.resize_token_embeddings(len(tokenizer)), save the model with "
                "save_pretrained, and pass that folder."
            )
        self.model.resize_token_embeddings(tokens)

    def _settle(self) -> None:
        """Takes from the model how it counts its loss."""
        base = base_model(self.model)
        self._takes_items = averages_items(base)
        self._counts_items = self._takes_items or self.compute_loss_func is not None
        self._takes_cache = "use_cache" in inspect.signature(base.forward).parameters
        self._shifts = shifts_labels(base)
        self._sizes = Sizes.of(base)
        self._label_names = label_names(base)
        if self._generation is not None:
            self._generator = Generator(self._generation, self.model, self.processing_class)
        is_multi_label = getattr(base.config, "problem_type", None) == "multi_label_classification"
        own_loss = "label_smoothing" if self.label_smoothing else "chunked_loss" if self.chunked_loss else ""
        if own_loss and (is_prompt(self.model) or is_multi_label):
            kind = "prompts that are learned" if is_prompt(self.model) else "several labels per sample"
            raise ConfigurationError(f"{own_loss} does not work with {kind}. Leave it out.")
        if self.chunked_loss:
            ChunkedHead.put_into(self.model)
        if self.label_smoothing and getattr(base.config, "output_router_logits", False):
            raise ConfigurationError(
                "label_smoothing replaces the model's own loss, and with it the auxiliary loss of its experts. Set "
                "label_smoothing=0, or config.output_router_logits=False."
            )

    # steps ------------------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._sizes.check_length(batch)
        if not self._is_checked:
            # Reads the batch back from the device, so only the first one.
            self._sizes.check_values(batch)
            if self._is_packed(batch) and self.trainer.strategy.replicates:
                check_packing(self.model, self.device)
            self._is_checked = True

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Any:
        num_items = self.count_items(batch)
        if num_items is None:
            loss, _ = self.compute_loss(batch)
            self.log("loss", loss, prog_bar=True)
            return loss
        # The loss of a batch without labels is 0, not 0 / 0.
        divisor = num_items.clamp(min=1)
        loss, _ = self.compute_loss(batch, divisor)
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss * divisor, "num_items": num_items}

    def count_items(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Returns the number of labels that the loss averages over; None if it is a mean over the batch."""
        return count_items(batch, self._shifts) if self._counts_items else None

    def compute_loss(self, batch: Mapping[str, Any], num_items: Tensor | None = None) -> tuple[Tensor, Any]:
        """Returns the loss of a batch and the model's outputs.

        Args:
            batch: the model's inputs.
            num_items: the number that the sum over the labels is divided by; None for the batch's own.
        """
        inputs = dict(batch)
        labels = inputs.pop("labels", None) if self.compute_loss_func or self.label_smoothing else None
        if labels is not None and "decoder_input_ids" not in inputs:
            # Models that shift their decoder's inputs make them from the labels, which they do not get here.
            shift = getattr(base_model(self.model), "prepare_decoder_input_ids_from_labels", None)
            inputs |= {} if shift is None else {"decoder_input_ids": shift(labels=labels)}
        shifts = self._shifts
        if self.label_smoothing and "shift_labels" in inputs:
            labels, shifts = inputs.pop("shift_labels"), False
        if self._is_packed(inputs) and self._takes_cache:
            # With a cache of keys and values, models ignore that positions begin anew: documents would see each other.
            inputs["use_cache"] = False
        if self.chunked_loss and num_items is not None and (self.training or self.compute_metrics is None):
            loss, outputs = self._head.loss_of(self, inputs)
            return loss / num_items, outputs
        if self._takes_items and num_items is not None:
            inputs["num_items_in_batch"] = num_items
        outputs = self(**inputs)
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels, num_items_in_batch=num_items), outputs
        if labels is not None:
            return smoothed_loss(outputs.logits, labels, self.label_smoothing, shifts, num_items), outputs
        loss = loss_of(outputs)
        if self._balances_over_ranks and self.training and torch.is_grad_enabled():
            items = self.count_items(batch) if num_items is not None else None
            items = loss.new_tensor(len(batch["labels"])) if items is None else items
            strategy, mask = self.trainer.strategy, batch.get("attention_mask")
            loss = loss + router_correction(self.model, outputs, mask, items, strategy, self._checks_routers)
            self._checks_routers = False
        return loss, outputs

    @property
    def _balances_over_ranks(self) -> bool:
        """Whether ranks have tokens of their own that the model's loss would balance apart from those of the others."""
        return (
            self._trainer is not None
            and self._trainer.strategy.data_size > 1
            and self.compute_loss_func is None
            and router_loss_weight(self.model) != 0
        )

    def on_fit_start(self) -> None:
        if not self._balances_over_ranks:
            return
        from leyden.strategies import FSDPStrategy

        strategy = self.trainer.strategy
        if not isinstance(strategy, FSDPStrategy):
            raise ConfigurationError(
                f"the model adds a loss that balances its experts (output_router_logits), and with "
                f"strategy={strategy.name!r} it would be that of each rank's own tokens. Use strategy='fsdp' or "
                "MeshStrategy(dp_replicate=…, dp_shard=1), which count the tokens of all ranks, or set "
                "model.router_aux_loss_coef = 0."
            )

    @property
    def _head(self) -> ChunkedHead:
        head: ChunkedHead = base_model(self.model).get_output_embeddings()
        return head

    @staticmethod
    def _is_packed(batch: Mapping[str, Any]) -> bool:
        """Returns True if a model is to make its mask from the positions, which begin anew with each document."""
        return {"input_ids", "position_ids"} <= batch.keys() and "attention_mask" not in batch

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._evaluate(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> Any:
        outputs = self(**batch)
        # A cache of keys and values would stay in memory for the whole data set.
        return {name: outputs[name] for name in outputs if name not in self._ignored}

    @property
    def _ignored(self) -> Sequence[str]:
        """Names of outputs that are no predictions, as in transformers' Trainer."""
        return getattr(base_model(self.model).config, "keys_to_ignore_at_inference", ["past_key_values"])

    def _evaluate(self, batch: Mapping[str, Any], stage: str) -> Any:
        outputs = self._evaluate_loss(batch, stage)
        if self._generator is None:
            return outputs
        strategy = None if self._trainer is None else self._trainer.strategy
        return {"generated": self._generator.generate(self.model, batch, strategy)}

    def _evaluate_loss(self, batch: Mapping[str, Any], stage: str) -> Any:
        if self.compute_loss_func is None and not any(name in batch for name in self._label_names):
            return self(**batch)
        num_items = self.count_items(batch)
        divisor = None if num_items is None else num_items.clamp(min=1)
        loss, outputs = self.compute_loss(batch, divisor)
        weight: Any = num_items
        self.log(f"{stage}_loss", loss, batch_size=weight, prog_bar=True)
        return outputs

    # throughput -------------------------------------------------------------------------------------------------------
    def configure_callbacks(self) -> list[Callback]:
        callbacks = [] if self._trainer is None else self._trainer.callbacks
        if not self.throughput or any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
            return []
        return [ThroughputMonitor(_row_count, _token_count, window_size=20, prog_bar=True)]

    def flops_per_batch(self, batch: Mapping[str, Any]) -> float | None:
        """Returns the operations of forward and backward, without those that activation checkpointing repeats.

        Six for each token and each parameter of a matrix product, four if it is frozen, and those of attention (PaLM,
        https://arxiv.org/abs/2204.02311, appendix B). A token counts with the experts that it takes.

        Returns:
            None if they are unknown: for an encoder-decoder, whose parts see different lengths, a model without tokens,
            and experts whose numbers its configuration names differently.
        """
        config = getattr(base_model(self.model).config, "get_text_config", lambda: None)()
        tokens = _token_count(batch)
        if config is None or not tokens or config.is_encoder_decoder:
            return None
        head = base_model(self.model).get_output_embeddings()
        tables = {id(part.weight) for part in self.modules() if isinstance(part, nn.Embedding)}
        tables -= set() if head is None else {id(head.weight)}
        products = {name: p for name, p in self.named_parameters() if p.ndim > 1 and id(p) not in tables}
        counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
        experts, taken = next(filter(None, counts), 0), getattr(config, "num_experts_per_tok", 0)
        share = taken / experts if experts else 0.0
        if not share and any(".experts." in name for name in products):
            return None
        per_token = sum(
            p.numel() * (6 if p.requires_grad else 4) * (share if ".experts." in name else 1)
            for name, p in products.items()
        )
        layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
        return float(tokens * (per_token + 12 * layers * width * batch["input_ids"].shape[-1]))

    # optimizers -------------------------------------------------------------------------------------------------------
    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self._parameter_groups())
        if self.scheduler is None:
            return optimizer
        scheduler = self._make_scheduler(optimizer)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _parameter_groups(self) -> list[dict[str, Any]]:
        norms = {id(p) for part in self.modules() if isinstance(part, nn.LayerNorm) for p in part.parameters()}

        def decays(name: str, parameter: nn.Parameter) -> bool:
            return id(parameter) not in norms and not _UNDECAYED.search(name)

        make_groups = split_parameters if self._uses_muon else parameter_groups
        return make_groups(self, weight_decay=self.weight_decay, decays=decays)

    @property
    def _uses_muon(self) -> bool:
        return isinstance(self.optimizer, str) and self.optimizer.lower() == "muon"

    def _make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        if not isinstance(self.optimizer, str):
            return self.optimizer(groups, lr=self.lr)
        if self._uses_muon:
            return Muon(groups, lr=self.lr, adjust_lr_fn="match_rms_adamw")
        classes = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        kind = classes.get(self.optimizer.lower())
        if kind is None or kind is Optimizer:
            raise ConfigurationError(
                f"optimizer={self.optimizer!r} is not in torch.optim. {nearest(self.optimizer.lower(), classes)} A "
                "callable that gets the parameter groups and lr= works too."
            )
        made: Optimizer = kind(groups, lr=self.lr)
        return made

    def _make_scheduler(self, optimizer: Optimizer) -> Any:
        steps = self.trainer.estimated_stepping_batches
        if not isinstance(self.scheduler, str):
            assert self.scheduler is not None
            return self.scheduler(optimizer, steps)
        if math.isinf(steps) and (self.warmup_steps % 1 or not self.scheduler.startswith(("constant", "reduce"))):
            raise ConfigurationError(
                f"scheduler={self.scheduler!r} needs the number of steps, and this run has no end. Set max_steps or "
                "max_epochs, or use scheduler='constant_with_warmup'."
            )
        if self.scheduler == "greedy":
            raise ConfigurationError("scheduler='greedy' is not here. Use 'reduce_lr_on_plateau'.")
        from transformers import get_scheduler

        warmup = math.ceil(steps * self.warmup_steps) if self.warmup_steps < 1 else int(self.warmup_steps)
        total = None if math.isinf(steps) else int(steps)
        try:
            return get_scheduler(self.scheduler, optimizer, warmup, total, dict(self.scheduler_kwargs or {}))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"scheduler={self.scheduler!r}: {error}") from error

    # metrics ----------------------------------------------------------------------------------------------------------
    def on_validation_epoch_start(self) -> None:
        self._begin_evaluation()

    def on_test_epoch_start(self) -> None:
        self._begin_evaluation()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._keep(outputs, batch, dataloader_idx)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._keep(outputs, batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val", len(self.trainer.num_val_batches))

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test", len(self.trainer.num_test_batches))

    def _begin_evaluation(self) -> None:
        self._predictions.clear()
        self._samples.clear()
        if self._generator is not None:
            self._generator.begin()

    def _samples_of(self, loader: int) -> SampleTable:
        return self._samples.setdefault(loader, SampleTable(self.generation_samples))

    def _predictions_of(self, loader: int) -> Predictions:
        return self._predictions.setdefault(loader, Predictions(self.preprocess_logits_for_metrics, self._label_names))

    def _keep(self, outputs: Any, batch: Mapping[str, Any], loader: int) -> None:
        if self.compute_metrics is not None:
            self._predictions_of(loader).add(outputs, batch, self._ignored)
        samples = self._samples_of(loader)
        if self._generator is not None and samples.missing and isinstance(outputs, Mapping) and "generated" in outputs:
            prompts = self._generator.prompts(batch, samples.missing)
            samples.add(prompts, outputs["generated"], batch.get("labels"))

    def _log_evaluation(self, stage: str, loaders: int) -> None:
        """Logs metrics and samples of each loader. A rank without a sample takes part in the exchange too."""
        trainer = self.trainer
        shows_samples = self._generator is not None and self.generation_samples and not trainer.sanity_checking
        for loader in range(loaders):
            suffix = f"/dataloader_idx_{loader}" if loaders > 1 else ""
            if self.compute_metrics is not None:
                metrics = self._predictions_of(loader).compute(self.compute_metrics, trainer.strategy)
                for name, value in metrics.items():
                    self.log(f"{stage}_{name.removeprefix('eval_')}{suffix}", value, sync_dist=False)
            rows = self._samples_of(loader).rows(trainer.strategy, self.processing_class) if shows_samples else None
            for logger in trainer.loggers if rows else ():
                if hasattr(logger, "log_table"):
                    logger.log_table(f"{stage}_samples{suffix}", list(COLUMNS), rows, step=trainer.global_step)
        self._predictions.clear()
        self._samples.clear()

    # saving -----------------------------------------------------------------------------------------------------------
    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        merged: bool = False,
        ckpt_path: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a folder that `from_pretrained` of transformers reads: weights, configuration, tokenizer.

        All ranks call it. Rank 0 gathers the whole weights and writes them. Of a model with adapters, only the adapters
        are written, for `PeftModel.from_pretrained`.

        Args:
            folder: the folder; created if missing.
            merged: write a whole model with the adapters merged into its weights. The module itself keeps them apart.
            ckpt_path: a checkpoint of this module, whose weights are written in place of the present ones.
            **kwargs: further arguments of the model's `save_pretrained`, such as `max_shard_size`.

        Raises:
            ConfigurationError: if the model is not built yet; with `merged`, if it has no adapters that can be merged.
        """
        if self.model is None:
            raise ConfigurationError("save_pretrained: the model is built when a run starts. Call it after that.")
        if merged and not hasattr(self.model, "get_base_model"):
            raise ConfigurationError("save_pretrained(merged=True): the model has no adapters. Leave merged out.")
        is_whole = merged or not hasattr(self.model, "peft_config")
        if is_whole and (Path(folder) / "adapter_config.json").exists():
            raise ConfigurationError(
                f"{folder} holds adapters, which from_pretrained would add to the model that is saved there. Choose "
                "another folder."
            )
        trainer = self._trainer
        strategy = None if trainer is None else trainer.strategy
        ranks = CheckpointRanks(strategy, folder)
        saved = None if ckpt_path is None else CheckpointReader(ckpt_path)
        if saved is not None:
            self._check_fits(saved, strategy)

        def write() -> None:
            state.update({} if saved is None else saved.model())
            weights = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
            if merged:
                merged_model(self.model, weights).save_pretrained(folder, **kwargs)
            elif is_prompt(self.model):
                whole_copy(self.model, weights).save_pretrained(folder, **kwargs)
            else:
                self.model.save_pretrained(folder, state_dict=weights, **kwargs)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

        with evaluation_weights([] if trainer is None else trainer.optimizers):
            state = self.state_dict() if strategy is None else strategy.full_state_dict(self, rank0_only=True)
            ranks.first(write)

    def _check_fits(self, reader: CheckpointReader, strategy: Strategy | None) -> None:
        """Raises if a checkpoint and this module hold different weights, or different frozen ones."""
        frozen = FrozenPart.read(reader) or FrozenPart()
        now = digests_of(self, strategy, dtypes=frozen.dtypes) if frozen.digests else {}
        frozen.check(reader, self, now, strict=True)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = True,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload by Leyden",
        merged: bool = False,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> str | None:
        """Uploads the model to the hub, with a card that has the last metrics and the hyperparameters.

        All ranks call it, and rank 0 uploads. After an upload that broke off, a second call sends what is missing.

        Args:
            repo_id: the repository, such as "me/model"; created if missing.
            private: whether a new repository is private.
            token: a token of the hub; by default the one that `hf auth login` stored.
            revision: the branch; created if missing.
            commit_message: the message of the commit.
            merged: see `save_pretrained`.
            ckpt_path: see `save_pretrained`.

        Returns:
            The address of the commit on rank 0, None on other ranks.

        Raises:
            huggingface_hub.errors.HfHubHTTPError: if the hub refuses, such as a token that may not write.
        """
        from leyden.hf.sharing import upload

        with tempfile.TemporaryDirectory(prefix="leyden-hub-") as folder:
            self.save_pretrained(folder, merged=merged, ckpt_path=ckpt_path)
            if self._trainer is not None and not self._trainer.is_global_zero:
                return None
            options: Any = {"private": private, "token": token, "revision": revision, "commit_message": commit_message}
            return upload(Path(folder), repo_id, self, **options)


def _row_count(batch: Mapping[str, Any]) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, Tensor)), 0)


def _token_count(batch: Mapping[str, Any]) -> int:
    """Returns the number of tokens, padding included, without reading anything from the device."""
    ids = batch.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0
