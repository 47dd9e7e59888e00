"""XLA: one process that drives one device or, with SPMD, all devices."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from leyden.core.devices import parse_devices
from leyden.core.environment import rank_environment
from leyden.core.errors import ConfigurationError, MissingExtraError
from leyden.core.tree import map_tensors
from leyden.strategies.base import EmptyInit, OwnLoop, Refused, Strategy
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
"""The Trainer's accelerator -> XLA's name. For any other accelerator the runtime picks the best device."""
XLA_DEVICE = torch.device("xla", 0)
OTHERS = ("gpu", "cuda", "mps")


class SPMDRanks(Ranks):
    """The single rank of a process that drives one XLA device or, with SPMD, all devices."""

    def start(self, kind: str | None, wanted: int | list[int] | None) -> int:
        """Starts XLA's runtime. Returns the number of devices that this rank drives."""
        device, count = runtime.start(kind, wanted)
        self.devices = [device]
        return count


class XLALoop(OwnLoop):
    """A custom loop on XLA: each iteration is one program."""

    def end_turn(self) -> None:
        runtime.sync()


class XLAStrategy(Strategy):
    """Models on XLA devices: TPUs, or the CPU to try a script.

    The operations of a batch are recorded and submitted to the device as one program: after the step that closes an
    accumulation window, before the next batch within a window, and after each batch of an evaluation. Nothing waits for
    the device, except code that reads values back.

    Several devices are still driven by one process, a single rank. Each batch of the loader's `batch_size` is sharded
    over the devices, and the result is that of the whole batch. The batch size need not be a multiple of the number of
    devices.

    Args:
        devices: number of devices, either 1 or all, or the index of one device in a list ([1]). Default: all ("auto").
        mesh: names and sizes of the mesh dimensions, such as {"data": 2, "model": 2}. Default: {"data": all}.
        shard: shell-style pattern of parameter names -> how to split the parameter, such as
            `{"*.mlp.weight": ("model", None)}`. The first match applies. Parameters without a match are whole on each
            device.
        batch: the mesh dimensions that batches are split over. Default: "data" and "fsdp" if the mesh has them, else
            its first dimension.
        precision: precision of parameters, inputs and the forward pass. Default: 32-true.

    Raises:
        ConfigurationError: for float16, and for a mesh or a rule that is not valid.

    Example:
        >>> XLAStrategy(mesh={"data": 2, "model": 2}, shard={"*.weight": ("model", None)}).layout.axes
        {'data': 2, 'model': 2}
    """

    name = "xla"
    # XLA tensors need a version counter, which inference mode omits (torch_xla 2.9: "Cannot set version_counter").
    supports_inference_mode = False
    # Each evaluation of the loss would have to be read back before the next one.
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
        self._given_devices = devices
        self._wanted: int | list[int] | None = parse_devices(devices)
        self.layout = XLALayout(mesh, shard, batch)
        self.before_forward = self._sync_between_batches

    # devices ----------------------------------------------------------------------------------------------------------
    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        self.check_accelerator(accelerator)
        if self._given_devices is None:
            self._wanted = parse_devices(devices)
        if isinstance(self._wanted, list) and len(self._wanted) > 1:
            raise ConfigurationError(
                f"devices={self._wanted}: XLA runs on one device or on all devices. Use devices='auto', or one index."
            )
        environment = rank_environment()
        if num_nodes > 1 or (environment is not None and environment.world_size > 1):
            raise ConfigurationError(
                f"strategy={self.name!r} is one process that drives all devices of its machine, but several ranks were "
                "started or planned. Use strategy='xla_ddp' for one rank per device, or start only one process."
            )
        self.layout.check_devices(self._wanted)

    def check_accelerator(self, accelerator: str) -> None:
        """Raises if torch_xla or the device is missing."""
        if importlib.util.find_spec("torch_xla") is None:
            raise MissingExtraError("torch_xla", "xla", f"strategy={self.name!r}")
        if accelerator in OTHERS:
            raise ConfigurationError(
                f"accelerator={accelerator!r} with strategy={self.name!r}: torch_xla supports only TPUs and the CPU. "
                "Use accelerator='xla', or strategy='auto'."
            )
        if accelerator == "tpu" and not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
            raise ConfigurationError(
                "accelerator='tpu' needs the library libtpu. On a TPU host, pip install 'torch_xla[tpu]'. To try a "
                "script elsewhere, use accelerator='cpu' with strategy='xla'."
            )
        self._kind = KINDS.get(accelerator)
        self.check_precision()

    def check_precision(self) -> None:
        """Raises for a precision that XLA devices do not support."""
        if getattr(self.precision, "dtype", None) is torch.float16:
            raise ConfigurationError(
                f"precision={self.precision.name!r} with strategy={self.name!r}: TPUs do not support float16, and its "
                "scaler would sync with the device in every step. Use precision='bf16-mixed' or 'bf16-true'."
            )
        self.precision.check(self.root_device)

    @property
    def refusals(self) -> dict[Refused, str]:
        return {
            **super().refusals,
            "asynchronous": "its tensors cannot be copied in the background of a run, so each checkpoint is written "
            "before training continues",
            "micro_batches": "XLA runs out of memory when a program is compiled or run, not in a pass. Give a number "
            "of batches",
            # Inductor does not support the device, and outputs of the backend "openxla" have no gradient (tried, 2.9).
            "compiled": "its engine compiles the whole step itself. Pass the module without torch.compile",
            "trainable_only": "each comparison of frozen weights would be compiled as a program. Use FSDP",
            "exchange": "its tensors are values of a traced step, and writing to them in place is untested. Use DDP "
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
        """Returns a context in which modules are built in the precision's dtype, on the CPU. Setup moves them.

        Building on the CPU draws the CPU's random numbers, and does not compile a program for each parameter.
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
    def _sync_between_batches(self, window: Window) -> None:
        """Makes each batch of a window its own program, so that not every window length is compiled."""
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

    Each parameter is split over all devices along its longest dimension. XLA's partitioner inserts gathers and
    reductions into the program. Parameter names and checkpoints do not change.

    Args:
        devices: see `XLAStrategy`.
        min_size: minimum number of elements. Smaller parameters stay whole.
        shard: rules that take precedence, over the mesh dimension "fsdp". See `XLAStrategy`.
        precision: see `XLAStrategy`.
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
