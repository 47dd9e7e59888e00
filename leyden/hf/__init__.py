"""Language models and other models of `transformers`: training with the loss of its Trainer, adapters, sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.core.lazy import lazy_name

_HOMES = {
    "encode_chat": "leyden.hf.data",
    "LengthGroupedSampler": "leyden.hf.data",
    "MixedDataset": "leyden.hf.data",
    "MixtureMonitor": "leyden.hf.mixture_monitor",
    "PackedDataset": "leyden.hf.data",
    "PackedStream": "leyden.hf.streams",
    "SavePretrained": "leyden.hf.sharing",
    "ShuffledStream": "leyden.hf.streams",
    "HFModule": "leyden.hf.module",
    "from_training_arguments": "leyden.hf.arguments",
}

if TYPE_CHECKING:
    from leyden.hf.arguments import from_training_arguments as from_training_arguments
    from leyden.hf.data import LengthGroupedSampler as LengthGroupedSampler
    from leyden.hf.data import MixedDataset as MixedDataset
    from leyden.hf.data import PackedDataset as PackedDataset
    from leyden.hf.data import encode_chat as encode_chat
    from leyden.hf.mixture_monitor import MixtureMonitor as MixtureMonitor
    from leyden.hf.module import HFModule as HFModule
    from leyden.hf.sharing import SavePretrained as SavePretrained
    from leyden.hf.streams import PackedStream as PackedStream
    from leyden.hf.streams import ShuffledStream as ShuffledStream

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    return lazy_name(__name__, _HOMES, name)
