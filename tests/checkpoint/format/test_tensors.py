"""Tensors of every kind in a checkpoint: values, dtype, strides, layout and shared memory survive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from leyden.checkpoint.format.errors import CheckpointError, UnsupportedStateError
from leyden.checkpoint.format.tensors import NATIVE, TensorCollector, TensorSource
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter

DTYPES = [*NATIVE, torch.complex32, torch.complex64, torch.complex128, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]


def raw(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().contiguous().reshape(-1)
    values: list[int] = (
        (torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain).view(torch.uint8).tolist()
    )
    return values


def through_model(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with CheckpointWriter(path) as writer:
        writer.model(state)
        return CheckpointReader(writer.commit(progress={})).model()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_dtypes_and_shapes_survive_a_round_trip(
    dtype: torch.dtype, shape: tuple[int, ...], disk: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    count = torch.Size(shape).numel() * dtype.itemsize
    source = torch.randint(0, 2, (count,), dtype=torch.uint8)
    tensor = source.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    for back in (disk([tensor])[0], through_model(tmp_path / "model", {"x": tensor})["x"]):
        assert back.dtype == dtype
        assert back.shape == tensor.shape
        assert raw(back) == raw(tensor)


def test_special_values_keep_their_bits(disk: Any) -> None:
    bits = torch.tensor([0x7FC00001, 0xFFC12345, 0x80000000, 0x7F800000, 1], dtype=torch.int64).to(torch.uint32)
    assert raw(disk(bits.view(torch.float32))) == raw(bits)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3).t(),
        torch.arange(8.0).reshape(1, 8, 1).permute(2, 1, 0),
    ],
    ids=["channels_last", "transposed", "permuted", "complex", "ones"],
)
def test_strides_survive_a_round_trip(tensor: torch.Tensor, disk: Any, tmp_path: Path) -> None:
    for back in (disk([tensor])[0], through_model(tmp_path / "model", {"x": tensor})["x"]):
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride() or tensor.is_contiguous()


def test_gapped_conjugated_and_negated_views_survive_a_round_trip(disk: Any) -> None:
    base = torch.complex(torch.arange(10.0), torch.ones(10))
    for tensor in (torch.arange(10.0)[::3], base.conj(), base.imag, base.conj().imag, torch.ones(4, 4)[1:3, 1:3]):
        assert torch.equal(disk([tensor])[0], tensor.clone())


def test_expanded_tensors_are_stored_unexpanded(disk: Any) -> None:
    collector = TensorCollector()
    collector.put(torch.ones(1).expand(1_000_000), "x", "x")
    assert sum(tensor.numel() for tensor in collector.finish().values()) == 1
    back = disk([torch.ones(1, 2).expand(50, 2)])[0]
    assert back.stride() == (0, 1)
    assert torch.equal(back, torch.ones(50, 2))


SPARSE = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: SPARSE.to_sparse(),
        lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (3,)),
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (3, 2)),
        lambda: SPARSE.to(torch.complex64).to_sparse(),
        lambda: SPARSE.to_sparse_csr(),
        lambda: SPARSE.to_sparse_csc(),
        lambda: SPARSE.to_sparse_bsr((1, 2)),
        lambda: SPARSE.to_sparse_bsc((2, 2)),
    ],
    ids=["coo", "uncoalesced", "empty", "complex", "csr", "csc", "bsr", "bsc"],
)
def test_sparse_layouts_survive_a_round_trip(make: Callable[[], torch.Tensor], disk: Any, tmp_path: Path) -> None:
    tensor = make()
    for back in (disk({"x": tensor})["x"], through_model(tmp_path / "model", {"x": tensor})["x"]):
        assert back.layout == tensor.layout
        assert back.dtype == tensor.dtype
        if tensor.layout is torch.sparse_coo:
            assert back.is_coalesced() == tensor.is_coalesced()
            assert torch.equal(back._values(), tensor._values())
        assert torch.equal(back.to_dense(), tensor.to_dense())


def test_shared_memory_is_still_shared_after_a_round_trip(disk: Any) -> None:
    base = torch.arange(12.0)
    tree = {
        "same": [base, base],
        "views": (base[2:6], base[4:].reshape(2, 4), base.reshape(3, 4).t()),
        "apart": torch.arange(12.0),
        "sparse": [SPARSE.to_sparse()] * 2,
        "empty": [torch.empty(0)] * 2,
    }
    back = disk(tree)
    assert back["same"][0] is back["same"][1]
    assert back["sparse"][0] is back["sparse"][1]
    assert back["empty"][0] is back["empty"][1]
    back["same"][0][5] = -1
    assert back["views"][0][3] == -1
    assert back["views"][1][0, 1] == -1
    assert back["views"][2][1, 1] == -1
    assert back["apart"][5] == 5


def test_disjoint_views_of_one_storage_are_restored_separately(disk: Any) -> None:
    a, b = torch.arange(6.0).split(3)
    back = disk([a, b])
    assert torch.equal(back[1], b)
    assert back[0].untyped_storage().nbytes() == 12


def test_parameters_and_requires_grad_survive_a_round_trip(disk: Any) -> None:
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    back = disk({"p": parameter, "data": parameter.data, "leaf": leaf, "result": leaf * 2})
    assert type(back["p"]) is nn.Parameter
    assert not back["p"].requires_grad
    assert back["leaf"].requires_grad
    assert not back["result"].requires_grad
    with torch.no_grad():
        back["p"][0] = 9
    assert back["data"][0] == 9
    assert type(back["data"]) is torch.Tensor


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("scalar", torch.tensor(3))


def test_the_model_file_is_plain_safetensors_with_tied_weights_stored_once(tmp_path: Path) -> None:
    module = Tied()
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.model(module.state_dict())
        path = writer.commit(progress={})
    with safetensors.safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["head.weight"] == "embed.weight"
        assert "head.weight" not in file.keys()  # noqa: SIM118  (a safe_open is not a mapping)
        assert torch.equal(file.get_tensor("conv.weight"), module.conv.weight)
    back = CheckpointReader(path).model()
    assert list(back) == list(module.state_dict())
    assert back["head.weight"] is back["embed.weight"]
    assert back["conv.weight"].stride() == module.conv.weight.stride()
    fresh = Tied()
    fresh.load_state_dict(back)
    for name, tensor in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)


def test_safetensors_loads_the_model_file_into_a_module(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.model(module.state_dict())
        path = writer.commit(progress={})
    fresh = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    safetensors.torch.load_model(fresh, path / "model.safetensors")
    assert torch.equal(fresh[0].weight, module[0].weight)


def test_selected_weights_are_read_without_the_others(tmp_path: Path) -> None:
    module = Tied()
    with CheckpointWriter(tmp_path / "c") as writer:
        writer.model(module.state_dict())
        reader = CheckpointReader(writer.commit(progress={}))
    assert list(reader.model(["head.weight", "mask"])) == ["head.weight", "mask"]
    with pytest.raises(CheckpointError, match="head.weight"):
        reader.model(["heed.weight"])


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"history": [1, torch.ones(2)], "best": float("inf")}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_state_of_modules_survives_a_round_trip(tmp_path: Path) -> None:
    back = through_model(tmp_path / "c", WithExtra(2, 2).state_dict())
    fresh = WithExtra(2, 2)
    fresh.load_state_dict(back)
    assert fresh.extra["best"] == float("inf")
    assert torch.equal(fresh.extra["history"][1], torch.ones(2))


def test_a_weight_that_cannot_be_saved_raises_by_name(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "c") as writer, pytest.raises(UnsupportedStateError, match=r"\['net.w'\].*meta"):
        writer.model({"net.w": torch.empty(2, device="meta")})


def test_tensors_with_similar_names_do_not_collide(disk: Any) -> None:
    tree = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        1: torch.tensor(3),
        "1": torch.tensor(4),
        "": torch.tensor(5),
    }
    assert {key: str(value) for key, value in disk(tree).items()} == {key: str(value) for key, value in tree.items()}
    assert int(disk({"__metadata__": torch.tensor(6)})["__metadata__"]) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2, 2]},
        {"dtype": "int32"},
        {"dtype": "complex64"},
        {"dtype": "eval"},
        {"shape": [4, -1]},
        {"shape": "four"},
        {"strides": [2**40]},
        {"strides": [0]},
        {"layout": "coo"},
        {"key": "other"},
        {"base": "x", "offset": 2, "stretch": 4, "strides": [1]},
        {"base": "x", "offset": -1, "stretch": 4, "strides": [1]},
        {"base": "x", "offset": 0, "stretch": 9, "strides": [1]},
    ],
    ids=str,
)
def test_forged_specs_raise_instead_of_reaching_other_memory(change: dict[str, Any]) -> None:
    spec = {"key": "x", "dtype": "float32", "shape": [4], **change}
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError)):
        TensorSource({"x": torch.zeros(4)}).get(spec)
