"""ModelSummary: the table, its counts, and the absence of side effects."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import QUIET, Line
from same import same_weights
from torch import Tensor, nn

from leyden.callbacks.model_summary import ModelSummary, Summary, summarize
from leyden.core.errors import ConfigurationError
from leyden.trainer.trainer import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.decoder = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(3))
        self.decoder.weight.requires_grad = False
        self.encoder[1].eval()
        self.example_input_array: Any = torch.ones(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        torch.rand(1)
        return self.decoder(self.encoder(x))  # type: ignore[no-any-return]


def rows(summary: Summary) -> dict[str, tuple[Any, ...]]:
    return {
        layer.name: (
            layer.type,
            layer.num_parameters,
            layer.num_trainable,
            layer.training,
            layer.in_size,
            layer.out_size,
        )
        for layer in summary.layers
    }


def test_rows_and_totals_count_parameters_bytes_and_modes() -> None:
    summary = summarize(Net())
    assert rows(summary) == {
        "encoder": ("Sequential", 56, 56, True, [2, 4], [2, 8]),
        "decoder": ("Linear", 36, 4, True, [2, 8], [2, 4]),
        "(own)": ("parameters", 3, 3, None, None, None),
    }
    assert (summary.total_parameters, summary.trainable_parameters) == (95, 63)
    assert summary.model_bytes == 95 * 4
    assert (summary.modules_in_train_mode, summary.modules_in_eval_mode) == (4, 1)


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["encoder", "decoder", "(own)"]),
        (2, ["encoder", "encoder.0", "encoder.1", "encoder.2", "decoder", "(own)"]),
        (-1, ["encoder", "encoder.0", "encoder.1", "encoder.2", "decoder", "(own)"]),
    ],
)
def test_depth_limits_the_rows_and_not_the_totals(depth: int, names: list[str]) -> None:
    summary = summarize(Net(), depth)
    assert [layer.name for layer in summary.layers] == names
    assert summary.total_parameters == 95


def test_a_summary_changes_neither_weights_nor_modes_nor_random_numbers() -> None:
    net = Net()
    before = copy.deepcopy(net)
    numbers = torch.get_rng_state()
    modes = [layer.training for layer in net.modules()]
    summarize(net, -1)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert same_weights(net, before)
    assert [layer.training for layer in net.modules()] == modes
    assert not any(layer._forward_hooks for layer in net.modules())


def test_shared_parameters_count_once() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    net["head"].weight = net["embedding"].weight  # type: ignore[assignment]
    summary = summarize(net)
    assert [layer.num_parameters for layer in summary.layers] == [40, 40]
    assert summary.total_parameters == 40


def test_lazy_modules_are_marked() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    net.example_input_array = torch.ones(1, 2)  # type: ignore[assignment]
    summary = summarize(net)
    assert (summary.total_parameters, summary.uninitialized) == (4, 2)
    assert "2 parameters of lazy modules are not counted" in str(summary)
    assert str(summary).splitlines()[2].split("|")[3].strip() == "?"
    assert isinstance(net[0], nn.LazyLinear)


def test_bytes_and_example_inputs_follow_the_dtype() -> None:
    net = Net().to(torch.bfloat16)
    summary = summarize(net)
    assert summary.model_bytes == 95 * 2
    assert rows(summary)["decoder"][5] == [2, 4]


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ((torch.ones(2, 3), torch.ones(2, 3)), [[2, 3], [2, 3]]),
        ({"a": torch.ones(5, 3), "b": torch.ones(5, 3)}, [[5, 3], [5, 3]]),
    ],
)
def test_examples_may_hold_several_inputs(example: Any, expected: Any) -> None:
    class Inner(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> dict[str, Any]:
            return {"sum": a + b, "parts": (a, "text")}

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.example_input_array = example

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return self.inner(a, b)

    (layer,) = summarize(Two()).layers
    assert layer.in_size == expected
    assert layer.out_size == {"sum": expected[0], "parts": [expected[0], "?"]}


def test_an_invalid_example_input_warns_and_omits_only_the_sizes() -> None:
    net = Net()
    net.example_input_array = torch.ones(2, 5)
    with pytest.warns(UserWarning, match=r"the summary shows no sizes: forward\(example_input_array\) raised"):
        summary = summarize(net)
    assert rows(summary)["decoder"] == ("Linear", 36, 4, True, None, None)
    assert net.training


def test_the_table_prints_rows_and_totals() -> None:
    lines = str(summarize(Net())).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == [
        "",
        "Name",
        "Type",
        "Params",
        "Trainable",
        "Mode",
        "In sizes",
        "Out sizes",
    ]
    assert [cell.strip() for cell in lines[3].split("|")] == [
        "1",
        "decoder",
        "Linear",
        "36",
        "4",
        "train",
        "[2, 8]",
        "[2, 4]",
    ]
    assert [line.split()[0] for line in lines[6:]] == ["63", "32", "95", "380", "4", "1"]


@pytest.mark.parametrize(
    ("numel", "text"), [(999, "999"), (1000, "1.0 K"), (123_456, "123 K"), (7_250_000_000, "7.2 B")]
)
def test_large_counts_get_a_unit(numel: int, text: str) -> None:
    net = nn.ParameterList([nn.Parameter(torch.empty(numel, device="meta"))])
    assert str(summarize(net, 0)).splitlines()[2].split("  ")[0] == text


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_fit_prints_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    module = Line(4, 2)
    module.example_input_array = torch.ones(3, 4)
    trainer = Trainer(**QUIET, max_steps=1, precision=precision, callbacks=ModelSummary(), default_root_dir=tmp_path)
    trainer.fit(module, [torch.ones(3, 4)])
    printed = capsys.readouterr().out
    assert "0 | layer | Linear | 10     | 10        | train | [3, 4]   | [3, 2]" in printed
    assert "\n10    parameters in total\n" in printed


@pytest.mark.parametrize("depth", [-2, 1.0, "1", True])
def test_an_invalid_depth_raises(depth: Any) -> None:
    for make in (ModelSummary, lambda depth: summarize(nn.Linear(1, 1), depth)):
        with pytest.raises(ConfigurationError, match="give the number of levels to show"):
            make(depth)


def test_scripted_modules_have_a_row_without_sizes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.ones(3, 2)
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 4), nn.ReLU()))
            self.traced = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
            self.plain = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.plain(self.traced(self.scripted(x)))  # type: ignore[no-any-return]

    found = {layer.name: layer for layer in summarize(Mixed()).layers}
    assert (found["scripted"].type, found["scripted"].num_parameters, found["scripted"].in_size) == (
        "Sequential",
        12,
        None,
    )
    assert found["traced"].type == "Linear" and found["plain"].in_size == [3, 4]
