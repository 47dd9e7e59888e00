"""XLA: one process that drives one device, or, by SPMD, all of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from leyden.strategies.base import Strategy
from leyden.strategies.batch import map_tensors
from leyden.strategies.devices import parse_devices
from leyden.strategies.empty_init import EmptyInit
from leyden.strategies.errors import ConfigurationError, MissingExtraError
from leyden.strategies.precision import Precision
from leyden.strategies.spmd.mesh import Layout, Spec
from leyden.strategies.spmd.moving import bring, on_host, trees_on_host
from leyden.strategies.weights import StateWriter, WeightReader
from leyden.strategies.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
KINDS = {"cpu": "CPU", "tpu": "TPU"}
"""What the Trainer's accelerator means to XLA's runtime; for any other the runtime takes the best there is."""
OTHERS = ("gpu", "cuda", "mps")

_seeded_with: int | None = None
"""The seed of torch that XLA's random numbers were set by. They are the process's own."""


class XLAStrategy(Strategy):
    """Models on XLA devices: TPUs, or the CPU to try a script.

    The operations of a batch are collected and handed to the device at once, when the batch is done: after the step that closes
    an accumulation window, before the next batch inside one, and after each batch of an evaluation. Nothing waits for the device
    but what reads values back.

    With several devices this is still one process, so one rank: a batch of the loader's `batch_size` is laid over the devices,
    and the result is that of the whole batch. Its size need not divide by their number.

    Args:
        devices: how many; all that there are if left out ("auto"). One device, by its index in a list ([1]), or all of them.
        mesh: names and sizes of the devices' dimensions, as {"data": 2, "model": 2}; {"data": all} if left out.
        shard: which parameters are split over which dimensions: {"*.mlp.weight": ("model", None)}, by patterns of their names as a
            shell has them, the first that fits. What none fits is whole on each device.
        batch: the dimensions of the mesh that batches are split over; "data" and "fsdp" where there are such, else the first.
        precision: what parameters, inputs and the forward pass are held in; 32-true if left out.

    Raises:
        ConfigurationError: for float16, and for a mesh or a rule that cannot be.

    Example:
        >>> XLAStrategy(mesh={"data": 2, "model": 2}, shard={"*.weight": ("model", None)}).layout.axes
        {'data': 2, 'model': 2}
    """

    name = "xla"
    # XLA's tensors have a version counter, which inference mode does without (torch_xla 2.9: "Cannot set version_counter").
    supports_inference_mode = False
    # Each evaluation of the loss would be read back before the next one is known.
    supports_closure = False

    def __init__(
        self,
        devices: int | str | Sequence[int] | None = None,
        mesh: Mapping[str, int] | None = None,
        shard: Mapping[str, Spec] | None = None,
        batch: Sequence[str] | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(precision)
        self.layout = Layout(mesh, shard, batch)
        self._own_devices = devices
        self._wanted: int | list[int] | None = parse_devices(devices)
        self._kind: str | None = None
        self._device = torch.device("xla", 0)
        self.before_forward = self._cut

    # its place --------------------------------------------------------------------------------------------------------
    def place_on(self, accelerator: str, devices: Any, num_nodes: int) -> None:
        if importlib.util.find_spec("torch_xla") is None:
            raise MissingExtraError("torch_xla", "xla", f"strategy={self.name!r}")
        if accelerator in OTHERS:
            raise ConfigurationError(
                f"accelerator={accelerator!r} with strategy={self.name!r}: torch_xla has TPUs and the CPU. Use accelerator='xla', or "
                "strategy='auto'."
            )
        if accelerator == "tpu" and not (importlib.util.find_spec("libtpu") or os.environ.get("TPU_LIBRARY_PATH")):
            raise ConfigurationError(
                "accelerator='tpu', and libtpu, the TPU's own library, is not here: pip install 'torch_xla[tpu]' on a TPU host, or use "
                "accelerator='cpu' with strategy='xla' to try a script."
            )
        if self._own_devices is None:
            self._wanted = parse_devices(devices)
        if isinstance(self._wanted, list) and len(self._wanted) > 1:
            raise ConfigurationError(
                f"devices={self._wanted}: XLA runs on one device, or on all that there are. Use devices='auto', or one index."
            )
        self._kind = KINDS.get(accelerator)
        self.layout.check_devices(self._wanted)
        self._check_precision()

    def _check_precision(self) -> None:
        if getattr(self.precision, "dtype", None) is torch.float16:
            raise ConfigurationError(
                f"precision={self.precision.name!r} with strategy={self.name!r}: TPUs have no float16, and its scaler would read a flag "
                "back from the device in every step. Use precision='bf16-mixed' or 'bf16-true'."
            )

    @property
    def root_device(self) -> torch.device:
        return self._device

    @property
    def details(self) -> str:
        return self.layout.described(self.modules)

    def setup_environment(self) -> None:
        self._check_precision()
        self._start_runtime()
        super().setup_environment()

    def _start_runtime(self) -> None:
        """Chooses devices, while the process has none yet, and seeds their random numbers by torch's seed."""
        import torch_xla
        from torch_xla import runtime

        is_running = torch_xla._XLAC._xla_runtime_is_initialized()
        if self._kind is not None and self._kind != runtime.device_type():
            if is_running:
                raise ConfigurationError(
                    f"accelerator={self._kind.lower()!r}, and this process uses XLA's {runtime.device_type()} already: start a new one."
                )
            runtime.set_device_type(self._kind)
        if isinstance(self._wanted, int) and not is_running and runtime.device_type() == "CPU":
            # XLA's CPU is as many devices as this says.
            os.environ.setdefault("CPU_NUM_DEVICES", str(self._wanted))
        count, one = runtime.global_runtime_device_count(), isinstance(self._wanted, list) or self._wanted == 1
        if isinstance(self._wanted, int) and self._wanted not in (1, count):
            raise ConfigurationError(
                f"devices={self._wanted}, and XLA has {count} here: use devices='auto' for all of them, or devices=1."
            )
        one = one or count == 1
        has_begun = torch_xla._XLAC._xla_get_spmd_config_is_locked()
        if has_begun and runtime.is_spmd() == one:
            raise ConfigurationError(
                f"this process has begun to use XLA with {'all devices' if one else 'one device'}, and cannot change: run "
                f"devices={'auto' if self._wanted is None else self._wanted!r} in a new one."
            )
        if not one and not runtime.is_spmd():
            runtime.use_spmd()
        index = self._wanted[0] if isinstance(self._wanted, list) else None
        if index is not None and index >= count:
            raise ConfigurationError(f"devices={self._wanted}: XLA has {count} devices here, counted from 0.")
        self._device = torch_xla.device(index)
        if not has_begun:
            _check_autograd(self._device)
        self.layout.begin(1 if one else count)
        _seed()

    def teardown(self) -> None:
        super().teardown()
        if torch_xla_is_used():
            import torch_xla

            torch_xla.sync()

    # modules and optimizers -------------------------------------------------------------------------------------------
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules built in this context come with the precision's dtype, on the CPU: set-up brings them to the device.

        Their random numbers are the CPU's then, and no program is compiled for each of them.
        """
        with self.precision.init_context(), EmptyInit() if empty_init else nullcontext():
            yield

    def setup_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        self.modules = [self.precision.convert_module(module) for module in modules]
        for module in self.modules:
            bring(module, self._device)
            self.layout.place(module)
        return self.modules

    def to_device(self, batch: T) -> T:
        batch = super().to_device(batch)
        return map_tensors(batch, self.layout.split) if self.layout.is_spread else batch

    # the step ---------------------------------------------------------------------------------------------------------
    def _cut(self, window: Window) -> None:
        """The batches of a window are programs of their own: otherwise each length of a window would be another one."""
        if window.index > 0:
            self._sync()

    def end_step(self) -> None:
        super().end_step()
        self._sync()

    def evaluate(self, step_fn: Callable[..., T], batch: Any, extra: tuple[Any, ...]) -> T:
        outputs = self.forward(step_fn, batch, extra)
        self._sync()
        return outputs

    def end_turn(self) -> None:
        self._sync()

    def _sync(self) -> None:
        import torch_xla

        torch_xla.sync()

    # state ------------------------------------------------------------------------------------------------------------
    def save(self, writer: StateWriter, module: nn.Module, optimizers: list[dict[str, Any]] | None) -> None:
        names = [name for name, _ in module.named_parameters()]
        state, states = self._on_host([module.state_dict(), optimizers])
        writer.model(state, replicated=names)
        if states is not None:
            writer.optimizers(states)

    def _on_host(self, trees: list[Any]) -> list[Any]:
        import torch_xla
        from torch_xla.core import xla_model

        torch_xla.sync(wait=True)
        xla_model.wait_device_ops()
        return trees_on_host(trees)

    def load_module(self, reader: WeightReader, module: nn.Module, strict: bool = True) -> None:
        super().load_module(reader, module, strict)
        self.layout.place(module)

    def full_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        return on_host(module.state_dict())


class XLAFSDPStrategy(XLAStrategy):
    """Fully sharded data parallel on XLA: each device holds a part of every parameter and of its optimizer state.

    A parameter is split over all devices along its longest dimension; XLA's partitioner puts the gathers and reductions into the
    program. Names stay as they are, and so do checkpoints.

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
        super().__init__(devices, None, shard, None, precision)
        self.layout = Layout(None, shard, None, fully=True, min_size=min_size)


def torch_xla_is_used() -> bool:
    """True if this process has XLA devices; asks without making any."""
    import sys

    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())


def _check_autograd(device: torch.device) -> None:
    """torch counts the devices that gradients are computed on once, in the first backward of a process."""
    try:
        (torch.ones((), device=device, requires_grad=True) * 1).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise ConfigurationError(
            "this process has computed gradients before XLA was used, and torch does not see its devices any more: run on XLA first, or "
            "in a new process."
        ) from None


def _seed() -> None:
    """XLA's random numbers do not follow `torch.manual_seed` (tried, torch_xla 2.9): they are set once for each seed of torch."""
    import torch_xla

    global _seeded_with
    seed = torch.initial_seed()
    if seed != _seeded_with:
        _seeded_with = seed
        torch_xla.manual_seed(seed % 2**31)
