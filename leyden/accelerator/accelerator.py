"""Accelerator: Leyden's engine for a training loop that you write, under Hugging Face Accelerate's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from leyden.accelerator.loop.collectives import Collectives
from leyden.accelerator.loop.ending import LoopEnd
from leyden.accelerator.loop.gradient_state import GradientState
from leyden.accelerator.loop.mistakes import hint_at_first_print
from leyden.accelerator.loop.staged import Step, call_with_batch
from leyden.accelerator.loop.stepping import Stepping
from leyden.accelerator.prepared.loader import PreparedLoader, skip_first_batches
from leyden.accelerator.prepared.preparing import Preparing, unwrap
from leyden.accelerator.prepared.scheduler import PreparedScheduler
from leyden.accelerator.ranks import AcceleratorState, DistributedType, RankControl
from leyden.accelerator.records import saving
from leyden.accelerator.records.export import check_object, save_object, write_weights
from leyden.accelerator.records.tracking import GeneralTracker, Trackers
from leyden.accelerator.settings.deepspeed import DeepSpeedPlugin
from leyden.accelerator.settings.options import Options, further
from leyden.accelerator.settings.parallel import ParallelismConfig
from leyden.accelerator.settings.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from leyden.core.errors import ConfigurationError
from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.window import Window
from leyden.trainer.engine import debugging
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.events.preemption import Preemption

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Accelerator(RankControl):
    """Device, precision, accumulation, ranks, checkpoints and trackers for a training loop that you write yourself.

    Five lines of a plain loop change, as `examples/own_loop.py` shows. Names and defaults are Hugging Face
    Accelerate's, except for the differences listed in `docs/from-accelerate.md`. The Trainer drives the same engine.

    Each method delegates to one part: `Stepping` (windows, backward, clipping, steps), `Preparing`, `Collectives`,
    `Trackers`, and `saving` for checkpoints. `RankControl` has those for ranks: `is_main_process`, `print`, ….

    Args:
        device_placement: move models, batches and optimizer state to `device`; False leaves that to you.
        split_batches: see `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16", "bf16", any name that the Trainer's `precision` takes, or a `Precision`.
        gradient_accumulation_steps: batches per optimizer step.
        cpu: run on the CPU even if a GPU is available.
        dataloader_config: a `DataLoaderConfiguration`.
        deepspeed_plugin: a `DeepSpeedPlugin`, to train with DeepSpeed's ZeRO.
        fsdp_plugin: a `FullyShardedDataParallelPlugin`, to shard models.
        torch_tp_plugin: a `TorchTensorParallelPlugin`, equivalent to `ParallelismConfig(tp_size=…)`.
        megatron_lm_plugin: a `MegatronLMPlugin`, which runs tensor and pipeline parallelism on Leyden's own mesh.
        rng_types: generators set to rank 0's state at the start of each pass: "torch", "cuda", "numpy", "python".
            "generator" has no effect: all ranks already share one order of samples.
        log_with: one or several trackers: "tensorboard", "wandb", "csv", "comet_ml", "mlflow", "aim", "clearml",
            "dvclive", "swanlab", "trackio", "all", a Leyden logger, or a `GeneralTracker`.
        project_dir: folder of the run, or its URL in a bucket.
        project_config: a `ProjectConfiguration`.
        gradient_accumulation_plugin: a `GradientAccumulationPlugin`, in place of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: step prepared schedulers when their optimizer steps; False steps at every call.
        kwargs_handlers: objects such as `GradScalerKwargs(init_scale=1024.0)`.
        dynamo_backend: torch.compile backend for prepared models.
        dynamo_plugin: a `TorchDynamoPlugin`, for the backend and torch.compile's other arguments.
        deepspeed_plugins: a dict with one `DeepSpeedPlugin`; several are refused, since one engine drives one model.
        parallelism_config: a `ParallelismConfig`: the number of ranks that replicate, shard and split a model.
        strategy: a name or object, as for the Trainer; "auto" means one device, or "ddp" on launched ranks.
        dispatch_batches: see `DataLoaderConfiguration`.
        even_batches: see `DataLoaderConfiguration`.
        use_seedable_sampler: see `DataLoaderConfiguration`.
        resume: "auto" lets `load_state()` load the newest checkpoint in `project_dir`, or start from scratch if there
            is none. `save_state()` then names checkpoints automatically, and the run locks the folder against others
            (`docs/checkpoints.md`). Not in Accelerate.
        preemption: True or a `Preemption`: `check_preemption` reports SIGTERM, SIGUSR1 or a notice. Not in Accelerate.
        convert_outputs: convert outputs of prepared models to float32 under mixed precision. False halves the memory of
            a language model's logits (8 × 2048 tokens, 50,000 words: 1.6 GB instead of 3.3); `autocast()` computes
            losses in float32 anyway. Not in Accelerate.

    Raises:
        ConfigurationError: for invalid or contradictory arguments.

    Example:
        >>> import torch
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for batch in loader:
        ...     with accelerator.accumulate(model):
        ...         loss = model(batch).mean()
        ...         accelerator.backward(loss)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        strategy: str | Strategy = "auto",
        dispatch_batches: bool | None = None,
        even_batches: bool | None = None,
        use_seedable_sampler: bool | None = None,
        resume: str | None = None,
        preemption: bool | Preemption | None = None,
        convert_outputs: bool = True,
    ) -> None:
        self.options = options = Options(**{name: value for name, value in locals().items() if name != "self"})
        self.project_configuration = options.project
        self._stepping = Stepping(options)
        super().__init__(self._stepping.strategy)
        options.apply(self.strategy)
        if debugging.is_debugging():
            debugging.begin(self._stepping, options.accumulation.num_steps)
        self._collectives = Collectives(self.strategy, self._alone, self._stepping.reading, self._stepping.checker)
        self._preparing = Preparing(self._stepping, options)
        self._trackers = Trackers(log_with, self.strategy.ranks)
        self.registered: list[Any] = []
        self.state_hooks = saving.StateHooks()
        self.saves = saving.saves_of(self.strategy, options)
        self._end = LoopEnd(options.preemption, self._stepping, self.saves.lock)
        hint_at_first_print(self.strategy.ranks)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns what libraries and older scripts read of the settings; see `READ_ELSEWHERE`."""
            return further(self, name)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Accelerator:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        return self.state.__reduce__()

    # settings ---------------------------------------------------------------------------------------------------------
    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16", "bf16", or the full name of another precision."""
        return self.options.name_of(self.precision)

    @property
    def precision(self) -> Precision:
        """The `Precision` object."""
        return self.strategy.precision

    @property
    def device_placement(self) -> bool:
        """True if `prepare` moves objects to `device`."""
        return self.options.device_placement

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are split across ranks; `join_uneven_inputs` overrides it within its block."""
        return self._preparing.data

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._preparing.configure(config)

    @property
    def split_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._preparing.configure(replace(self.dataloader_config, even_batches=even))

    @property
    def use_seedable_sampler(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """See `DataLoaderConfiguration`."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """See `DataLoaderConfiguration`; every loader's position is saved in any case."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def rng_types(self) -> list[str]:
        """Generators that every rank copies from rank 0 before each pass, as passed to the Accelerator."""
        return list(self.options.rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """True if prepared schedulers step when their optimizer steps."""
        return self.options.step_scheduler_with_optimizer

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The DeepSpeed plugin; None without DeepSpeed."""
        return self.options.deepspeed

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The `ParallelismConfig` passed to the Accelerator."""
        return self.options.mesh

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of `parallelism_config`; None without one. `strategy.device_mesh` is the strategy's own mesh."""
        return None if self.options.mesh is None else self.options.mesh.device_mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index in its tensor-parallel group; 0 without tensor parallelism."""
        return self.options.rank_along("tp")

    @property
    def project_dir(self) -> Any:
        """Folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Folder of the trackers."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    # ranks ------------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> AcceleratorState:
        """Ranks, device, precision and plugins, for libraries that read them."""
        return self.options.state(self.strategy)

    @property
    def multi_device(self) -> bool:
        """True if several ranks, each on its own device, hold the whole model."""
        return self.distributed_type.startswith("MULTI_") and self.device.type != "cpu"

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP shards the models; Leyden has only FSDP2."""
        return self.distributed_type is DistributedType.FSDP

    def wait_for_everyone(self) -> None:
        """Blocks until every rank has called this method."""
        self._collectives.wait_for_everyone()

    # prepare ----------------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepares models, optimizers, loaders and schedulers for this run's device, precision and ranks.

        Args:
            *args: the objects, in any order, in one call or several. Objects of other types are returned unchanged,
                including lists: pass a list of batches to `prepare_data_loader`.
            device_placement: one flag per object: True moves it to `device`.

        Returns:
            The prepared objects in the same order; a single object instead of a tuple of one.
        """
        return self._preparing.prepare(args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; `evaluation_mode` skips the wrapping for training."""
        return self._preparing.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepares one optimizer."""
        return self._preparing.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares one scheduler."""
        return self._preparing.scheduler(scheduler)

    def prepare_data_loader(self, data_loader: Iterable[Any], device_placement: bool | None = None) -> PreparedLoader:
        """Prepares one loader."""
        return self._preparing.loader(data_loader, device_placement)

    @property
    def prepared_models(self) -> list[nn.Module]:
        """The models that `prepare` returned."""
        return self._stepping.prepared_models

    @property
    def bare_models(self) -> list[nn.Module]:
        """The prepared models without their DDP, engine or torch.compile wrappers."""
        return self._stepping.bare_models

    @property
    def prepared_optimizers(self) -> list[PreparedOptimizer]:
        """The optimizers that `prepare` returned."""
        return self._stepping.prepared_optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The underlying torch optimizers, as the strategy holds them."""
        return self._stepping.optimizers

    @property
    def prepared_schedulers(self) -> list[PreparedScheduler]:
        """The schedulers that `prepare` returned."""
        return self._preparing.schedulers

    @property
    def prepared_loaders(self) -> list[PreparedLoader]:
        """The loaders that `prepare` returned."""
        return self._preparing.loaders

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Returns the model without its DDP, DataParallel or engine wrapper.

        Args:
            model: the model, prepared or not.
            keep_fp32_wrapper: False restores the original forward, without autocast and output conversion.
            keep_torch_compile: keep a compiled model compiled; False returns the plain module, whose parameter names
                have no prefix.
        """
        return unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns a loader whose passes start at batch `num_batches` of the epoch; earlier batches are not loaded.

        After `load_state`, that batch is the checkpoint's own position, so nothing is skipped twice.
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """Releases all prepared objects and empties the device's cache.

        Returns:
            One None per argument: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        from leyden.accelerator.standalone.memory import release_memory

        self.saves.release()
        self._stepping.release()
        self._preparing.release()
        return release_memory(*objects)

    clear = free_memory

    # the step ---------------------------------------------------------------------------------------------------------
    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Returns a context for one batch of an accumulation window.

        Optimizers and schedulers step, and gradients are synchronized, only in the batch that closes the window. The
        last window of a prepared loader holds the remaining batches, and its loss is divided by their number. A block
        within another belongs to the same batch.

        Args:
            *models: the models being trained; used only to check that they are prepared.
        """
        return self._stepping.accumulate(models)

    def backward(self, loss: Tensor, num_items: Tensor | float | None = None, **kwargs: Any) -> None:
        """Runs backward on a loss, divided by the window's length and scaled for the precision.

        No-op for the loss of a pipeline-parallel model: its backward has already run in the forward call.

        Args:
            loss: a mean; or a sum, with `num_items`.
            num_items: number of items (tokens, samples) that the loss sums over. The gradient is divided by their
                total over the window and all ranks. Not in Accelerate.
            **kwargs: arguments of `Tensor.backward`: `retain_graph`, `create_graph`, `inputs`.
        """
        self._stepping.backward(loss, num_items, **kwargs)

    def pipeline_step(self, model: nn.Module, batch: Any, step: Step = call_with_batch) -> Tensor:
        """Runs forward and backward of one batch through a pipeline (`MeshStrategy(pp=…)`). Not in Accelerate.

        Replaces both the model's call and `backward`; optimizers step after it as usual. Every rank must call it.

        Args:
            model: the model that `prepare` returned.
            batch: a batch of a prepared loader. It is split into micro-batches, and `step` runs once for each.
            step: `step(model, batch)` returns the loss, a dict with `loss` (a sum) and `num_items`, or an output with a
                `loss`; by default the model is called with the batch.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            ConfigurationError: if the model has no pipeline stages, or the step returns no loss.
        """
        return self._stepping.staged_step(self.unwrap_model(model), batch, step)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Unscales gradients, then clips them to a total norm over all shards.

        Returns:
            The total norm before clipping. Inside an accumulation window nothing is clipped yet.
        """
        return self._stepping.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Unscales gradients, then clips each element to ± `clip_value`."""
        self._stepping.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscales gradients in place, so that you can read or change them before a step.

        Args:
            optimizer: one optimizer or several; all if None.
        """
        self._stepping.unscale(optimizer)

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Returns a context in which backward does not synchronize gradients across ranks."""
        return self.strategy.gradient_sync(False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which backward synchronizes gradients, even if its forward ran under `no_sync`."""
        return self._stepping.sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Lets ranks that run out of batches keep taking part in the others' all-reduces, within the block.

        Args:
            joinables: the prepared models.
            even_batches: override of `even_batches` for prepared loaders within the block.
        """
        return self._preparing.joining(joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Returns the context for a forward pass in the run's precision.

        Args:
            autocast_handler: other settings for this block, such as `AutocastKwargs(enabled=False)` for full precision.
        """
        if autocast_handler is None:
            return self._stepping.autocast()
        return self.options.autocast(self.precision, self.device, autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: AbstractSet[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Divides sequences over the ranks of a cp group within the block; without `cp`, does nothing.

        Each rank keeps its part of the buffers, in place, and attention sees the parts of the others. Forward and
        backward both belong into the block, which is made anew for each batch. Afterwards the buffers are whole again.
        See docs/parallel.md for what a model must not do, and how to average a loss over the parts.

        Args:
            buffers: the tensors to cut, such as `input_ids`, `attention_mask` and `shift_labels`.
            buffer_seq_dims: the dimension of the sequence in each of them.
            no_restore_buffers: those that may stay cut.

        Raises:
            ConfigurationError: if the buffers cannot be cut, such as into 2 · cp · tp equal chunks.

        Example:
            >>> import torch
            >>> accelerator, tokens = Accelerator(cpu=True), torch.zeros(1, 8)
            >>> with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
            ...     tokens.shape  # one process: whole
            torch.Size([1, 8])
        """
        return self.strategy.own_loop.in_parts(buffers or (), buffer_seq_dims or (), no_restore_buffers or frozenset())

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Runs torch's profiler around a block; with `output_trace_dir`, each rank writes its trace there."""
        handler = profile_handler or self.options.handlers.get(ProfileKwargs) or ProfileKwargs()
        return handler.around(f"profile_{self.process_index}.json")

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch closes its accumulation window: gradients are synchronized and optimizers step.

        `accumulate` sets it for each batch. A loop that counts its own batches may set it.
        """
        return self._stepping.window.closes

    @sync_gradients.setter
    def sync_gradients(self, closes: bool) -> None:
        self._stepping.close_with_this_batch(closes)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step. Setting it affects the windows that follow."""
        return self.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._stepping.accumulate_over(steps)

    @property
    def accumulation(self) -> GradientAccumulationPlugin:
        """The accumulation settings."""
        return self._stepping.accumulation

    @property
    def gradient_state(self) -> GradientState:
        """The window and the active loader, under the names that libraries read."""
        return GradientState(self._stepping)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the gradient scaler skipped the last step of any optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared_optimizers)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16; None in other precisions."""
        self._stepping.flush_scaler()
        return getattr(self.precision, "scaler", None)

    @property
    def steps(self) -> int:
        """Number of accumulation windows that an optimizer step has closed."""
        return self._stepping.steps

    @property
    def window(self) -> Window:
        """The accumulation window."""
        return self._stepping.window

    @property
    def active_loader(self) -> PreparedLoader | None:
        """The loader being iterated, the innermost if nested; None outside any."""
        return self._stepping.active_loader

    # collectives ------------------------------------------------------------------------------------------------------
    def gather(self, tensor: T) -> T:
        """Concatenates the tensors of all ranks along their first dimension; scalars become (num_processes,).

        The ranks of a tp group have the same samples, so only one of them contributes. This holds for every method that
        gathers or reduces. The ranks of a cp group each contribute their part here and in `reduce`, as in Accelerate;
        in `gather_for_metrics` and `gather_object` only one of them does, except that floating-point numbers, one per
        sample, are averaged over the parts.

        Args:
            tensor: a tensor, or any nested structure of tensors of the same shape on every rank.

        Raises:
            TypeError: on several ranks, for a Python number or any other value that is not a tensor.
            ConfigurationError: if shapes differ across ranks; the collective would read out of bounds.
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers per-sample results of the current batch: each sample once, in the dataset's order.

        In a loader's last batch, duplicates that fill it up are dropped, and ranks may have different numbers of
        samples.

        Args:
            input_data: tensors whose first dimension is the batch size (or a multiple of it), lists with one entry per
                sample, or a nested structure of these. Scalars become (num_processes,). A loss repeated to the full
                batch size is cut to the number of samples in a shorter last batch.
            use_gather_object: gather arbitrary objects; lists are concatenated.

        Raises:
            TypeError: on several ranks, for a Python number or another object that is not per-sample.
        """
        return self._collectives.gather_for_metrics(input_data, use_gather_object)

    def gather_object(self, obj: list[Any]) -> list[Any]:
        """Concatenates the lists of all ranks, in rank order."""
        return self._collectives.gather_object(obj)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduces tensors across ranks.

        Args:
            tensor: a tensor, or any nested structure of tensors of the same shape on every rank.
            reduction: "sum", "mean", "max", "min", or "none" to return the input unchanged.
            scale: factor applied to the result.

        Raises:
            TypeError: for a Python number or any other value that is not a tensor.
        """
        return self._collectives.reduce(tensor, reduction, scale)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Returns rank `src`'s object on every rank."""
        return self._collectives.broadcast(obj, src)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pads tensors to the largest size of one dimension on any rank, so that they can be gathered.

        Args:
            tensor: a tensor, or any nested structure of tensors.
            dim: the dimension to pad; tensors without it are returned unchanged.
            pad_index: padding value.
            pad_first: pad at the start instead of the end.
        """
        return self._collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stacks the tensors of any nested structure across ranks: `(num_processes, *shape)`. Not in Accelerate.

        The ranks of a tp group have the same samples, so only one of them contributes.

        Raises:
            ConfigurationError: if shapes differ across ranks.
        """
        return self._stepping.all_gather(data, group, sync_grads)

    def set_trigger(self) -> None:
        """Sets a flag that `check_trigger` reports on every rank."""
        self._collectives.set_trigger()

    def check_trigger(self) -> bool:
        """Returns True on every rank if any rank has called `set_trigger` since the last True."""
        return self._collectives.check_trigger()

    # checkpoints ------------------------------------------------------------------------------------------------------
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        asynchronous: bool = False,
    ) -> str:
        """Writes a checkpoint of all prepared and registered objects atomically (`docs/checkpoints.md`).

        Inside an accumulation window the save is deferred until the window's last batch has ended (the loop asks the
        loader for the next batch), so that no checkpoint holds half a gradient.

        Args:
            output_dir: the folder. An existing checkpoint there is replaced once the new one is committed. Ignored with
                `automatic_checkpoint_naming`.
            safe_serialization: accepted for Accelerate's scripts; False is refused.
            asynchronous: copy everything now and write it in a background thread. Not in Accelerate.

        Returns:
            The folder.
        """
        if not safe_serialization:
            raise ConfigurationError("save_state(safe_serialization=False) would write a pickle. Leave it out.")
        self._collectives.announce("save_state")
        return str(saving.save_in_time(self, self._stepping, output_dir, asynchronous))

    def finish_saving(self) -> None:
        """Waits for the asynchronous save; raises its error. Every rank must call it. Not in Accelerate."""
        self.saves.wait()

    def write_due(self) -> None:
        """Writes the checkpoint that `save_state` deferred, if the window has closed."""
        self._stepping.run_deferred()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        strict: bool = True,
        *,
        map_location: str | None = None,
        trust: bool = False,
    ) -> None:
        """Loads a checkpoint of `save_state`. Prepare and register the same objects first.

        The next pass over each prepared loader continues from its saved position, with or without `skip_first_batches`.

        Args:
            input_dir: the folder; with `automatic_checkpoint_naming`, None means the newest complete checkpoint.
            load_kwargs: further arguments, as a dict: `strict`, `map_location`, and `weights_only`, which has no effect
                since no pickle is read.
            strict: require the names of the weights to match.
            map_location: "cpu" or "on_device", accepted for Accelerate's scripts. Tensors always go to the device of
                the parameters.
            trust: also read a folder of Accelerate's own `save_state`: models, optimizers, schedulers, scaler,
                registered objects and random states. Its files are pickles, which can run arbitrary code. Loaders start
                from the beginning. Not in Accelerate.
        """
        self._collectives.announce("load_state")
        strict = saving.check_load_arguments(load_kwargs, strict, map_location)
        saving.load(self, input_dir, strict, trust)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to every checkpoint."""
        saving.check_registrable(objects)
        self.registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls `hook(models, weights, output_dir)` in each save; see `StateHooks`."""
        return self.state_hooks.add(self.state_hooks.before_save, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls `hook(models, input_dir)` in each load; see `StateHooks`."""
        return self.state_hooks.add(self.state_hooks.before_load, hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the model's state dict with original names and full tensors. Every rank must call it."""
        self._collectives.announce("get_state_dict")
        bare = self.unwrap_model(model, True, False) if unwrap else model
        return self.strategy.full_state_dict(bare, rank0_only=False)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model's weights in the layout that transformers loads. Every rank must call it.

        Args:
            model: the model, prepared or not.
            save_directory: folder for `model.safetensors`, or for several files and `model.safetensors.index.json`.
            max_shard_size: largest file size, such as "5GB".
            safe_serialization: False writes `pytorch_model.bin`, which holds only tensors.
        """
        writes = self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process
        write_weights(self.get_state_dict(model), save_directory, max_shard_size, safe_serialization, writes)

    def save(
        self,
        obj: Any,
        f: str | os.PathLike[str],
        save_on_each_node: bool = False,
        safe_serialization: bool | None = None,
    ) -> None:
        """Writes tensors and plain values, on the main rank only.

        Args:
            obj: tensors and plain values, such as a state dict.
            f: the file; its suffix selects the format: .safetensors, or torch's for .bin and .pt.
            save_on_each_node: write once per machine instead of once per run.
            safe_serialization: True writes safetensors whatever the suffix.

        Raises:
            LeydenError: on every rank, for any other value, and for shards; `get_state_dict` gathers shards.
        """
        check_object(obj)
        if self.is_local_main_process if save_on_each_node else self.is_main_process:
            save_object(obj, f, safe_serialization or None)

    # trackers ---------------------------------------------------------------------------------------------------------
    @property
    def log_with(self) -> list[Any]:
        """The names, classes, loggers and trackers passed to the Accelerator."""
        return list(self._trackers.log_with)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The running trackers; empty before `init_trackers`."""
        return self._trackers.running

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Starts the run in every tracker of `log_with`.

        Args:
            project_name: name of the run, and of its folder for trackers that write files.
            config: settings to record.
            init_kwargs: constructor arguments by tracker name: `{"wandb": {"tags": ["test"]}}`.
        """
        self._trackers.begin(project_name, self.logging_dir, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a tracker by name; with `unwrap`, its underlying writer.

        On ranks that do not write, the result accepts every call and does nothing.
        """
        return self._trackers.find(name, unwrap)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Records values in every tracker."""
        self._trackers.log(values, step, log_kwargs or {})

    def check_preemption(self) -> bool:
        """Returns True on every rank once any rank is preempted; then save and call `leave`. Not in Accelerate.

        Every rank must call this after each batch's step; ranks wait for each other only in a loader's last batch.
        Inside an accumulation window it returns False, since the step that closes the window comes first.

        Example:
            >>> accelerator = Accelerator(cpu=True, preemption=True)
            >>> if accelerator.check_preemption():
            ...     accelerator.save_state("runs/preempted")
            ...     accelerator.leave()
            >>> accelerator.end_training()
        """
        self._collectives.announce("check_preemption")
        return self._end.is_preempted()

    def leave(self) -> NoReturn:
        """Ends the process of a preempted loop. Every rank must call it. Not in Accelerate.

        Raises:
            SystemExit: with the exit code of the Preemption, after trackers are closed and saves are committed.
            ConfigurationError: if `check_preemption` has not returned True.
        """
        self._collectives.announce("leave")
        self._end.begin_leaving(self.finish_saving)
        self._trackers.interrupt()
        self._finish()
        self._end.leave()

    def end_training(self) -> None:
        """Closes the trackers, then releases the run's folder and signal handlers. Every rank must call it."""
        self._collectives.announce("end_training")
        self.write_due()
        self._finish()
        self._end.end()

    def _finish(self) -> None:
        self.finish_saving()
        self._trackers.finish()
        self.strategy.ranks.barrier()

    # the state of the loop --------------------------------------------------------------------------------------------
    def flush_scaler(self) -> None:
        """Updates the gradient scaler, once after all optimizers have stepped and before the next loss is scaled."""
        self._stepping.flush_scaler()

    def restore_counters(self, steps: int) -> None:
        """Sets the number of completed steps and resets the window."""
        self._stepping.continue_after(steps)

    def teardown(self) -> None:
        """Closes the window and tears down the strategy. The ranks stay in their process group."""
        self._stepping.teardown()
