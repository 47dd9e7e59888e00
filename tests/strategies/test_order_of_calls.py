"""Strategy's docstring lists its methods in the order in which a fit calls them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import QUIET, Squares

from leyden import Trainer
from leyden.strategies import Strategy

LISTED = re.findall(r"^    (\[?)([a-z_]+)\]?(?: |$)", inspect.getdoc(Strategy) or "", re.M)
ORDER = [name for _, name in LISTED]
ALWAYS = [name for optional, name in LISTED if not optional]
FOR_USERS = {"barrier", "broadcast", "all_gather", "reduce", "reduce_boolean_decision"}
"""Collectives of Lightning's contract, which call `strategy.ranks` and can be overridden only there."""
INTERNAL = {"loss_to_backward", "clip_parameters", "forward"}
"""Methods that other methods call."""
ANY_TIME = {
    "init_module",
    "gradient_sync",
    "backward",
    "full_state_dict",
    "local_weights",
    "release",
    "to_device",
    "add_module",
    "add_optimizer",
    "counted",
    "held",
    "unreduced_gradients",
    "restore_unreduced",
    "uses_buffer",
}


def methods() -> set[str]:
    return {name for name, value in inspect.getmembers(Strategy, inspect.isfunction) if not name.startswith("_")}


def recorded(calls: list[str]) -> type[Strategy]:
    """Returns a strategy class that records the calls of its methods."""

    def recorder(name: str) -> Callable[..., Any]:
        plain = getattr(Strategy, name)

        def method(self: Strategy, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return plain(self, *args, **kwargs)

        return method

    return type("Recorded", (Strategy,), {name: recorder(name) for name in methods() - FOR_USERS})


class Net(Squares):
    def configure_model(self) -> None:
        """Called in the strategy's model_context."""


def calls_of_a_fit(folder: Path) -> list[str]:
    calls: list[str] = []
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=recorded(calls)(),
        default_root_dir=folder,
        max_epochs=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
    )
    trainer.fit(Net(), [torch.randn(2, 2)] * 4, [torch.randn(2, 2)] * 2)
    return calls


def test_the_docstring_lists_every_method() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert methods() == {*ORDER} | FOR_USERS | INTERNAL | ANY_TIME


def test_a_fit_calls_methods_in_the_documented_order(tmp_path: Path) -> None:
    first = [name for name in dict.fromkeys(calls_of_a_fit(tmp_path)) if name in ORDER]
    assert [name for name in ORDER if name in first] == first
    assert set(ALWAYS) <= set(first)
