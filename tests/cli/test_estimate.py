"""`leyden estimate`: its numbers against the bytes of a real step, and how it finds models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from leyden.cli.estimate.estimate import memory

MODEL = """
import torch
from torch import nn
from leyden import TrainModule

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
    def forward(self, x):
        return self.inner(x)

class Net(TrainModule):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.head = nn.Linear(width, 3)
        self.head.bias.requires_grad_(False)
    def configure_model(self):
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(4))

class RequiredWidth(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

class ReadsWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        assert self.layer.weight.sum().item() != 1e9

word = 3
"""


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda parameters: torch.optim.AdamW(parameters)),
        ("momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
        ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
)
def test_the_estimate_for_one_rank_equals_a_real_step(name: str, make: Any, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    estimated = memory(model, "single_device", 1, "32-true" if dtype == torch.float32 else "bf16-true", name)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [entry for state in optimizer.state.values() for key, entry in state.items() if key != "step"]
    assert estimated.weights == bytes_of([*model.parameters(), *model.buffers()])
    assert estimated.gradients == bytes_of(parameter.grad for parameter in model.parameters())
    assert estimated.optimizer == bytes_of(entry for entry in states if entry is not None)
    assert estimated.total == estimated.weights + estimated.gradients + estimated.optimizer


def test_shard_sizes_match_fully_shard() -> None:
    model = nn.Linear(4, 5)
    # Five rows on two ranks: the first has three.
    found = memory(model, "fsdp", 2, "32-true", "adamw")
    assert (found.weights, found.gradients, found.optimizer) == ((12 + 3) * 4, (12 + 3) * 4, 2 * (12 + 3) * 4)
    assert found.passing == 3 * 25 * 4
    offloaded = memory(model, "fsdp_cpu_offload", 2, "32-true", "adamw")
    assert (offloaded.weights, offloaded.optimizer, offloaded.passing) == (0, 0, found.passing)
    assert memory(model, "ddp", 2, "32-true", "adamw").gradients == 2 * 25 * 4


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models_to_estimate.py").write_text(MODEL)
    return tmp_path


@pytest.mark.usefixtures("models")
def test_modules_built_in_configure_model_are_counted(invoke: Any) -> None:
    done = invoke("estimate", "models_to_estimate:Net", "--ranks", "1,4", "--dtypes", "float32,bf16")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "parameters  315, 312 of them trained; 1.2 KiB as built, buffers 0 B"
    assert lines[2].startswith("group       FSDP gathers at most 72 parameters")
    rows = [line.split() for line in lines[6:]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (precision, *row)
        for precision in ("32-true", "bf16-mixed")
        for row in (
            ("1", "single_device"),
            ("4", "ddp"),
            ("4", "fsdp_shard_grad_op"),
            ("4", "fsdp"),
            ("4", "fsdp_cpu_offload"),
        )
    ]


@pytest.mark.usefixtures("models")
def test_the_args_option_is_passed_to_the_class(invoke: Any) -> None:
    assert "--args" in invoke("estimate", "models_to_estimate:RequiredWidth").stderr
    done = invoke("estimate-memory", "models_to_estimate.RequiredWidth", "--args", json.dumps({"width": 100_000}))
    # 40 GB of parameters, built without allocating them.
    assert "10,000,100,000" in done.stdout and "37.3 GiB" in done.stdout
    done = invoke("estimate", "models_to_estimate:ReadsWeights")
    assert "note        built in memory" in done.stdout


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("models_to_estimate:Nett",), "Did you mean 'Net'"),
        (("no_such_module:Net",), "there is no module 'no_such_module'"),
        (("gpt2",), "add --download"),
        (("org/model",), "add --download"),
        (("models_to_estimate:Net", "--ranks", "two"), "--ranks"),
        (("models_to_estimate:Net", "--precision", "bf61"), "Did you mean 'bf16'"),
        (("models_to_estimate:Net", "--strategy", "dpp"), "Did you mean 'ddp'"),
        (("models_to_estimate:Net", "--args", "width=3"), "not valid JSON"),
    ],
)
def test_invalid_options_are_refused_with_the_fix(invoke: Any, arguments: tuple[str, ...], words: str) -> None:
    done = invoke("estimate", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_fp8_takes_as_much_memory_as_bf16() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    for strategy in ("single", "ddp", "fsdp"):
        found = [memory(model, strategy, 2, precision, "adamw") for precision in ("fp8", "bf16-mixed")]
        assert found[0] == found[1] and found[0].passing > 0
