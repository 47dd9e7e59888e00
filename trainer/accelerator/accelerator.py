"""Accelerator: the engine of a run under a loop of one's own, with the names of Hugging Face Accelerate."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from leyden.strategies.base import Strategy
from leyden.strategies.errors import ConfigurationError
from leyden.trainer.accelerator import checks, preparing
from leyden.trainer.accelerator import saving as states
from leyden.trainer.accelerator.deepspeed import DeepSpeedPlugin
from leyden.trainer.accelerator.export import check_object, save_object, write_weights
from leyden.trainer.accelerator.loader import PreparedLoader, skip_first_batches
from leyden.trainer.accelerator.options import Options
from leyden.trainer.accelerator.parallel import ParallelismConfig
from leyden.trainer.accelerator.plugins import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from leyden.trainer.accelerator.ranks import AcceleratorState
from leyden.trainer.accelerator.scheduler import PreparedScheduler
from leyden.trainer.accelerator.seeds import synchronise
from leyden.trainer.accelerator.stepping import Stepping
from leyden.trainer.engine.prepared import PreparedOptimizer


class Accelerator(Stepping):
    """Device, precision, accumulation, ranks, checkpoints and trackers for a training loop that you write yourself.

    Five lines of a plain loop change, as `examples/own_loop.py` shows. Names and defaults are Hugging Face Accelerate's, except
    where it says so (`docs/from-accelerate.md`). The Trainer drives the same engine.

    Args:
        device_placement: bring models, batches and optimizers to `device`; False leaves that to you.
        split_batches: see `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16", "bf16", any name of the Trainer's `precision`, or a `Precision`.
        gradient_accumulation_steps: batches of one optimizer step.
        cpu: run on the CPU though there is a GPU.
        dataloader_config: a `DataLoaderConfiguration`.
        deepspeed_plugin: trains by DeepSpeed's ZeRO: a `DeepSpeedPlugin`.
        fsdp_plugin: shards models: a `FullyShardedDataParallelPlugin`.
        torch_tp_plugin: refused in this version.
        megatron_lm_plugin: refused in this version.
        rng_types: "torch", "cuda", "numpy", "python": set to rank 0's at the start of each pass. "generator" needs
            nothing: all ranks share one order of samples.
        log_with: trackers: "tensorboard", "wandb", "csv", "comet_ml", "mlflow", "all", a logger of Leyden's, an object of a
            `GeneralTracker`, or several.
        project_dir: folder of the run.
        project_config: a `ProjectConfiguration`.
        gradient_accumulation_plugin: a `GradientAccumulationPlugin`, in place of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: prepared schedulers step when their optimizer does; False for whenever they are called.
        kwargs_handlers: objects such as `GradScalerKwargs(init_scale=1024.0)`.
        dynamo_backend: compile prepared models with this backend of torch.compile.
        dynamo_plugin: the same with torch.compile's other arguments: a `TorchDynamoPlugin`.
        deepspeed_plugins: the same by a name; of several, since one engine drives one model, none is taken.
        parallelism_config: a `ParallelismConfig`: how many ranks replicate, and how many share, a model.
        strategy: as of the Trainer: "auto" is one device, or "ddp" where ranks are started.
        dispatch_batches: see `DataLoaderConfiguration`.
        even_batches: see `DataLoaderConfiguration`.
        use_seedable_sampler: see `DataLoaderConfiguration`.
        convert_outputs: prepared models return float32 under mixed precision. False leaves outputs in half precision: float32
            logits of a language model take twice their memory (8 × 2048 tokens of 50,000 words: 3.3 GB, not 1.6), and a loss
            is computed in float32 under `autocast()` anyway. Ours.

    Raises:
        ConfigurationError: for arguments that cannot be, or contradict each other.

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
        convert_outputs: bool = True,
    ) -> None:
        options = Options(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})
        self.options = options
        self.accumulation = options.accumulation
        self.project_configuration = options.project
        self.dataloader_config = options.data
        super().__init__(**options.engine_arguments())
        options.apply(self.strategy)
        atexit.register(_leave, weakref.ref(self))
        self.begin_stepping()
        self.prepared_models: list[nn.Module] = []
        """Models as `prepare` gave them back."""
        self.bare_models: list[nn.Module] = []
        """The same without what ranks or compilation wrap around them."""
        self.prepared_schedulers: list[PreparedScheduler] = []
        self.prepared_loaders: list[PreparedLoader] = []
        self.registered: list[Any] = []
        self.state_hooks = states.StateHooks()
        self.asked_of: PreparedLoader | None = None
        self.asked_at = 0
        self._reading = []
        self._due: Path | None = None
        self._checks = checks.Mistakes(self)
        self.follow_with(log_with)
        checks.begin(self)

    # properties -------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> AcceleratorState:
        """Ranks, device, precision and plugins alone."""
        return AcceleratorState(
            self.strategy, self.mixed_precision, self.options.deepspeed, self.options.fsdp_in_use(self.strategy)
        )

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        return self.options.deepspeed

    @property
    def mixed_precision(self) -> str:
        """ "no", "fp16", "bf16", or the full name of another precision."""
        names = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}
        if self.options.deepspeed is not None:
            # Weights in half precision with float32 masters, which scripts know by the short names.
            names |= {"16-true": "fp16", "bf16-true": "bf16"}
        return names.get(self.precision.name, self.precision.name)

    @property
    def device_placement(self) -> bool:
        return self.options.device_placement

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16; None elsewhere."""
        self.flush_scaler()
        return getattr(self.precision, "scaler", None)

    @property
    def project_dir(self) -> Any:
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:  # type: ignore[override]
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that is named automatically."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        return self.dataloader_config.even_batches

    # what transformers' Trainer and others read, by Accelerate's names --------------------------------------------------
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

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The one that was given."""
        return self.options.mesh

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of `parallelism_config`; None without one. FSDP's own is `strategy.device_mesh` in any case."""
        return getattr(self.strategy, "device_mesh", None) if self.options.mesh is not None else None

    @contextmanager
    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Shares sequences where ranks are arranged for that, which in this version they never are: does nothing."""
        yield

    # prepare ----------------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Brings models, optimizers, loaders and schedulers to where they run.

        Args:
            *args: in any order and number, in one call or several; other objects come back as they are, lists too:
                `prepare_data_loader` takes a list of batches.
            device_placement: for each of them, whether it goes to `device`.

        Returns:
            The same, prepared, in the same order; one alone by itself.
        """
        places = [self.device_placement] * len(args) if device_placement is None else list(device_placement)
        if len(places) != len(args):
            raise ConfigurationError(f"prepare: device_placement has {len(places)} entries for {len(args)} objects.")
        return preparing.prepare(self, args, places)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepares one model; with `evaluation_mode` it is not wrapped for training."""
        moves = self.device_placement if device_placement is None else device_placement
        return preparing.model(self, model, moves, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepares one optimizer."""
        return preparing.optimizer(self, optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepares one scheduler."""
        return preparing.scheduler(self, scheduler)

    def prepare_data_loader(self, data_loader: Iterable[Any], device_placement: bool | None = None) -> PreparedLoader:
        """Prepares one loader."""
        return preparing.loader(
            self, data_loader, self.device_placement if device_placement is None else device_placement
        )

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model itself, without what DDP, DataParallel or an engine wrap around it.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: False lets its forward run in full precision again, and return what it computes.
            keep_torch_compile: a compiled model stays compiled; False for the module itself, whose names have no prefix.
        """
        return preparing.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        """Lets go of everything that was prepared, and empties the device's cache.

        Returns:
            None for each object that is given: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        from leyden.trainer.accelerator.memory import release_memory

        self.flush_scaler()
        self.strategy.modules, self.strategy.optimizers = [], []
        self.strategy.forget_wrapped()
        for held in (self.prepared_models, self.bare_models, self.prepared_optimizers, self.prepared_schedulers):
            held.clear()
        self.prepared_loaders.clear()
        self._reading.clear()
        self.restore_counters(self.steps)
        return release_memory(*objects)

    clear = free_memory

    # around a loop -----------------------------------------------------------------------------------------------------
    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """torch's profiler around a block; with `output_trace_dir`, each rank writes its trace there."""
        handler = profile_handler or self.options.handlers.get(ProfileKwargs) or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            os.makedirs(handler.output_trace_dir, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(handler.output_trace_dir, f"profile_{self.process_index}.json"))

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Ranks with fewer batches than others take part in their exchange of gradients, within the block.

        Args:
            joinables: the prepared models.
            even_batches: set for prepared loaders within the block.
        """
        with ExitStack() as stack:
            if even_batches is not None:
                stack.enter_context(preparing.even_batches(self, even_batches))
            stack.enter_context(self.strategy.joining(joinables) if self.num_processes > 1 else nullcontext())
            self._joins = True
            try:
                yield
            finally:
                self._joins = False

    # loaders ----------------------------------------------------------------------------------------------------------
    def begin_loader(self, loader: PreparedLoader) -> None:
        """A pass over a loader has begun."""
        self._checks.in_pass()
        self.strategy.check_trained()
        self._reading.append(loader)

    @property
    def active_loader(self) -> PreparedLoader | None:
        """The loader that is read now, the innermost of several."""
        return self._reading[-1] if self._reading else None

    def synchronise_rng(self) -> None:
        """Before a pass: what `rng_types` names is set to rank 0's."""
        if self.options.rng_types:
            synchronise(self.strategy, self.options.rng_types)

    def end_loader(self, loader: PreparedLoader) -> None:
        """A pass over a loader is over, or was broken off."""
        if loader in self._reading:
            self._reading.remove(loader)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader whose passes begin at a batch, counted from the epoch's start; nothing before it is loaded.

        After `load_state` that is the very place at which the checkpoint stands, so nothing is skipped twice.
        """
        return skip_first_batches(dataloader, num_batches)

    # state ------------------------------------------------------------------------------------------------------------
    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Writes a checkpoint of all that was prepared and registered, complete or not at all; see `docs/checkpoints.md`.

        Inside an accumulation window it is written when that window's last batch is done with (the loader is asked for the
        next), so that it never holds half a gradient.

        Args:
            output_dir: the folder; a checkpoint that is there is replaced once the new one is committed. Left out (and not
                used) with `automatic_checkpoint_naming`.
            safe_serialization: kept for scripts: there is no other way here.

        Returns:
            The folder.
        """
        if not safe_serialization:
            raise ConfigurationError("save_state(safe_serialization=False) would be a pickle: leave it out.")
        self._announce("save_state")
        path = states.target(self, output_dir)
        if self.window.is_open and not (self._in_window and self.window.closes):
            self._due = path
            self.asked_of = self._reading[-1] if self._reading else None
            self.asked_at = self.asked_of.position if self.asked_of is not None else 0
            return str(path)
        self.asked_of = None
        return str(states.save(self, path))

    def write_due(self) -> None:
        """Writes the checkpoint that was asked for inside a window, once that is closed and its last batch is done with."""
        if self._due is not None and not self.window.is_open:
            path, self._due = self._due, None
            states.save(self, path)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        strict: bool = True,
        *,
        map_location: str | None = None,
        trust: bool = False,
    ) -> None:
        """Takes back what `save_state` wrote: prepare and register the same things first.

        The next pass over each prepared loader goes on where it stood, with or without `skip_first_batches`.

        Args:
            input_dir: the folder; left out with `automatic_checkpoint_naming` for the newest that is whole.
            load_kwargs: further arguments, as a dict: `strict`, `map_location`, and `weights_only`, which changes nothing
                since no pickle is read.
            strict: names of weights must fit.
            map_location: "cpu" or "on_device", of Accelerate's scripts: tensors go to where the parameters are in any case.
            trust: read a folder of Accelerate's own `save_state` too: models, optimizers, schedulers, scaler, registered objects and
                random numbers. Its files are pickles, which run whatever code they hold. Its data begins anew. Ours.
        """
        self._announce("load_state")
        strict = states.load_arguments(load_kwargs, strict, map_location)
        states.load(self, states.find(self, input_dir), strict, trust)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that belong to a checkpoint."""
        states.check_registrable(objects)
        self.registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> states.Handle:
        """Calls `hook(models, weights, output_dir)` in each save; see `StateHooks`."""
        return self.state_hooks.add(self.state_hooks.before_save, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> states.Handle:
        """Calls `hook(models, input_dir)` in each load; see `StateHooks`."""
        return self.state_hooks.add(self.state_hooks.before_load, hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state with its own names and whole tensors, gathered from shards: every rank must call it."""
        self._announce("get_state_dict")
        return self.strategy.full_state_dict(
            preparing.unwrap(model, True, False) if unwrap else model, rank0_only=False
        )

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
        """Writes tensors and plain values, once per run: what `f` is called says how (.safetensors, or .bin and .pt).

        Args:
            obj: as a state dict.
            f: the file.
            save_on_each_node: once per machine.
            safe_serialization: True for safetensors whatever the name.

        Raises:
            LeydenError: on every rank, for what is no tensor or plain value, and for shards: `get_state_dict` gathers them.
        """
        check_object(obj)
        if self.is_local_main_process if save_on_each_node else self.is_main_process:
            save_object(obj, f, safe_serialization or None)


def _leave(accelerator: weakref.ref[Accelerator]) -> None:
    """At the interpreter's end: gloo's threads must end before it, and wrapped models hold on to them."""
    found = accelerator()
    if found is not None:
        found.strategy.forget_wrapped()
        found.strategy.teardown()
