"""`leyden plan`: placements and bytes equal those of real ranks, and plans that fit would reject are refused."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from ranks.mesh_gpt import GPT, PLAN
from ranks.world import run_world

from leyden.cli.main import main
from leyden.strategies import MeshStrategy
from leyden.strategies.mesh.layout import Layout

SCRIPT = """
import torch
from torch import nn
from leyden import TrainModule

class Net(TrainModule):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
    def parallel_plan(self):
        return {"blocks.*": "gather"}

def build():
    return Net(depth=3)

PLAN = {"blocks.*": "colwise", "head": "replicate"}
TYPO = {"block.*": "colwise"}
"""
TWO_MODULES_SCRIPT = """
from leyden import TrainModule
class A(TrainModule): pass
class B(TrainModule): pass
"""
TIED_SCRIPT = """
from torch import nn
from leyden import TrainModule

class Tied(TrainModule):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(3, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 3, bias=False)
        self.head.weight = self.tokens.weight
"""
EXPERTS_SCRIPT = """
import torch
from torch import nn
from leyden import TrainModule

class Experts(TrainModule):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(4, 8), nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(8, 2, 4))
        self.experts.forward = lambda x, index, weights: x
    def parallel_plan(self):
        return {"experts": "expert_parallel"}
"""
LAYOUTS = (Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 1, 1))
COMMANDS = {
    "joined": ("train.py", "--tp", "2", "--ranks", "4"),
    "each": ("train.py", "--tp", "2", "--each"),
    "a build function": ("train.py:build", "--dp_shard", "2"),
    "another plan": ("train.py:Net", "--args", '{"width": 4}', "--tp", "2", "--plan", "train.py:PLAN"),
    "two classes": ("both.py",),
    "no name": ("train.py:Nett",),
    "no script": ("trane.py",),
    "sizes": ("train.py", "--tp", "3", "--ranks", "4"),
    "no plan": ("torch.nn:Linear", "--args", '{"in_features": 4, "out_features": 4}', "--tp", "2"),
    "a typo": ("train.py", "--tp", "2", "--plan", "train.py:TYPO"),
    "a class as a plan": ("train.py", "--tp", "2", "--plan", "train.py:Net"),
    "rows": ("train.py", "--tp", "3"),
    "a pipeline": ("train.py", "--pp", "2", "--dp_shard", "2"),
    "a tied pipeline": ("tied.py", "--pp", "2"),
    "stages that repeat": ("tied.py", "--pp", "2", "--schedule", "Interleaved1F1B"),
    "too few blocks": ("train.py", "--pp", "3"),
    "experts": ("experts.py", "--dp_shard", "4", "--ep", "2"),
}


def run_commands(folder: Path) -> dict[str, tuple[int, str]]:
    """Runs all commands in one process, which simulates the ranks of one mesh after the other."""
    os.chdir(folder)
    done = {}
    for name, arguments in COMMANDS.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            status = main(["plan", *arguments])
        done[name] = (status, out.getvalue())
    return done


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "both.py").write_text(TWO_MODULES_SCRIPT)
    (folder / "experts.py").write_text(EXPERTS_SCRIPT)
    (folder / "tied.py").write_text(TIED_SCRIPT)
    return run_world(1, run_commands, folder)[0]


def test_repeated_layers_share_a_row(done: dict[str, tuple[int, str]]) -> None:
    status, text = done["joined"]
    assert status == 0, text
    rows = [line.split("  ") for line in text.splitlines() if line]
    found = [[cell.strip() for cell in row if cell] for row in rows]
    # Two layers of 64 numbers are split over four ranks; the head's bias of 3 over two, the first of which holds 2.
    assert found == [
        ["name", "shape", "style", "placement", "bytes per rank"],
        ["blocks.*.weight (× 2)", "8 × 8", "gather", "dp_shard S(0), tp S(0)", "128"],
        ["blocks.*.bias (× 2)", "8", "gather", "dp_shard S(0), tp S(0)", "16"],
        ["head.weight", "3 × 8", "-", "dp_shard S(0), tp R", "64"],
        ["head.bias", "3", "-", "dp_shard S(0), tp R", "8"],
        ["mesh", "dp_shard 2 × tp 2 of 4 ranks"],
        ["parameters", "684 B as built"],
        ["per rank", "216 B, 31.58% of them; 0 B are whole everywhere"],
        ["placement", "S(n): split along dimension n; R: the same on each rank"],
    ]


def test_a_pipeline_places_each_block_on_one_stage(done: dict[str, tuple[int, str]]) -> None:
    status, text = done["a pipeline"]
    assert status == 0, text
    found = [" ".join(line.split()) for line in text.splitlines()]
    assert "blocks.0.weight 8 × 8 - pp 0, dp_shard S(0) 128" in found
    assert "head.weight 3 × 8 - pp 1, dp_shard S(0) 64" in found
    # Half of a layer of 288 bytes; and of another, with the head's 108 bytes, of whose 3 rows the first rank has 2.
    assert "on pp 0 144 B, 21.05% of them; 0 B are whole on its ranks" in found
    assert "on pp 1 216 B, 31.58% of them; 0 B are whole on its ranks" in found
    found = [" ".join(line.split()) for line in done["a tied pipeline"][1].splitlines()]
    assert "tokens.weight 3 × 8 - pp 0 and 1 96" in found and "head.weight 3 × 8 - is tokens.weight 0" in found
    assert "blocks.*.weight (× 2) 8 × 8 - pp 0 512" in found
    places = [line.split()[-2] for line in done["stages that repeat"][1].splitlines() if line.startswith("blocks")]
    assert places == ["0", "1"]


def test_experts_are_placed_over_ep(done: dict[str, tuple[int, str]]) -> None:
    status, text = done["experts"]
    assert status == 0, text
    # Each rank holds 2 of 8 experts, and a quarter of the router's 8 rows.
    found = [" ".join(line.split()) for line in text.splitlines()]
    assert "experts.up 8 × 2 × 4 expert_parallel expert_shard S(0), ep S(0) 64" in found
    assert "router.weight 8 × 4 - dp_shard S(0) 32" in found
    assert "dp_shard 4 (experts over ep 2) of 4 ranks" in text


def test_the_each_option_prints_one_row_per_parameter(done: dict[str, tuple[int, str]]) -> None:
    names = [line.split()[0] for line in done["each"][1].splitlines()[1:7]]
    assert names == [f"{layer}.{tensor}" for layer in ("blocks.0", "blocks.1", "head") for tensor in ("weight", "bias")]
    assert "tp 2 of 2 ranks" in done["each"][1]


def test_a_function_in_the_script_may_build_the_model(done: dict[str, tuple[int, str]]) -> None:
    assert "blocks.*.weight (× 3)" in done["a build function"][1]


def test_the_plan_option_replaces_the_models_plan(done: dict[str, tuple[int, str]]) -> None:
    status, text = done["another plan"]
    assert status == 0 and "4 × 4  colwise" in text, text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("two classes", "both.py has 2 TrainModules: A, B. Name the class"),
        ("no name", "train.py has no 'Nett'. Did you mean 'Net'"),
        ("no script", "there is no script 'trane.py'"),
        ("sizes", "a mesh of dp_shard=-1, tp=3 does not match 4 ranks: use"),
        ("no plan", "tp=2 needs a plan of the layers to split"),
        ("a typo", "the plan's 'block.*' matches no module of Net. Did you mean 'blocks.*'"),
        ("a class as a plan", "--plan train.py:Net is"),
        ("too few blocks", "the pipeline has 3 stages, and 'blocks' has 2 blocks: use at most 2 stages."),
        ("rows", "blocks.0.weight has 8 rows, which tp=3 does not divide"),
    ],
)
def test_plans_that_fit_would_reject_are_refused(done: dict[str, tuple[int, str]], name: str, words: str) -> None:
    status, text = done[name]
    assert status == 2 and words in text, text


def bytes_on_real_ranks() -> list[list[tuple[str, int]]]:
    found = []
    for layout in LAYOUTS:
        strategy, module = MeshStrategy(**layout.sizes, plan=PLAN), GPT()
        strategy.setup_environment()
        strategy.setup_modules([module])
        parameters: Any = module.named_parameters()
        found.append([(name, p.to_local().numel() * p.element_size()) for name, p in parameters])
        strategy.teardown()
    return found


def bytes_on_simulated_ranks() -> list[list[tuple[str, int]]]:
    from leyden.cli.estimate.placements import placed

    return [
        [(row.name, row.held) for row in placed(GPT(), layout, PLAN) if not row.placement.startswith("is ")]
        for layout in LAYOUTS
    ]


def test_simulated_ranks_hold_the_same_bytes_as_real_ones() -> None:
    real, simulated = run_world(2, bytes_on_real_ranks), run_world(1, bytes_on_simulated_ranks)
    assert simulated[0] == real[0] == real[1]
