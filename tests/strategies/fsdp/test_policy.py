"""Wrap policies, on unsharded models in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from leyden.core.errors import ConfigurationError
from leyden.strategies.fsdp.blocks import compile_blocks
from leyden.strategies.fsdp.policy import choose


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)


class Decoder(Block):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.decoder = nn.Sequential(*(Decoder() for _ in range(2)), nn.LayerNorm(4))
        self.tiny = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.head = nn.Linear(4, 10)


BLOCKS = ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1"]


def test_auto_wraps_the_repeated_block() -> None:
    assert choose(Model(), "auto").names == BLOCKS
    assert choose(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), "auto").names == []
    stages = nn.Module()
    stages.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    # The outermost repeated module is the group, and its inner modules are gathered with it.
    assert choose(stages, "auto").names == ["stages.0", "stages.1"]


@pytest.mark.parametrize("policy", [Block, "Block", {Block}, ["Block", Decoder]])
def test_classes_and_class_names_choose_groups(policy: Any) -> None:
    assert sorted(choose(Model(), policy).names) == sorted(BLOCKS)
    assert choose(Model(), {"Decoder"}).names == ["decoder.0", "decoder.1"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"Blocks"}, r"names Blocks, and the model has no such module. Did you mean 'Block'\?"),
        ({nn.Conv2d}, "names Conv2d"),
        ([3], "contains 3: use classes of modules"),
        (True, "auto_wrap_policy=True: use 'auto'"),
        ({nn.ModuleList}, "'encoder', a ModuleList, which has no forward"),
    ],
)
def test_invalid_policies_are_refused(policy: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose(Model(), policy)


@pytest.mark.parametrize("least", [12, 30, 45, 60])
def test_a_minimum_size_chooses_groups_as_in_fsdp1(least: int) -> None:
    """A block has 28 parameters, the embedding 40, the head 50."""
    ours = choose(Model(), least).names
    theirs = choose(Model(), functools.partial(size_based_auto_wrap_policy, min_num_params=least)).names
    if least == 12:
        assert set(ours) >= {"embed", "head", "encoder.0.layer"}
    if least == 30:
        assert set(ours) == {"embed", "head", "decoder"}
    assert sorted(ours) == sorted(theirs)
    with pytest.raises(ConfigurationError, match="of at least 1"):
        choose(Model(), 0)


def test_a_function_chooses_groups() -> None:
    assert choose(Model(), lambda module: isinstance(module, Decoder)).names == ["decoder.0", "decoder.1"]
    assert sorted(choose(Model(), ModuleWrapPolicy({Block})).names) == sorted(BLOCKS)
    assert choose(Model(), None).names == []


def test_groups_list_children_first_and_skip_modules_without_parameters() -> None:
    names = choose(Model(), {Block, nn.Linear, nn.LayerNorm}).names
    assert names.index("encoder.0.layer") < names.index("encoder.0") and "decoder.2" in names
    assert choose(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), {nn.ReLU}).names == []
    model = Model()
    assert "head" not in choose(model, {nn.Linear}, ignored=set(model.head.parameters())).names


def test_groups_that_share_a_parameter_dissolve_into_their_parent() -> None:
    model = Model()
    model.encoder[1].layer.weight = model.encoder[0].layer.weight
    groups = choose(model, "auto")
    assert groups.names == ["encoder.2", "decoder.0", "decoder.1"]
    assert groups.tied == {
        "encoder.0": "tied to encoder.1.layer.weight",
        "encoder.1": "tied to encoder.0.layer.weight",
    }
    shared = Model()
    shared.encoder.append(shared.encoder[0])
    # A module used twice in the model is one group.
    assert choose(shared, "auto").names == BLOCKS and not choose(shared, "auto").tied


def test_parameters_tied_within_a_group_do_not_dissolve_it() -> None:
    model = Model()
    model.encoder[0].other = nn.Linear(4, 4)
    model.encoder[0].other.weight = model.encoder[0].layer.weight
    assert choose(model, "auto").names == BLOCKS
    # Inner groups that share a parameter dissolve into the outer one, which stays.
    groups = choose(model, {Block, nn.Linear})
    assert {"encoder.0.layer", "encoder.0.other"} == set(groups.tied) and "encoder.0" in groups.names


def test_torch_nn_classes_cannot_be_compiled_in_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="'0' is a Linear from torch.nn"):
        compile_blocks(model, choose(model, "auto"), {})
    with pytest.raises(
        ConfigurationError, match="compile=True applies to the groups of auto_wrap_policy, which found none"
    ):
        compile_blocks(nn.Linear(2, 2), choose(nn.Linear(2, 2), "auto"), {})
