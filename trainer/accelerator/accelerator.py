"""Accelerator: the engine of a run under a loop that the user writes, with the names of Hugging Face Accelerate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from leyden.strategies.base import Strategy
from leyden.strategies.precision import Precision
from leyden.strategies.window import Window
from leyden.trainer.accelerator import saving as states
from leyden.trainer.accelerator.checks import hint_at_first_print
from leyden.trainer.accelerator.collectives import Collectives
from leyden.trainer.accelerator.deepspeed import DeepSpeedPlugin
from leyden.trainer.accelerator.ending import LoopEnd
from leyden.trainer.accelerator.export import check_object, save_object, write_weights
from leyden.trainer.accelerator.gradient_state import GradientState
from leyden.trainer.accelerator.loader import PreparedLoader, skip_first_batches
from leyden.trainer.accelerator.options import Options
from leyden.trainer.accelerator.parallel import ParallelismConfig
from leyden.trainer.accelerator.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from leyden.trainer.accelerator.preparing import Preparing, unwrap
from leyden.trainer.accelerator.ranks import AcceleratorState, DistributedType, PartialState
from leyden.trainer.accelerator.scheduler import PreparedScheduler
from leyden.trainer.accelerator.staged import Step, call_with_batch
from leyden.trainer.accelerator.stepping import Stepping
from leyden.trainer.accelerator.tracking import GeneralTracker, Trackers
from leyden.trainer.checkpoint.background import BackgroundSaves
from leyden.trainer.checkpoint.shard_plan import ShardPlans
from leyden.trainer.engine import debugging
from leyden.trainer.engine.prepared import PreparedOptimizer
from leyden.trainer.events.preemption import Preemption

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Accelerator:
    """Device, precision, accumulation, ranks, checkpoints and trackers for a training loop that you write yourself.

    Five lines of a plain loop change, as `examples/own_loop.py` shows. Names and defaults are Hugging Face
    Accelerate's, except where it says so (`docs/from-accelerate.md`). The Trainer drives the same engine.

    Each method calls the part that does the work: `Stepping` (windows, backward, clipping, steps), `Preparing`,
    `PartialState` (which rank this is), `Collectives`, `Trackers`, and `saving` for checkpoints.

    Args:
        device_placement: bring models, batches and optimizers to `device`; False leaves that to you.
        split_batches: see `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16", "bf16", any name that the Trainer's `precision` takes, or a `Precision`.
        gradient_accumulation_steps: batches of one optimizer step.
        cpu: run on the CPU though there is a GPU.
        dataloader_config: a `DataLoaderConfiguration`.
        deepspeed_plugin: trains by DeepSpeed's ZeRO: a `DeepSpeedPlugin`.
        fsdp_plugin: shards models: a `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: a `TorchTensorParallelPlugin`: the same as `ParallelismConfig(tp_size=…)`.
        megatron_lm_plugin: a `MegatronLMPlugin`: layers are split and blocks dealt out, on a mesh of Leyden's own.
        rng_types: "torch", "cuda", "numpy", "python": set to rank 0's at the start of each pass. "generator" needs
            nothing: all ranks share one order of samples.
        log_with: trackers: "tensorboard", "wandb", "csv", "comet_ml", "mlflow", "aim", "clearml", "dvclive", "swanlab",
            "trackio", "all", a logger of Leyden's, an object of a `GeneralTracker`, or several.
        project_dir: folder of the run.
        project_config: a `ProjectConfiguration`.
        gradient_accumulation_plugin: a `GradientAccumulationPlugin`, in place of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: prepared schedulers step when their optimizer does; False: at every call.
        kwargs_handlers: objects such as `GradScalerKwargs(init_scale=1024.0)`.
        dynamo_backend: compile prepared models with this backend of torch.compile.
        dynamo_plugin: a `TorchDynamoPlugin`: the same, with torch.compile's other arguments.
        deepspeed_plugins: a dict with one `DeepSpeedPlugin`; several are refused, since one engine drives one model.
        parallelism_config: a `ParallelismConfig`: how many ranks replicate, and how many share, a model.
        strategy: a name or object, as for the Trainer: "auto" is one device, or "ddp" on launched ranks.
        dispatch_batches: see `DataLoaderConfiguration`.
        even_batches: see `DataLoaderConfiguration`.
        use_seedable_sampler: see `DataLoaderConfiguration`.
        resume: "auto": `load_state()` loads the newest checkpoint in `project_dir`, or begins anew where there is none;
            `save_state()` names them, and no second run may use the folder (`docs/checkpoints.md`). Ours.
        preemption: True, or a `Preemption`, has `check_preemption` say when SIGTERM, SIGUSR1 or a notice preempts the
            loop. Ours.
        convert_outputs: prepared models return float32 under mixed precision. False leaves outputs in half precision:
            float32 logits of a language model take twice their memory (8 × 2048 tokens of 50,000 words: 3.3 GB, not
            1.6), and a loss is computed in float32 under `autocast()` anyway. Ours.

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
        self.strategy: Strategy = self._stepping.strategy
        options.apply(self.strategy)
        if debugging.is_debugging():
            debugging.begin(self._stepping, options.accumulation.num_steps)
        self._state = PartialState(strategy=self.strategy)
        self._collectives = Collectives(self._state, self._stepping.reading, self._stepping.checker)
        self._preparing = Preparing(self._stepping, options)
        self._trackers = Trackers(log_with, self._state)
        self.registered: list[Any] = []
        self.state_hooks = states.StateHooks()
        self.shard_plans = ShardPlans()
        self.saves = BackgroundSaves(holds_exit=True)
        self.lock = states.hold(self.strategy, options)
        self._end = LoopEnd(options.preemption, self._stepping, self.lock)
        hint_at_first_print(self._state)

    # settings ---------------------------------------------------------------------------------------------------------
    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16", "bf16", or the full name of another precision."""
        return self.options.name_of(self.precision)

    @property
    def precision(self) -> Precision:
        """The precision itself."""
        return self.strategy.precision

    @property
    def device_placement(self) -> bool:
        """`prepare` brings objects to `device`."""
        return self.options.device_placement

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are split over the ranks; `join_uneven_inputs` changes it within its block."""
        return self._preparing.data

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
        """See `DataLoaderConfiguration`: the place of every loader is saved in any case."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def rng_types(self) -> list[str]:
        """The random numbers that every rank takes from rank 0 before each pass, as passed to the Accelerator."""
        return list(self.options.rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Prepared schedulers step when their optimizer does."""
        return self.options.step_scheduler_with_optimizer

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin of a run under DeepSpeed; None elsewhere."""
        return self.options.deepspeed

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The one passed to the Accelerator."""
        return self.options.mesh

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of `parallelism_config`; None without one. A strategy's is `strategy.device_mesh` in any case."""
        return None if self.options.mesh is None else self.options.mesh.device_mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's number among those that split each layer; 0 where none do."""
        mesh = self.torch_device_mesh
        return 0 if mesh is None or "tp" not in mesh.mesh_dim_names else mesh.get_local_rank("tp")

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
        """Number of the next checkpoint that is named automatically."""
        return self.project_configuration.iteration

    # ranks ------------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> AcceleratorState:
        """Ranks, device, precision and plugins alone."""
        return self.options.state(self.strategy)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._state.device

    @property
    def num_processes(self) -> int:
        """Ranks on all machines."""
        return self._state.num_processes

    @property
    def process_index(self) -> int:
        """This rank, from 0."""
        return self._state.process_index

    @property
    def local_process_index(self) -> int:
        """This rank on its machine, from 0."""
        return self._state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """This is rank 0."""
        return self._state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """This is the first rank of its machine."""
        return self._state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """This is the last rank."""
        return self._state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """True with several ranks."""
        return self._state.use_distributed

    @property
    def distributed_type(self) -> DistributedType:
        """How this run's ranks work together."""
        return self._state.distributed_type

    @property
    def multi_device(self) -> bool:
        """Several ranks, each on a device of its own, hold the whole model."""
        return self.distributed_type is DistributedType.MULTI_GPU

    @property
    def is_fsdp2(self) -> bool:
        """Models are sharded by FSDP, whose second version is the only one here."""
        return self.distributed_type is DistributedType.FSDP

    def wait_for_everyone(self) -> None:
        """Waits until every rank has called this."""
        self._collectives.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """The main rank runs the block before the other ranks do, so that they find what it cached."""
        return self._state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """The main rank of each machine runs the block before its other ranks do."""
        return self._state.local_main_process_first()

    def on_main_process(self, function: F) -> F:
        """Decorator: only the main rank runs the function; elsewhere it returns None."""
        return self._state.on_main_process(function)

    def on_local_main_process(self, function: F) -> F:
        """Decorator: only the main rank of each machine runs the function."""
        return self._state.on_local_main_process(function)

    def on_last_process(self, function: F) -> F:
        """Decorator: only the last rank runs the function."""
        return self._state.on_last_process(function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: only the rank of that number runs the function."""
        return self._state.on_process(function, process_index)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: only the rank of that number on each machine runs the function."""
        return self._state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once per machine."""
        self._state.print(*args, **kwargs)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Gives each rank its part of a list, tuple, tensor, data set, or of each value of a dict of these.

        Args:
            inputs: what to split; what does not divide goes to the first ranks.
            apply_padding: repeat the last entry on ranks that would have fewer, so that results can be gathered.
        """
        return self._state.split_between_processes(inputs, apply_padding)

    def refuse_alone(self, name: str) -> None:
        """Raises if a collective is called inside a function that other ranks do not run."""
        self._state.refuse_alone(name)

    # prepare ----------------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Brings models, optimizers, loaders and schedulers to where they run.

        Args:
            *args: in any order and number, in one call or several. Other objects are returned as they are, lists too:
                `prepare_data_loader` takes a list of batches.
            device_placement: for each of them, whether it goes to `device`.

        Returns:
            The same, prepared, in the same order; one alone by itself.
        """
        return self._preparing.prepare(args, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; with `evaluation_mode` it is not wrapped for training."""
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
        """Models as `prepare` returned them."""
        return self._stepping.prepared_models

    @property
    def bare_models(self) -> list[nn.Module]:
        """The same without what ranks or compilation wrap around them."""
        return self._stepping.bare_models

    @property
    def prepared_optimizers(self) -> list[PreparedOptimizer]:
        """Optimizers as `prepare` returned them."""
        return self._stepping.prepared_optimizers

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers themselves, as the strategy holds them."""
        return self._stepping.optimizers

    @property
    def prepared_schedulers(self) -> list[PreparedScheduler]:
        """Schedulers as `prepare` returned them."""
        return self._preparing.schedulers

    @property
    def prepared_loaders(self) -> list[PreparedLoader]:
        """Loaders as `prepare` returned them."""
        return self._preparing.loaders

    # The names by which transformers' Trainer and others read the same.
    @property
    def _models(self) -> list[nn.Module]:
        return self.prepared_models

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return list(self.prepared_optimizers)

    @property
    def _schedulers(self) -> list[PreparedScheduler]:
        return self.prepared_schedulers

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        return self.prepared_loaders

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model itself, without what DDP, DataParallel or an engine wrap around it.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: False lets its forward run in full precision again, and return what it computes.
            keep_torch_compile: a compiled model stays compiled; False for the module itself, whose names have no
                prefix.
        """
        return unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose passes begin at a batch, counted from the epoch's start; nothing before it is loaded.

        After `load_state` that is the very place at which the checkpoint stands, so nothing is skipped twice.
        """
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> Any:
        """Releases everything that was prepared, and empties the device's cache.

        Returns:
            None for each argument: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        from leyden.trainer.accelerator.memory import release_memory

        self.saves.release()
        self._stepping.release()
        self._preparing.release()
        return release_memory(*objects)

    def clear(self, *objects: Any) -> Any:
        """See `free_memory`."""
        return self.free_memory(*objects)

    # the step ---------------------------------------------------------------------------------------------------------
    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One batch of an accumulation window.

        Optimizers and schedulers step, and gradients are exchanged, only in the batch that closes it. The last window
        of a prepared loader is as long as the batches that are left, and is divided by that length.

        Args:
            *models: what is trained; named for readers and for scripts that were written for others.
        """
        return self._stepping.accumulate(models)

    def backward(self, loss: Tensor, num_items: Tensor | float | None = None, **kwargs: Any) -> None:
        """Backward of a loss, divided by the window's length and scaled for the precision.

        The loss of a model that is cut into stages has gone backward already, and is taken as it is.

        Args:
            loss: a mean; or a sum, with `num_items`.
            num_items: what the loss is a sum of (tokens, samples): the gradient is divided by their total over the
                window and all ranks. Ours.
            **kwargs: of `Tensor.backward`: `retain_graph`, `create_graph`, `inputs`.
        """
        self._stepping.backward(loss, num_items, **kwargs)

    def pipeline_step(self, model: nn.Module, batch: Any, step: Step = call_with_batch) -> Tensor:
        """Runs forward and backward of a batch through a model that is cut into stages (`MeshStrategy(pp=…)`). Ours.

        It takes the place of the model's call and of `backward`; optimizers step after it as ever. Every rank calls it.

        Args:
            model: as `prepare` returned it.
            batch: of a prepared loader. It is cut into micro-batches, and the step runs for each.
            step: `step(model, batch)` returns the loss, a dict with `loss` (a sum) and `num_items`, or an output with a
                `loss`; left out, the model is called with the batch.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            ConfigurationError: without stages, and for a step that returns no loss.
        """
        return self._stepping.staged_step(self.unwrap_model(model), batch, step)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips gradients to a total norm, at their true scale and over all shards.

        Returns:
            The total norm before clipping. Inside an accumulation window nothing is clipped yet.
        """
        return self._stepping.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips each gradient to ± `clip_value`, at its true scale."""
        self._stepping.clip_value(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Brings gradients to their true scale, for reading or changing them before a step.

        Args:
            optimizer: one, or several; all if left out.
        """
        self._stepping.unscale(optimizer)

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Within it backward sends no gradients to the other ranks."""
        return self.strategy.gradient_sync(False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward sends gradients, though its forward was run under `no_sync`."""
        return self._stepping.sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Ranks with fewer batches than others take part in their exchange of gradients, within the block.

        Args:
            joinables: the prepared models.
            even_batches: set for prepared loaders within the block.
        """
        return self._preparing.joining(joinables, even_batches)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The context of a forward pass in the run's precision.

        Args:
            autocast_handler: `AutocastKwargs(enabled=False)` for a part in full precision.
        """
        if autocast_handler is None:
            return self._stepping.autocast()
        return self.options.autocast(self.precision, self.device, autocast_handler)

    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Splits sequences where ranks are arranged for that, which in this version they never are: does nothing."""
        return nullcontext()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """torch's profiler around a block; with `output_trace_dir`, each rank writes its trace there."""
        handler = profile_handler or self.options.handlers.get(ProfileKwargs) or ProfileKwargs()
        return handler.around(f"profile_{self.process_index}.json")

    @property
    def sync_gradients(self) -> bool:
        """The current batch closes its accumulation window: gradients are exchanged and optimizers step.

        May be set by a loop that counts its batches itself; `accumulate` sets it at each batch.
        """
        return self._stepping.window.closes

    @sync_gradients.setter
    def sync_gradients(self, closes: bool) -> None:
        self._stepping.close_with_this_batch(closes)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of one optimizer step; may be set, for the windows that follow."""
        return self.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._stepping.accumulate_over(steps)

    @property
    def accumulation(self) -> GradientAccumulationPlugin:
        """How batches make one step."""
        return self._stepping.accumulation

    @property
    def gradient_state(self) -> GradientState:
        """The window and the loader that is being read, by the names that libraries know."""
        return GradientState(self._stepping)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The gradient scaler skipped the last step of an optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared_optimizers)

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16; None elsewhere."""
        self._stepping.flush_scaler()
        return getattr(self.precision, "scaler", None)

    @property
    def steps(self) -> int:
        """Accumulation windows that a step closed."""
        return self._stepping.steps

    @property
    def window(self) -> Window:
        """The accumulation window."""
        return self._stepping.window

    @property
    def active_loader(self) -> PreparedLoader | None:
        """The loader that is being read, the innermost of several."""
        return self._stepping.active_loader

    # collectives ------------------------------------------------------------------------------------------------------
    def gather(self, tensor: T) -> T:
        """Concatenates the tensors of all ranks along their first dimension; scalars become (num_processes,).

        Of the ranks of a tp group, which have the same samples, there is one; so it is in all that gathers or reduces.

        Args:
            tensor: a tensor, or any nested structure of tensors of the same shape on every rank.

        Raises:
            TypeError: on several ranks, for a Python number and whatever else is no tensor.
            ConfigurationError: where shapes differ by rank, and the exchange would read memory that is not theirs.
        """
        return self._collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers what belongs to the samples of the current batch: each sample once, in the data set's order.

        In the last batch of a loader, repeats that filled it are dropped, and ranks may have different numbers of
        samples.

        Args:
            input_data: tensors whose first dimension is that of the batch (or a multiple of it), lists with an entry
                for each sample, or a nested structure of these. Scalars become (num_processes,). Of a loss that is
                repeated for each sample of a full batch as many are kept as the last batch has samples.
            use_gather_object: gather anything as objects; lists are concatenated.

        Raises:
            TypeError: on several ranks, for a Python number or object that stands for no sample.
        """
        return self._collectives.gather_for_metrics(input_data, use_gather_object)

    def gather_object(self, obj: list[Any]) -> list[Any]:
        """Concatenates the lists of all ranks, in the order of ranks."""
        return self._collectives.gather_object(obj)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduces tensors over the ranks.

        Args:
            tensor: a tensor, or any nested structure of tensors of the same shape on every rank.
            reduction: "sum", "mean", "max", "min", or "none" to leave them.
            scale: what the result is multiplied by.

        Raises:
            TypeError: for a Python number and whatever else is no tensor.
        """
        return self._collectives.reduce(tensor, reduction, scale)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Gives every rank the object of rank `src`."""
        return self._collectives.broadcast(obj, src)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Brings tensors to the same size in one dimension on every rank, so that they can be gathered.

        Args:
            tensor: a tensor, or any nested structure of tensors.
            dim: the dimension; tensors that have fewer are left.
            pad_index: value of what is added.
            pad_first: add it before, not after.
        """
        return self._collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def all_gather(self, data: T, group: Any = None, sync_grads: bool = False) -> T:
        """Stacks tensors of any nested structure over the ranks: (num_processes, *shape). Ours.

        Of the ranks of a tp group, which have the same samples, there is one.

        Raises:
            ConfigurationError: where ranks have tensors of different shapes.
        """
        return self._stepping.all_gather(data, group, sync_grads)

    def set_trigger(self) -> None:
        """Raises a flag that `check_trigger` reports on every rank."""
        self._collectives.set_trigger()

    def check_trigger(self) -> bool:
        """Returns True on every rank if one has called `set_trigger` since this last returned True."""
        return self._collectives.check_trigger()

    # checkpoints ------------------------------------------------------------------------------------------------------
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        asynchronous: bool = False,
    ) -> str:
        """Writes a checkpoint of all that was prepared and registered, complete or not at all (`docs/checkpoints.md`).

        Inside an accumulation window it is written when that window's last batch is done with (the loader is asked for
        the next), so that it never holds half a gradient.

        Args:
            output_dir: the folder; a checkpoint that is there is replaced once the new one is committed. Left out (and
                not used) with `automatic_checkpoint_naming`.
            safe_serialization: accepted for Accelerate's scripts; False is refused.
            asynchronous: all is copied now, and a thread writes it (`docs/checkpoints.md`). Ours.

        Returns:
            The folder.
        """
        states.check_format(safe_serialization)
        self._collectives.announce("save_state")
        return str(states.save_in_time(self, self._stepping, output_dir, asynchronous))

    def finish_saving(self) -> None:
        """Waits until an asynchronous save is committed; raises what kept it from being. All ranks call it. Ours."""
        self.saves.wait()

    def write_due(self) -> None:
        """Writes the checkpoint that was asked for inside a window, if the window is closed."""
        self._stepping.run_waiting()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        strict: bool = True,
        *,
        map_location: str | None = None,
        trust: bool = False,
    ) -> None:
        """Loads what `save_state` wrote: prepare and register the same things first.

        The next pass over each prepared loader continues where it stood, with or without `skip_first_batches`.

        Args:
            input_dir: the folder; left out with `automatic_checkpoint_naming` for the newest that is whole.
            load_kwargs: further arguments, as a dict: `strict`, `map_location`, and `weights_only`, which changes
                nothing since no pickle is read.
            strict: names of weights must fit.
            map_location: "cpu" or "on_device", of Accelerate's scripts: tensors go to where the parameters are in any
                case.
            trust: read a folder of Accelerate's own `save_state` too: models, optimizers, schedulers, scaler,
                registered objects and random numbers. Its files are pickles, which run whatever code they hold. Its
                data begins anew. Ours.
        """
        self._collectives.announce("load_state")
        strict = states.load_arguments(load_kwargs, strict, map_location)
        states.load(self, input_dir, strict, trust)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to the checkpoints."""
        states.check_registrable(objects)
        self.registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls `hook(models, weights, output_dir)` in each save; see `StateHooks`."""
        return self.state_hooks.add(self.state_hooks.before_save, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls `hook(models, input_dir)` in each load; see `StateHooks`."""
        return self.state_hooks.add(self.state_hooks.before_load, hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state with its own names and whole tensors, gathered from shards: every rank must call it."""
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
        """Writes a model's weights as transformers and safetensors load them: every rank must call it.

        Args:
            model: prepared or not.
            save_directory: gets `model.safetensors`, or several files and `model.safetensors.index.json`.
            max_shard_size: a file's most bytes, as "5GB".
            safe_serialization: False for `pytorch_model.bin`, tensors alone.
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
        """Writes tensors and plain values, once per run: the suffix of `f` says how (.safetensors, or .bin and .pt).

        Args:
            obj: as a state dict.
            f: the file.
            save_on_each_node: once per machine.
            safe_serialization: True for safetensors whatever the name.

        Raises:
            LeydenError: on every rank, for what is no tensor or plain value, and for shards: `get_state_dict` gathers
                them.
        """
        check_object(obj)
        if self.is_local_main_process if save_on_each_node else self.is_main_process:
            save_object(obj, f, safe_serialization or None)

    # trackers ---------------------------------------------------------------------------------------------------------
    @property
    def log_with(self) -> list[Any]:
        """The names, classes, loggers and trackers that were passed to the Accelerator."""
        return list(self._trackers.log_with)

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers themselves, once `init_trackers` was called."""
        return self._trackers.running

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Starts the run in every tracker of `log_with`.

        Args:
            project_name: of the run; folder of the trackers that keep one.
            config: settings to record.
            init_kwargs: arguments by the trackers' names: `{"wandb": {"tags": ["test"]}}`.
        """
        self._trackers.begin(project_name, self.logging_dir, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; with `unwrap` the object that it writes with.

        On ranks that do not write, calls on it do nothing.
        """
        return self._trackers.find(name, unwrap)

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Records values in every tracker."""
        self._trackers.log(values, step, log_kwargs or {})

    def check_preemption(self) -> bool:
        """Returns True on every rank if one of them is to make room: save, and `leave`. Ours.

        Every rank calls this after each batch's step, and none waits for the others. Inside an accumulation window it
        returns False: the step that closes the window comes first.

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
        """Ends the process of a preempted loop as its `Preemption` says, once every rank has come here. Ours.

        Raises:
            SystemExit: with the exit code of the Preemption, after trackers are closed and all is saved.
            ConfigurationError: if `check_preemption` has not returned True.
        """
        self._collectives.announce("leave")
        self._end.begin_leaving(self.finish_saving)
        self._trackers.interrupt()
        self._finish()
        self._end.leave()

    def end_training(self) -> None:
        """Closes the trackers, once every rank has come here, and gives up the run's folder and signals."""
        self._collectives.announce("end_training")
        self.write_due()
        self._finish()
        self._end.end()

    def _finish(self) -> None:
        self.finish_saving()
        self._trackers.finish()
        self.strategy.ranks.barrier()

    # the engine's own methods, for a loop that prepares or counts by itself -------------------------------------------
    def begin_stepping(self) -> None:
        """Resets the counters, before the first batch."""
        self._stepping.begin()

    def prepare_module(self, module: nn.Module) -> nn.Module:
        """Brings a module to its device; its optimizers are made after that."""
        return self._stepping.prepare_module(module)

    def prepare_optimizers(
        self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[PreparedOptimizer]:
        """Prepares the optimizers of modules that are prepared, in place of all others."""
        return self._stepping.prepare_optimizers(modules, optimizers)

    def check_parameters(self, modules: Iterable[nn.Module]) -> None:
        """Raises for an optimizer whose parameters no module has: it would step without effect."""
        self._stepping.check_parameters(modules)

    def begin_loader(self, loader: PreparedLoader) -> None:
        """Begins a pass over a loader."""
        self._stepping.begin_loader(loader)

    def synchronise_rng(self) -> None:
        """Sets the random numbers that `rng_types` names to rank 0's."""
        self._stepping.synchronise_rng()

    def end_turn(self) -> None:
        """Ends a batch: runs what waits for its end."""
        self._stepping.end_turn()

    def end_loader(self, loader: PreparedLoader) -> None:
        """Ends a pass over a loader, finished or not."""
        self._stepping.end_loader(loader)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward of a loss as it is, scaled for the precision alone."""
        self._stepping.manual_backward(loss, *args, **kwargs)

    def step(self, prepared: PreparedOptimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> bool:
        """Steps a prepared optimizer if the window closes; False if the gradient scaler skipped the step."""
        return self._stepping.step(prepared, closure, **kwargs)

    def zero_grad(self, prepared: PreparedOptimizer, set_to_none: bool = True) -> None:
        """Clears the gradients of a prepared optimizer if the window closes."""
        self._stepping.zero_grad(prepared, set_to_none)

    def flush_scaler(self) -> None:
        """Updates the gradient scaler: once after all steps, before the next loss is scaled."""
        self._stepping.flush_scaler()

    def close_window(self) -> None:
        """Brings the window's gradients to their mean: over its true length, or over its items."""
        self._stepping.close_window()

    def end_batch(self) -> None:
        """Counts a batch of the window as done."""
        self._stepping.window.end_batch()

    def restore_counters(self, steps: int) -> None:
        """Continues between two windows, after so many steps."""
        self._stepping.continue_after(steps)

    def follow_with(self, log_with: Any) -> None:
        """Replaces the trackers; none starts before `init_trackers`."""
        self._trackers = Trackers(log_with, self._state)

    def teardown(self) -> None:
        """Closes the window and leaves the ranks."""
        self._stepping.teardown()
