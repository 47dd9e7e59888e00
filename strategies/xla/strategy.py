"""XLA: one process that drives one device, or, by SPMD, all of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from leyden.strategies.base import Refused, Strategy
from leyden.strategies.batch import map_tensors
from leyden.strategies.devices import parse_devices
from leyden.strategies.empty_init import EmptyInit
from leyden.strategies.errors import ConfigurationError, MissingExtraError
from leyden.strategies.launch.environment import rank_environment
from leyden.strategies.own_loop import OwnLoop
from leyden.strategies.precision import Precision
from leyden.strategies.ranks import Ranks
from leyden.strategies.weights import StateWriter, WeightReader
from leyden.strategies.window import Window
from leyden.strategies.xla import runtime
from leyden.strategies.xla.mesh import Spec, XLALayout
from leyden.strategies.xla.moving import bring, on_host

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
KINDS = {"cpu": "CPU", "tpu": "TPU"}
"""XLA's names of the Trainer's accelerators; for any other the runtime takes the best there is."""
XLA_DEVICE = torch.device("xla", 0)
OTHERS = ("gpu", "cuda", "mps")


class SPMDRanks(Ranks):
    """One process that drives one XLA device or, by SPMD, all of them: a single rank."""

    def start(self, kind: str | None, wanted: int | list[int] | None) -> int:
        """Starts XLA's runtime, and returns how many devices this rank drives."""
        device, count = runtime.start(kind, wanted)
        self.devices = [device]
        return count


class XLALoop(OwnLoop):
    """A loop of the user's own on XLA: each turn of it is one program."""

    def end_turn(self) -> None:
        runtime.sync()


class XLAStrategy(Strategy):
    """Models on XLA devices: TPUs, or the CPU to try a script.

    The operations of a batch are collected and handed to the device at once, when the batch is done: after the step
    that closes an accumulation window, before the next batch inside one, and after each batch of an evaluation. Nothing
    waits for the device but what reads values back.

    With several devices this is still one process, so one rank: a batch of the loader's `batch_size` is laid over the
    devices, and the result is that of the whole batch. Its size need not divide by their number.

    Args:
        devices: how many; all that there are if left out ("auto"). One device, by its index in a list ([1]), or all of
            them.
        mesh: names and sizes of the devices' dimensions, as {"data": 2, "model": 2}; {"data": all} if left out.
        shard: which parameters are split over which dimensions: {"*.mlp.weight": ("model", None)}, by patterns of their
            names as a shell has them, the first that fits. What none fits is whole on each device.
        batch: the dimensions of the mesh that batches are split over; "data" and "fsdp" where there are such, else the
            first.
        precision: what parameters, inputs and the forward pass are held in; 32-true if left out.

    Raises:
        ConfigurationError: for float16, and for a mesh or a rule that is not valid.

    Example:
        >>> XLAStrategy(mesh={"data": 2, "model": 2}, shard={"*.weight": ("model", None)}).layout.axes
        {'data': 2, 'model': 2}
    """

    name = "xla"
    # XLA's tensors have a version counter, which inference mode does without (torch_xla 2.9: "Cannot set
    # version_counter").
    supports_inference_mode = False
    # Each evaluation of the loss would be read back before the next one is known.
    supports_closure = False
    _kind: str | None = None

    def __init__(
        self,
        devices: int | str | Sequence[int] | None = None,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Spec] | None = None,
        batch: Sequence[str] | None = None,
        precision: Precision | None = None,
    ) -> None:
        self._spmd = SPMDRanks(XLA_DEVICE)
        super().__init__(precision, self._spmd)
        self.own_loop = XLALoop()
        self._given = devices
        self._wanted: int | list[int] | None = parse_devices(devices)
        self.layout = XLALayout(mesh, shard, batch)
        self.before_forward = self._cut

    # its place --------------------------------------------------------------------------------------------------------
    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        self.check_accelerator(accelerator)
        if self._given is None:
            self._wanted = parse_devices(devices)
        if isinstance(self._wanted, list) and len(self._wanted) > 1:
            raise ConfigurationError(
                f"devices={self._wanted}: XLA runs on one device, or on all that there are. Use devices='auto', or one "
                "index."
            )
        place = rank_environment()
        if num_nodes > 1 or (place is not None and place.world_size > 1):
            raise ConfigurationError(
                f"strategy={self.name!r} is one process, which drives the devices of its machine, and there are "
                "several: use strategy='xla_ddp' for a rank on each device, or start one."
            )
        self.layout.check_devices(self._wanted)

    def check_accelerator(self, accelerator: str) -> None:
        """Raises if torch_xla or the device is missing."""
        if importlib.util.find_spec("torch_xla") is None:
            raise MissingExtraError("torch_xla", "xla", f"strategy={self.name!r}")
        if accelerator in OTHERS:
            raise ConfigurationError(
                f"accelerator={accelerator!r} with strategy={self.name!r}: torch_xla has TPUs and the CPU. Use "
                "accelerator='xla', or strategy='auto'."
            )
        if accelerator == "tpu" and not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
            raise ConfigurationError(
                "accelerator='tpu', and libtpu, the TPU's own library, is not here: pip install 'torch_xla[tpu]' on a "
                "TPU host, or use accelerator='cpu' with strategy='xla' to try a script."
            )
        self._kind = KINDS.get(accelerator)
        self.check_precision()

    def check_precision(self) -> None:
        """Raises for a precision that XLA's devices do not have."""
        if getattr(self.precision, "dtype", None) is torch.float16:
            raise ConfigurationError(
                f"precision={self.precision.name!r} with strategy={self.name!r}: TPUs have no float16, and its scaler "
                "would read a flag back from the device in every step. Use precision='bf16-mixed' or 'bf16-true'."
            )
        self.precision.check(self.root_device)

    @property
    def refusals(self) -> dict[Refused, str]:
        return {
            **super().refusals,
            "asynchronous": "its tensors cannot be copied beside a run, so each checkpoint is written before training "
            "goes on",
            "micro_batches": "XLA runs out of memory where a program is compiled or run, not in a pass. Give a number "
            "of batches",
            # Inductor does not know the device, and what the backend "openxla" returns has no gradient (tried, 2.9).
            "compiled": "its engine compiles the whole step by itself. Give the module as it is",
            "exchange": "its tensors are values of a traced step, and writing to them in place is not tried. Use DDP "
            "or FSDP",
        }

    @property
    def details(self) -> str:
        return self.layout.described(self.modules)

    def setup_environment(self) -> None:
        self.check_precision()
        self._start_devices()
        super().setup_environment()

    def _start_devices(self) -> None:
        self.layout.begin(self._spmd.start(self._kind, self._wanted))

    def teardown(self) -> None:
        super().teardown()
        if runtime.is_used():
            runtime.sync()
            runtime.leave_random()

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds modules in the precision's dtype, on the CPU: set-up moves them to the device.

        Their random numbers are the CPU's then, and no program is compiled for each of them.
        """
        with self.precision.init_context(), EmptyInit() if empty_init else nullcontext():
            yield

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        self.modules = [self.precision.convert_module(module) for module in modules]
        for module in self.modules:
            bring(module, self.root_device)
            self.layout.place(module)
        return self.modules

    def setup_optimizers(self, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        self.layout.check_rules()
        return super().setup_optimizers(modules, optimizers)

    def to_device(self, batch: T) -> T:
        batch = super().to_device(batch)
        return map_tensors(batch, self.layout.split) if self.layout.is_spread else batch

    # the step ---------------------------------------------------------------------------------------------------------
    def _cut(self, window: Window) -> None:
        """Makes each batch of a window a program of its own, not one for each length of a window."""
        if window.index > 0:
            runtime.sync()

    def end_step(self) -> None:
        super().end_step()
        runtime.sync()

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        outputs = self.forward(step_fn, batch, extra)
        runtime.sync()
        return outputs

    # state ------------------------------------------------------------------------------------------------------------
    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        names = [name for name, _ in module.named_parameters()]
        runtime.sync(wait=True)
        state, states = on_host((dict(module.state_dict()), optimizers))
        writer.model(state, replicated=names)
        if states is not None:
            writer.optimizers(states)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        super().load_module(reader, module, strict)
        self.layout.place(module)

    def full_state_dict(self, module: nn.Module, rank0_only: bool = True) -> dict[str, Any]:
        return on_host(dict(module.state_dict())) if rank0_only else module.state_dict()


class XLAFSDPStrategy(XLAStrategy):
    """Fully sharded data parallel on XLA: each device holds a part of every parameter and of its optimizer state.

    A parameter is split over all devices along its longest dimension; XLA's partitioner puts the gathers and reductions
    into the program. Names stay as they are, and so do checkpoints.

    Args:
        devices: as of `XLAStrategy`.
        min_size: parameters with fewer elements stay whole.
        shard: rules that go before, as of `XLAStrategy`, over the dimension "fsdp".
        precision: as of `XLAStrategy`.
    """

    name = "xla_fsdp"

    def __init__(
        self,
        devices: int | str | Sequence[int] | None = None,
        min_size: int = 0,
        shard: Mapping[str, Spec] | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(devices, precision=precision)
        self.layout = XLALayout(None, shard, None, fully=True, min_size=min_size)
