"""Packed rows with the kernels that know documents by their boundaries: flash attention (cu_seqlens) and flex."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hf_models import LENGTH, make_model, rows
from torch import Tensor

from leyden.hf import HFModule, PackedDataset

transformers = pytest.importorskip("transformers", minversion="5")

DOCUMENTS = [{"input_ids": row["input_ids"][: 3 + i % 6].tolist()} for i, row in enumerate(rows("llama", 12))]


def packed() -> dict[str, Tensor]:
    data = PackedDataset(DOCUMENTS, LENGTH)
    return torch.utils.data.default_collate([data[i] for i in range(len(data))])  # type: ignore[no-any-return]


def test_flash_attention_makes_the_boundaries_of_the_documents_from_their_positions() -> None:
    from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

    batch = packed()
    (boundaries, _), (longest, _) = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
    starts = [i for i, position in enumerate(batch["position_ids"].flatten().tolist()) if position == 0]
    assert boundaries.tolist() == [*starts, batch["position_ids"].numel()]
    # A document begins where a label is left out. What fills a row is a document whose labels are all left out.
    left_out = (batch["labels"].flatten() == -100).nonzero().flatten().tolist()
    assert set(starts) <= set(left_out)
    sizes = sorted(end - start for start, end in zip(boundaries.tolist(), boundaries.tolist()[1:], strict=False))
    assert [size for size in sizes if size > 2][-1] == longest
    lengths = sorted(len(document["input_ids"]) for document in DOCUMENTS)
    assert all(sizes.count(length) >= lengths.count(length) for length in lengths)


@torch.no_grad()
def logits(kernel: str) -> Tensor:
    model: Any = make_model("llama").eval()
    model.set_attn_implementation(kernel)
    batch = packed()
    found: Tensor = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return found


@pytest.mark.full
def test_flex_attention_keeps_documents_apart_as_sdpa_does() -> None:
    # Forward only: flex has no backward pass on a CPU.
    torch.testing.assert_close(logits("flex_attention"), logits("sdpa"), rtol=0, atol=1e-6)


def loss_and_gradients(kernel: str) -> list[Tensor]:
    model: Any = make_model("llama", head_dim=16).to("cuda", torch.bfloat16)
    model.set_attn_implementation(kernel)
    module = HFModule(model)
    batch = {name: value.cuda() for name, value in packed().items()}
    loss, _ = module.compute_loss(batch, module.count_items(batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", ["flex_attention", "flash_attention_2"])
def test_kernels_on_a_gpu_give_the_loss_and_gradients_of_sdpa(kernel: str) -> None:
    if kernel == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs the package flash-attn")
    for found, expected in zip(loss_and_gradients(kernel), loss_and_gradients("sdpa"), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-3)
