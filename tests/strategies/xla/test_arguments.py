"""What needs no torch_xla: strategy names, mesh rules, and the error where it is missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from leyden import Trainer
from leyden.core.errors import ConfigurationError, MissingExtraError
from leyden.strategies.xla.mesh import XLALayout
from leyden.strategies.xla.xla_strategy import XLAFSDPStrategy, XLAStrategy


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
@pytest.mark.parametrize(
    "arguments", [{"strategy": "xla"}, {"accelerator": "xla"}, {"accelerator": "tpu"}, {"strategy": "xla_fsdp"}]
)
def test_a_missing_torch_xla_error_names_the_extra(arguments: dict[str, Any]) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'leyden\[xla\]'"):
        Trainer(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mesh": {"data": 0}}, "the size of 'data'"),
        ({"mesh": {"data": 2}, "batch": ["dat"]}, "Did you mean 'data'"),
        ({"mesh": {"data": 2, "model": 2}, "shard": {"*": ("modle",)}}, "Did you mean 'model'"),
        ({"mesh": {"data": 2, "model": 2}, "shard": {"*": ("model", "model")}}, "Name each once"),
        ({"shard": {"*": ("model",)}}, "the mesh has no 'model'"),
    ],
)
def test_invalid_meshes_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        XLAStrategy(**arguments)


def test_xla_fsdp_rules_may_use_only_the_fsdp_axis() -> None:
    assert XLAFSDPStrategy(shard={"*.bias": ("fsdp",)}).name == "xla_fsdp"
    with pytest.raises(ConfigurationError, match="the mesh has no 'data'"):
        XLAFSDPStrategy(shard={"*.bias": ("data",)})


def test_the_mesh_must_match_the_number_of_devices() -> None:
    layout = XLALayout({"data": 2, "model": 2})
    layout.check_devices(4)
    layout.check_devices(None)
    with pytest.raises(ConfigurationError, match=r"has 4 devices, but devices=8"):
        layout.check_devices(8)


def test_batches_are_split_over_data_and_fsdp_by_default() -> None:
    assert XLALayout({"model": 2, "fsdp": 2, "data": 2}).batch_axes == ("data", "fsdp")
    assert XLALayout({"a": 2, "b": 2}).batch_axes == ("a",)
    assert XLALayout({"a": 2, "b": 2}, batch=["b"]).batch_axes == ("b",)


def test_the_xla_accelerator_requires_an_xla_strategy() -> None:
    with pytest.raises(ConfigurationError, match="Use strategy='xla'"):
        Trainer(accelerator="xla", strategy="single_device")
