"""The number of the GPU that DeepSpeed uses, which it reads only from LOCAL_RANK."""

from __future__ import annotations

import pytest
import torch

from leyden import ConfigurationError
from leyden.strategies.deepspeed.initialize import device_number


@pytest.mark.parametrize(
    ("variables", "device", "number"),
    [
        ({}, "cuda:0", 0),
        # devices=[1] in one process, also after a run on another GPU.
        ({}, "cuda:1", 1),
        ({"LOCAL_RANK": "0"}, "cuda:1", 1),
        # SLURM does not set RANK; each rank may see only its GPU, as number 0.
        ({"SLURM_LOCALID": "3"}, "cuda:0", 0),
        ({"RANK": "5", "LOCAL_RANK": "3"}, "cuda:3", 3),
        ({"RANK": "5", "LOCAL_RANK": "3"}, "cpu", 3),
    ],
)
def test_device_number_is_the_local_rank_or_the_devices_index(
    variables: dict[str, str], device: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert device_number(torch.device(device), int(variables.get("LOCAL_RANK", 0))) == number


def test_a_device_that_contradicts_the_local_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would put the engine on cuda:0, while the module is on cuda:2."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigurationError, match=r"LOCAL_RANK=0.*cuda:2.*CUDA_VISIBLE_DEVICES"):
        device_number(torch.device("cuda", 2), 0)
