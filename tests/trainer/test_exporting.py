"""Export to TorchScript: exports predict like the module, whose training continues unchanged."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Squares
from torch import Tensor, nn

from leyden import ConfigurationError, Trainer, TrainModule

DATA = [torch.linspace(-1, 1, 8).reshape(4, 2), torch.ones(4, 2)]


class Gated(Squares):
    """A module with a branch that only scripting keeps, with hyperparameters and a frozen part."""

    def __init__(self, width: int = 3) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))
        )
        self.save_hyperparameters()
        self.frozen = nn.BatchNorm1d(2).eval()

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = self.net(self.frozen(x))
        if bool(x.sum() > 1000):
            x = x * 0
        return x + x if twice else x


def train_two_epochs(module: Gated, export: bool, **options: Any) -> list[Any]:
    """Trains two epochs, with an export between them if asked for; returns the final weights."""
    trainer = Trainer(**QUIET, max_epochs=1)
    torch.manual_seed(3)
    trainer.fit(module, DATA)
    if export:
        module.to_torchscript(**options)
    module.frozen.eval()
    trainer.fit(module, DATA)
    return [tensor.tolist() for tensor in module.state_dict().values()]


@pytest.mark.filterwarnings("ignore:TorchScript is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exports_predict_like_the_module_and_leave_its_training_unchanged(tmp_path: Path) -> None:
    plain = train_two_epochs(Gated(), export=False)
    cases: list[dict[str, Any]] = [
        {},
        {"method": "trace", "example_inputs": DATA[0]},
        {"method": "trace", "example_inputs": (DATA[0],), "check_trace": False},
        {"method": "trace", "example_inputs": {"x": DATA[0]}},
    ]
    for case in cases:
        assert train_two_epochs(Gated(), export=True, **case) == plain
        module = Gated()
        exported = module.to_torchscript(tmp_path / "module.pt", **case)
        # Each part keeps its mode.
        assert module.training and module.net[1].training and not module.frozen.training and not exported.training
        loaded = torch.jit.load(tmp_path / "module.pt")
        module.eval()
        assert torch.equal(loaded(DATA[1]), module(DATA[1]))
    module = Gated()
    module.example_input_array = DATA[0]
    file = io.BytesIO()
    assert torch.equal(module.to_torchscript(str(tmp_path / "again.pt"), "trace")(DATA[1]), module.eval()(DATA[1]))
    module.to_torchscript(file)
    assert file.tell() > 0 and (tmp_path / "again.pt").exists()
    # A script keeps the branch for large inputs; a trace does not.
    huge = DATA[0] * 1e9
    assert float(module.to_torchscript()(huge.abs()).sum()) == float(module(huge.abs()).sum())


class Outer(TrainModule):
    """A module that contains another TrainModule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_one_deprecation_warning_points_to_the_callers_line() -> None:
    module = Outer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exported = module.to_torchscript()
    [warning] = [one for one in caught if "jit" in str(one.message) or "TorchScript" in str(one.message)]
    assert warning.filename == __file__ and "torch.export.export" in str(warning.message)
    assert torch.equal(exported(DATA[0]), module.eval()(DATA[0]))


@pytest.mark.filterwarnings("ignore:TorchScript is deprecated")
def test_invalid_exports_raise() -> None:
    module = Gated()
    with pytest.raises(ConfigurationError, match=r"to_torchscript\(method='traced'\)"):
        module.to_torchscript(method="traced")
    with pytest.raises(ConfigurationError, match=r"to_torchscript\(method='trace'\) needs an input: pass example_inp"):
        module.to_torchscript(method="trace")
    assert module.training and not module.frozen.training
    with pytest.raises(RuntimeError, match="undefined_function|has no attribute"):
        Broken().to_torchscript()


class Broken(Squares):
    """A module whose forward pass cannot be compiled."""

    def forward(self, x: Tensor) -> Any:
        return self.no_such_part(x)
