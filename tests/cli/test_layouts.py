"""`leyden estimate` by layout: the bytes of a simulated step equal those of a real one, and the printed table."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks.mesh_gpt import GPT, PLAN, SEQUENCE_PLAN, data
from ranks.world import run_world
from torch import Tensor, UntypedStorage, nn

from leyden.cli.main import main
from leyden.strategies import MeshStrategy
from leyden.strategies.fsdp.sharding import local
from leyden.strategies.mesh.layout import Layout
from leyden.strategies.precision import find_precision
from leyden.strategies.window import Window

LAYOUTS = {
    "tp 2": (Layout(1, 1, 2), PLAN, "32-true"),
    "tp 2 and sequence": (Layout(1, 1, 2), SEQUENCE_PLAN, "32-true"),
    "dp_shard 2": (Layout(1, 2, 1), PLAN, "32-true"),
    "dp_shard 2, bf16-mixed": (Layout(1, 2, 1), PLAN, "bf16-mixed"),
    "dp_replicate 2": (Layout(2, 1, 1), PLAN, "32-true"),
}
HOOKS: Any = SimpleNamespace(on_before_backward=(), on_after_backward=(), backward=None)


class DropoutGPT(GPT):
    def __init__(self) -> None:
        super().__init__(dropout=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def batch() -> tuple[Tensor, ...]:
    return tuple(part[:4].clone() for part in data().tensors)


class SavedBytes:
    """Counts the bytes that a real step saves for backward, excluding the modules' parameters."""

    def __init__(self) -> None:
        self.saved: dict[int, UntypedStorage] = {}
        self.weights: dict[int, UntypedStorage] = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        before = nn.modules.module.register_module_forward_pre_hook(lambda module, args: self._enter(module))
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield
        before.remove()

    def _enter(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            self._keep(parameter, self.weights)

    def _save(self, tensor: Tensor) -> Tensor:
        self._keep(tensor, self.saved)
        return tensor

    def _keep(self, tensor: Tensor, storages: dict[int, UntypedStorage]) -> None:
        storage = getattr(local(tensor), "elem", local(tensor)).untyped_storage()
        storages[storage._cdata] = storage

    @property
    def size(self) -> int:
        return sum(storage.nbytes() for key, storage in self.saved.items() if key not in self.weights)


def size(tensors: Any) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def real_step(strategy: Any, module: GPT) -> tuple[int, int, int, int]:
    [optimizer] = strategy.setup_optimizers([module], [module.configure_optimizers()])
    counted = SavedBytes()
    with counted.counting():
        strategy.forward_backward(strategy.setup_step(module.training_step, module), batch(), (0,), Window(), HOOKS)
    optimizer.step()
    parameters = list(module.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return size(parameters), size(p.grad for p in parameters), size(states), counted.size


def bytes_on_real_ranks() -> dict[str, tuple[int, int, int, int]]:
    found = {}
    for name, (layout, plan, precision) in LAYOUTS.items():
        strategy = MeshStrategy(**layout.sizes, plan=plan, precision=find_precision(precision))
        strategy.setup_environment()
        module = DropoutGPT()
        strategy.setup_modules([module])
        found[name] = real_step(strategy, module)
        strategy.teardown()
    return found


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from leyden import DataModule, TrainModule

class Net(TrainModule):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def parallel_plan(self):
        return {"up": "colwise", "down": "rowwise"}

class ReadsValues(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 9 else 2 * loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1 / self.trainer.max_epochs)

class NeedsMemory(Net):
    def __init__(self):
        super().__init__()
        self.largest = float(self.up.weight.max())

class Mixture(Net):
    def __init__(self, width=8):
        super().__init__(width)
        self.router, self.experts = nn.Linear(width, 2), Experts(2, width)
    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(1)
        return super().forward(x) + self.experts(x, index, weights)
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.strategy.ranks.world_size
    def parallel_plan(self):
        return {"experts": "expert_parallel"}

class Experts(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, width, width))
    def forward(self, x, index, weights):
        y = torch.zeros_like(x)
        for expert in range(len(self.weight)):
            row, slot = torch.where(index == expert)
            y = y.index_add(0, row, weights[row, slot, None] * (x[row] @ self.weight[expert]))
        return y

class Deep(Net):
    def __init__(self):
        super().__init__()
        self.up = self.down = None
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
    def parallel_plan(self):
        return {}

class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(torch.randn(6, 8), batch_size=3)

def pairs():
    return [torch.randn(2, 8)]

def fours():
    return [torch.randn(4, 8)]

def none():
    return []

def plain():
    return nn.Linear(4, 4)
"""
NO_LOADER_SCRIPT = SCRIPT.split("class ReadsValues")[0]
DEEP = ("train.py:Deep", "--data", "train.py:fours", "--microbatches", "4")
COMMANDS: dict[str, tuple[str, ...]] = {
    "two sizes": ("train.py:Net", "--tp", "1,2", "--ranks", "2"),
    "all": ("train.py:Net", "--layouts", "--ranks", "3"),
    "named data": ("train.py:Net", "--tp", "2", "--data", "train.py:pairs"),
    "values are read": ("train.py:ReadsValues", "--tp", "2"),
    "in memory": ("train.py:NeedsMemory", "--tp", "2"),
    "no loader": ("no_loader.py", "--tp", "2"),
    "no TrainModule": ("train.py:plain", "--dp_shard", "2"),
    "rows": ("train.py:Net", "--tp", "3"),
    "sizes": ("train.py:Net", "--tp", "3", "--ranks", "4"),
    "words": ("train.py:Net", "--tp", "two"),
    "layouts without ranks": ("train.py:Net", "--layouts"),
    "a strategy": ("train.py:Net", "--tp", "2", "--strategy", "ddp"),
    "fp8": ("train.py:Net", "--tp", "2", "--precision", "fp8"),
    "tokens": ("train.py:Net", "--batch-size", "2", "--seq-len", "4"),
    "some fit": ("train.py:Net", "--tp", "1,2", "--ranks", "2", "--memory", "5KiB"),
    "may fit": ("train.py:ReadsValues", "--tp", "2", "--memory", "1GiB"),
    "none fits": ("train.py:Net", "--tp", "1,2", "--ranks", "2", "--memory", "2KiB"),
    "none fits without a mesh": ("train.py:Net", "--ranks", "1,2", "--memory", "2KB"),
    "an unknown size": ("train.py:Net", "--tp", "2", "--memory", "lots"),
    "experts": ("train.py:Mixture", "--ep", "1,2", "--ranks", "2"),
    "experts without a plan": ("train.py:Net", "--ep", "2"),
    "too many ranks of experts": ("train.py:Mixture", "--ep", "4", "--ranks", "2"),
    "1F1B": (*DEEP, "--pp", "1,2", "--ranks", "2"),
    "GPipe": (*DEEP, "--pp", "2", "--schedule", "gpipe"),
    "Interleaved1F1B": (*DEEP, "--pp", "2", "--schedule", "Interleaved1F1B"),
    "no batch for a pipeline": ("train.py:Deep", "--pp", "2", "--dp_shard", "2", "--data", "train.py:none"),
    "only a pipeline fits": (*DEEP, "--layouts", "--ranks", "4", "--memory", "1.9KiB"),
    "too few blocks": ("train.py:Deep", "--pp", "1,8"),
    "too few micro-batches": ("train.py:Deep", "--pp", "2", "--microbatches", "1"),
    "an unknown schedule": (*DEEP, "--pp", "2", "--schedule", "1F2B"),
    "a schedule alone": (*DEEP, "--tp", "2", "--schedule", "GPipe"),
    "too few experts": ("train.py:Mixture", "--ep", "4", "--ranks", "4"),
}


def bytes_on_simulated_ranks() -> tuple[dict[str, tuple[int, ...]], int]:
    """Returns the bytes of each layout, and those that one process saves without a strategy."""
    from leyden.cli.estimate.layouts import Training
    from leyden.cli.estimate.traced_step import TracedBatch

    found: dict[str, tuple[int, ...]] = {}
    for name, (layout, plan, precision) in {**LAYOUTS, "1 rank": (Layout(1, 1, 1), PLAN, "32-true")}.items():
        with torch.device("meta"):
            module = DropoutGPT()
        [row] = Training(module, plan, TracedBatch(batch(), "")).on(layout, precision)
        assert not row.notes and row.step is not None
        found[name] = (row.memory.weights, row.memory.gradients, row.memory.optimizer, row.step.activations)
    counted, module = SavedBytes(), DropoutGPT()
    with counted.counting():
        module.training_step(batch(), 0)
    return found, counted.size


def run_commands(folder: Path, commands: dict[str, tuple[str, ...]]) -> dict[str, tuple[int, str]]:
    """Runs all commands in one process, which simulates the ranks of one mesh after the other."""
    os.chdir(folder)
    done = {}
    for name, arguments in commands.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main(["estimate", "--precision", "32-true", *arguments])
        done[name] = (status, out.getvalue())
    return done


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "no_loader.py").write_text(NO_LOADER_SCRIPT)
    return run_world(1, run_commands, folder, COMMANDS)[0]


@pytest.mark.full
def test_a_simulated_rank_saves_the_same_bytes_as_a_real_one() -> None:
    (simulated, plain), real = run_world(1, bytes_on_simulated_ranks)[0], run_world(2, bytes_on_real_ranks)
    assert {name: simulated[name] for name in LAYOUTS} == real[0]
    # One simulated rank saves as much as a process without a strategy.
    assert simulated["1 rank"][3] == plain


def rows(text: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.split("  ") if cell] for line in text.splitlines()]
    return [line for line in lines if line and line[0].isdecimal()]


def test_estimate_prints_a_row_for_each_given_size(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["two sizes"]
    assert status == 0, text
    assert "batch       float32 3 × 8; one for each data rank" in text
    # 552 numbers, and SGD without state. FSDP gathers them as one group, along with their gradients; the
    # step saves its input, relu's output and the loss's operand: 3 × (8 + 32 + 8) numbers, with tp 3 × (8 + 16 + 8).
    # FSDP's root stays gathered, so half of the numbers are sent once, and half of their gradients. Under tp each
    # rank sends the sum of 3 × 8 outputs.
    assert rows(text) == [
        ["2", "dp_shard 2", "32-true", "1.1 KiB", "1.1 KiB", "0 B", "4.3 KiB", "576 B", "7.0 KiB"],
        ["2", "tp 2", "32-true", "1.1 KiB", "1.1 KiB", "0 B", "0 B", "384 B", "2.6 KiB"],
        ["2", "dp_shard 2", "32-true", "2.2 KiB", "0 B"],
        ["2", "tp 2", "32-true", "0 B", "96 B"],
    ]


def test_a_budget_marks_the_rows_that_fit(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["some fit"]
    assert status == 0 and "fits 5.0 KiB" in text, text
    assert [row[-1] for row in rows(text)[:2]] == ["no", "yes"]
    assert rows(printed["none fits"][1])[0][-1] == "no"
    # Its activations, which could not be traced, come on top.
    assert rows(printed["may fit"][1])[0][-1] == "unknown"


def test_experts_get_the_same_number_of_tokens(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["experts"]
    assert status == 0 and "note  tokens are spread evenly over the experts" in text, text
    whole, divided = rows(text)[2:]
    # Of each rank's 3 tokens, the first and the last choose the expert of rank 0. It sends the count of the other
    # expert, a token with its weight, two outputs, and in backward the gradients of an output, two tokens and weights.
    assert divided[-1] == f"{8 + (8 + 1) * 4 + 2 * 8 * 4 + 8 * 4 + 2 * (8 + 1) * 4} B" and whole[-1] == "0 B"


def test_the_layouts_option_lists_every_layout_that_fits(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["all"]
    assert status == 0, text
    assert [row[1] for row in rows(text)] == 2 * ["dp_shard 3", "dp_replicate 3"]
    assert "left out  tp 3: " in text and "which tp=3 does not divide" in text


def test_each_schedule_keeps_its_micro_batches(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["1F1B"]
    assert status == 0, text
    # 2 of 4 layers with 72 numbers. A row of the batch has 32 bytes, and is sent in both directions. Rank 0 keeps the
    # batch, buffers for 4 gradients, and for 2 micro-batches the input of its second layer and its output. Rank 1 keeps
    # 4 receive buffers, and for 1 micro-batch the input of its second layer, the operand of the loss, and the loss.
    held = ["576 B", "576 B", "0 B", "0 B"]
    assert rows(text)[1:3] == [
        ["2", "pp 2", "32-true", "0", "blocks.0 to 1", *held, f"{128 + 4 * 32 + 2 * (32 + 32)} B", "1.5 KiB"],
        ["2", "pp 2", "32-true", "1", "blocks.2 to 3", *held, f"{4 * 32 + 32 + 32 + 4} B", "1.3 KiB"],
    ]
    assert [row[-2:] for row in rows(text)[3:6]] == [["0 B", "1.7 KiB"], ["128 B", "0 B"], ["128 B", "0 B"]]
    assert "pp 2    32-true    1F1B of 4 micro-batches  20.0%   0" in text
    # All 4 micro-batches are under way when the first backward pass begins.
    kept = [row[-2] for row in rows(printed["GPipe"][1])[:2]]
    assert kept == [f"{128 + 4 * 32 + 4 * (32 + 32)} B", f"{4 * 32 + 4 * (32 + 32 + 4)} B"]
    # Each rank holds two stages, with buffers of their own, and sends between four.
    first, second = rows(printed["Interleaved1F1B"][1])[:2]
    assert (first[4], second[4]) == ("blocks.0, blocks.2", "blocks.1, blocks.3")
    assert [row[-1] for row in rows(printed["Interleaved1F1B"][1])[2:]] == ["384 B", "384 B"]
    assert "Interleaved1F1B of 4 micro-batches  11.1%" in printed["Interleaved1F1B"][1]


def test_without_a_batch_stages_have_memory_but_no_activations(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["no batch for a pipeline"]
    assert status == 0 and "no activations: its loader has no batch" in text, text
    # Half of 576 bytes; all of them gathered, and all of their gradients.
    assert rows(text)[0][5:] == ["288 B", "288 B", "0 B", "1.1 KiB", "-", "1.7 KiB + activations"]


def test_a_pipeline_is_proposed_if_nothing_else_fits(printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed["only a pipeline fits"]
    assert status == 0, text
    assert "proposed  pp 4, 32-true: nothing on 4 ranks fits without a pipeline" in text, text
    assert "pp 2" not in printed["all"][1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("named data", "batch       float32 2 × 8"),
        ("values are read", "no activations: the step cannot be traced (DataDependentOutputException"),
        ("values are read", "optimizer is adamw: configure_optimizers cannot be traced (LeydenError"),
        ("in memory", "built in memory, since it failed on the meta device"),
        ("no loader", "no activations: neither the module nor the script has a loader"),
        ("no TrainModule", "no activations: Linear is not a TrainModule"),
        ("no TrainModule", "optimizer is adamw: Linear is not a TrainModule"),
    ],
)
def test_an_empty_column_states_its_reason(printed: dict[str, tuple[int, str]], name: str, words: str) -> None:
    status, text = printed[name]
    assert status == 0 and words in text, text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rows", "which tp=3 does not divide"),
        ("sizes", "a mesh of dp_shard=-1, tp=3 does not match 4 ranks: use"),
        ("words", "--tp two: give sizes, such as 1,2,4"),
        ("layouts without ranks", "--layouts tries all sizes for --ranks"),
        ("a strategy", "--strategy ddp has no layouts of a mesh"),
        ("fp8", "--precision fp8 replaces layers, which cannot be traced. Use bf16-mixed"),
        ("tokens", "but Net is a TrainModule"),
        ("none fits", "nothing fits in 2.0 KiB: the least, 2.6 KiB on a rank, is tp 2, 32-true. Shard over more ranks"),
        ("none fits without a mesh", "nothing fits in 2.0 KiB: the least, 6.5 KiB on a rank, is fsdp_cpu_offload"),
        ("an unknown size", "--memory lots: give what a rank has, such as 80GiB or 24GB."),
        ("experts without a plan", "ep=2 needs a plan of the experts: pass MeshStrategy(plan={pattern: "),
        ("too many ranks of experts", "ep=4 does not divide dp_shard=2: experts are divided over ranks that shard"),
        ("too few blocks", "the pipeline has 8 stages, and 'blocks' has 4 blocks: use at most 4 stages."),
        ("too few micro-batches", "microbatches=1: the schedule 1F1B over 2 ranks needs at least 2. Use more (8 keep"),
        ("an unknown schedule", "schedule='1F2B' is unknown. Did you mean"),
        ("a schedule alone", "schedule='GPipe' without pp: only a pipeline uses it. Set pp to 2 or more, or leave out"),
        ("too few experts", "'experts' has 2 experts, which ep=4 does not divide: choose an ep that divides 2."),
    ],
)
def test_invalid_options_are_refused_with_the_fix(printed: dict[str, tuple[int, str]], name: str, words: str) -> None:
    status, text = printed[name]
    assert status == 2 and words in text, text


def test_a_transformers_model_is_traced_with_a_batch_of_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **heads, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = ("--batch-size", "2", "--seq-len", "8")
    commands = {"tokens": ("config.json", "--tp", "2", *tokens), "no tokens": ("config.json", "--tp", "2")}
    done = run_world(1, run_commands, tmp_path, commands)[0]
    status, text = done["tokens"]
    assert status == 0 and "batch       int64 2 × 8" in text, text
    assert rows(text)[0][7] != "-"
    status, text = done["no tokens"]
    assert status == 0 and "no activations: give --batch-size and --seq-len" in text, text


def test_activations_of_divided_sequences_are_divided(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "num_hidden_layers": 4}
    config |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = "config.json", "--cp", "1,2,4", "--dp_shard", "1", "--batch-size", "1", "--seq-len", "8192"
    status, text = run_world(1, run_commands, tmp_path, {"cp": command})[0]["cp"]
    assert status == 0
    found = {row[1]: float(row[7].removesuffix(" MiB")) for row in rows(text)[:3]}
    one = found["1 rank"]
    for ranks in (2, 4):
        # What all parts hold besides is a mask that the blocks share.
        assert 0.9 * one / ranks <= found[f"cp {ranks}"] <= 1.15 * one / ranks
