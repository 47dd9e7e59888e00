"""All of torch's optimizers and schedulers resume bit for bit."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, SCHEDULERS
from same import differences
from torch import nn
from torch import optim as O
from torch.optim import lr_scheduler as schedulers

from leyden.checkpoint.optimizers import from_named, to_named
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.core.errors import ConfigurationError


def build(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    if kind == "SparseAdam":
        return nn.Embedding(10, 3, sparse=True, dtype=dtype)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(module.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        words, values = torch.randint(0, 10, (4,), generator=generator), torch.randn(6, 5, generator=generator)
        batch = words if isinstance(module, nn.Embedding) else values.to(dtype)

        def closure(batch: torch.Tensor = batch) -> Any:
            optimizer.zero_grad()
            loss = module(batch).float().pow(2).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, O.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def save(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointReader:
    with CheckpointWriter(path) as writer:
        writer.model(module.state_dict())
        writer.optimizers([to_named(optimizer, module)])
        return CheckpointReader(writer.commit(progress={}))


def test_every_optimizer_of_torch_is_tested() -> None:
    known = {name for name, kind in vars(O).items() if inspect.isclass(kind) and issubclass(kind, O.Optimizer)}
    assert known - {"Optimizer"} == {name.split("-")[0] for name in OPTIMIZERS}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    # torch's fused SGD on bfloat16 gives another momentum from run to run on the CPU (torch 2.13: 535 of 3000).
    [
        pytest.param(kind, dtype, id=f"{kind}-{dtype}")
        for kind in OPTIMIZERS
        for dtype in (torch.float32, torch.bfloat16)
        if (kind, dtype) != ("SGD-fused", torch.bfloat16)
    ],
)
def test_an_optimizer_resumes_bit_for_bit(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    module = build(kind, dtype)
    optimizer = make(list(module.parameters()))
    train(module, optimizer, range(4))
    reader = save(tmp_path / "c", module, optimizer)

    fresh = build(kind, dtype)
    fresh.load_state_dict(reader.model())
    loaded = make(list(fresh.parameters()))
    from_named(loaded, reader.optimizers()[0], fresh)
    assert differences(loaded.state_dict(), optimizer.state_dict()) == []
    train(module, optimizer, range(4, 8))
    train(fresh, loaded, range(4, 8))
    assert differences(fresh.state_dict(), module.state_dict()) == []
    assert differences(loaded.state_dict(), optimizer.state_dict()) == []


def test_an_optimizer_resumes_from_before_its_first_step(tmp_path: Path) -> None:
    module = build("AdamW", torch.float32)
    reader = save(tmp_path / "c", module, O.AdamW(module.parameters(), lr=0.5))
    loaded = O.AdamW(module.parameters(), lr=0.1)
    from_named(loaded, reader.optimizers()[0], module)
    assert loaded.param_groups[0]["lr"] == 0.5
    assert not loaded.state


def groups_of(module: nn.Module, reverse: bool = False) -> list[dict[str, Any]]:
    weights = [p for p in module.parameters() if p.dim() > 1]
    biases = [p for p in module.parameters() if p.dim() == 1]
    return [{"params": weights[::-1] if reverse else weights, "lr": 0.2}, {"params": biases, "weight_decay": 0.0}]


def test_state_is_keyed_by_name_and_survives_reordering(tmp_path: Path) -> None:
    module = build("AdamW", torch.float32)
    optimizer = O.AdamW(groups_of(module), lr=0.1)
    train(module, optimizer, range(2))
    named = to_named(optimizer, module)
    assert set(named["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert named["param_groups"][0]["params"] == ["0.weight", "2.weight"]
    other = O.AdamW(groups_of(module, reverse=True), lr=0.1)
    from_named(other, save(tmp_path / "c", module, optimizer).optimizers()[0], module)
    for parameter in module.parameters():
        assert differences(other.state[parameter], optimizer.state[parameter]) == []


def test_flags_and_scheduler_entries_are_restored_from_the_saved_groups(tmp_path: Path) -> None:
    module = build("AdamW", torch.float32)
    optimizer = O.AdamW(list(module.named_parameters()), lr=0.1, foreach=True)
    schedulers.StepLR(optimizer, 1)
    loaded = O.AdamW(module.parameters(), lr=0.3)
    from_named(loaded, save(tmp_path / "c", module, optimizer).optimizers()[0], module)
    group = loaded.param_groups[0]
    assert (group["foreach"], group["initial_lr"], group["lr"]) == (True, 0.1, 0.1)
    assert group["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_an_option_that_rounding_left_below_zero_is_restored(option: str, tmp_path: Path) -> None:
    module = build("AdamW", torch.float32)
    optimizer, loaded = O.AdamW(module.parameters()), O.AdamW(module.parameters())
    optimizer.param_groups[0][option] = -1e-18
    from_named(loaded, save(tmp_path / "c", module, optimizer).optimizers()[0], module)
    assert loaded.param_groups[0][option] == -1e-18


def test_parameters_outside_the_module_get_names(tmp_path: Path) -> None:
    module, outside = nn.Linear(2, 1), nn.Parameter(torch.ones(3))
    optimizer = O.SGD([{"params": list(module.parameters())}, {"params": [outside]}], lr=0.1, momentum=0.9)
    (module(torch.ones(1, 2)).sum() + outside.sum()).backward()
    optimizer.step()
    named = to_named(optimizer, {p: f"net.{name}" for name, p in module.named_parameters()})
    assert set(named["state"]) == {"net.weight", "net.bias", "__extra__.1.0"}
    other = O.SGD([{"params": list(module.parameters())}, {"params": [outside]}], lr=0.1, momentum=0.9)
    from_named(other, named, {p: f"net.{name}" for name, p in module.named_parameters()})
    assert torch.equal(other.state[outside]["momentum_buffer"], torch.ones(3))


def test_a_shared_learning_rate_tensor_stays_shared(tmp_path: Path) -> None:
    module = build("Adam", torch.float32)
    rate = torch.tensor(0.1)
    groups = [{"params": [p]} for p in module.parameters()]
    optimizer = O.Adam(groups, lr=rate)
    saved = save(tmp_path / "c", module, optimizer).optimizers()[0]
    assert saved["param_groups"][0]["lr"] is saved["param_groups"][3]["lr"]


class CustomSGD(torch.optim.SGD):
    """An optimizer whose state dict has a counter that belongs to no parameter."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict(state_dict)


def test_an_optimizer_with_its_own_state_dict_resumes(tmp_path: Path) -> None:
    module = build("SGD", torch.bfloat16)
    optimizer = CustomSGD(module.parameters(), lr=0.1, momentum=0.9)
    train(module, optimizer, range(2))
    optimizer.state["seen"] = {"n": 1}  # type: ignore[index]
    reader = save(tmp_path / "c", module, optimizer)
    loaded = CustomSGD(module.parameters(), lr=0.1, momentum=0.9)
    from_named(loaded, reader.optimizers()[0], module)
    assert loaded.calls == 3
    assert loaded.state["seen"] == {"n": 1}  # type: ignore[index]
    assert differences(loaded.state_dict(), optimizer.state_dict()) == []


def test_errors_for_mismatched_state_name_the_mismatch() -> None:
    module = build("Adam", torch.float32)
    optimizer = O.Adam(module.parameters())
    train(module, optimizer, range(1))
    saved = to_named(optimizer, module)
    with pytest.raises(ConfigurationError, match=r"saved, but not in this optimizer: 0.bias, 0.weight"):
        from_named(O.Adam(list(module.parameters())[2:]), saved, module)
    with pytest.raises(ConfigurationError, match=r"in this optimizer, but not saved: __extra__.0.4"):
        from_named(O.Adam([*module.parameters(), nn.Parameter(torch.ones(1))]), saved, module)
    with pytest.raises(ConfigurationError, match="2 parameter groups and the checkpoint has 1"):
        from_named(O.Adam(groups_of(module)), saved, module)
    grouped = to_named(O.Adam(groups_of(module)), module)
    parameters = list(module.parameters())
    with pytest.raises(ConfigurationError, match="0.bias"):
        from_named(O.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}]), grouped, module)
    with pytest.raises(ConfigurationError, match="order"):
        from_named(O.LBFGS(parameters[::-1]), to_named(O.LBFGS(parameters), module), module)
    with pytest.raises(ConfigurationError, match="to_named"):
        from_named(optimizer, {}, module)
    with pytest.raises(ConfigurationError, match="called 'x'"):
        to_named(optimizer, dict.fromkeys(parameters, "x"))


def test_every_scheduler_of_torch_is_tested() -> None:
    known = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind) and issubclass(kind, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_a_scheduler_resumes_bit_for_bit(kind: str, rate: Any, disk: Any, tmp_path: Path) -> None:
    module = build("SGD", torch.float32)

    def make() -> tuple[O.Optimizer, Any]:
        start = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = O.SGD(module.parameters(), lr=start, momentum=0.9)
        return optimizer, SCHEDULERS[kind](optimizer)

    def steps(optimizer: O.Optimizer, scheduler: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, scheduler = make()
    if kind == "SequentialLR" and scheduler._schedulers[0].base_lrs[0] is optimizer.param_groups[0]["lr"]:
        pytest.skip(f"SequentialLR of torch {torch.__version__} writes the rate of each step into its base rate")
    steps(optimizer, scheduler, 4)
    saved = disk(scheduler.state_dict())
    named = save(tmp_path / "c", module, optimizer).optimizers()[0]
    again, fresh = make()
    fresh.load_state_dict(saved)
    from_named(again, named, module)
    assert differences(fresh.state_dict(), scheduler.state_dict()) == []
    assert steps(again, fresh, 6) == steps(optimizer, scheduler, 6)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "NAdam"])
@pytest.mark.parametrize("saved_dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_resumes_in_another_precision(kind: str, saved_dtype: torch.dtype, tmp_path: Path) -> None:
    """State in the parameters' dtype is cast to their new dtype; other state keeps its own."""
    loaded_dtype = torch.bfloat16 if saved_dtype == torch.float32 else torch.float32
    module = build(kind, saved_dtype)
    optimizer = OPTIMIZERS[kind](list(module.parameters()))
    train(module, optimizer, range(4))
    reader = save(tmp_path / "c", module, optimizer)

    other = build(kind, loaded_dtype)
    other.load_state_dict(reader.model())
    loaded = OPTIMIZERS[kind](list(other.parameters()))
    from_named(loaded, reader.optimizers()[0], other)
    for parameter, before in zip(other.parameters(), module.parameters(), strict=True):
        for key, value in loaded.state[parameter].items():
            if isinstance(value, torch.Tensor):
                expected = optimizer.state[before][key]
                assert value.dtype == (expected.dtype if expected.dim() == 0 else loaded_dtype), key
                assert torch.equal(value, expected.to(value.dtype))
    train(other, loaded, range(4, 6))
