"""Arguments by name: the ones that a caller gave, and suggestions for unknown names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from leyden.core.errors import UnknownArgumentError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])


class Unset:
    """Marks an argument that the caller omitted."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Any = Unset()

ELSEWHERE: dict[str, dict[str, str]] = {
    "Trainer": {
        "epochs": "max_epochs",
        "num_epochs": "max_epochs",
        "n_epochs": "max_epochs",
        "num_train_epochs": "max_epochs",
        "steps": "max_steps",
        "gpus": "devices, with accelerator='gpu'",
        "num_gpus": "devices, with accelerator='gpu'",
        "auto_select_gpus": "devices='auto'",
        "tpu_cores": "devices, with accelerator='tpu'",
        "num_processes": "devices",
        "nodes": "num_nodes",
        "nnodes": "num_nodes",
        "device": "accelerator",
        "mixed_precision": "precision",
        "fp16": "precision='16-mixed'",
        "bf16": "precision='bf16-mixed'",
        "amp_backend": "precision",
        "amp_level": "precision",
        "distributed_backend": "strategy",
        "auto_lr_find": "Tuner(trainer).lr_find(module, …)",
        "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(module, …)",
        "patience": "callbacks=EarlyStopping(…, patience=…)",
        "gradient_accumulation_steps": "accumulate_grad_batches",
        "grad_accum": "accumulate_grad_batches",
        "max_grad_norm": "gradient_clip_val",
        "clip_grad_norm": "gradient_clip_val",
        "eval_steps": "val_check_interval",
        "logging_steps": "log_every_n_steps",
        "checkpoint_callback": "enable_checkpointing, or callbacks=ModelCheckpoint(…)",
        "progress_bar_refresh_rate": "callbacks=TQDMProgressBar(refresh_rate=…)",
        "weights_summary": "enable_model_summary",
        "weights_save_path": "default_root_dir, or callbacks=ModelCheckpoint(dirpath=…)",
        "output_dir": "default_root_dir",
        "log_dir": "default_root_dir",
        "save_dir": "default_root_dir",
        "resume_from_checkpoint": "trainer.fit(…, ckpt_path=…)",
        "ckpt_path": "trainer.fit(…, ckpt_path=…)",
        "replace_sampler_ddp": "use_distributed_sampler",
        "terminate_on_nan": "callbacks=[NonFiniteGuard()]",
        "multiple_trainloader_mode": "CombinedLoader(loaders, mode=…)",
        "batch_size": "DataLoader(…, batch_size=…)",
        "shuffle": "DataLoader(…, shuffle=…)",
        "num_workers": "DataLoader(…, num_workers=…)",
        "lr": "configure_optimizers of your TrainModule",
        "learning_rate": "configure_optimizers of your TrainModule",
        "optimizer": "configure_optimizers of your TrainModule",
        "scheduler": "configure_optimizers of your TrainModule",
        "loss": "training_step of your TrainModule",
        "metrics": "self.log in the steps of your TrainModule",
        "seed": "leyden.seed_everything(seed)",
        "model": "trainer.fit(model, …)",
        "module": "trainer.fit(module, …)",
        "datamodule": "trainer.fit(module, datamodule=…)",
        "train_dataloaders": "trainer.fit(module, train_dataloaders)",
        "val_dataloaders": "trainer.fit(module, train_dataloaders, val_dataloaders)",
    },
    "fit": {
        "epochs": "max_epochs",
        "train_loader": "train_dataloaders",
        "val_loader": "val_dataloaders",
        "valid_loader": "val_dataloaders",
        "eval_loader": "val_dataloaders",
        "test_dataloaders": "trainer.test(module, dataloaders)",
        "resume_from_checkpoint": "ckpt_path",
        "resume": "ckpt_path='auto'",
        "batch_size": "DataLoader(…, batch_size=…)",
        "precision": "Trainer(precision=…)",
        "devices": "Trainer(devices=…)",
        "callbacks": "Trainer(callbacks=…)",
        "logger": "Trainer(logger=…)",
    },
    "EarlyStopping": {"metric": "monitor", "delta": "min_delta", "min_improvement": "min_delta"},
    "ModelCheckpoint": {
        "metric": "monitor",
        "period": "every_n_epochs",
        "every_n_val_epochs": "every_n_epochs",
        "filepath": "dirpath and filename",
        "save_top": "save_top_k",
    },
    "log": {"step": "log_metrics of a logger, which takes a step", "progress_bar": "prog_bar"},
}
"""Argument names of other trainers and older Lightning versions, with Leyden's equivalents."""

_UNEXPECTED = re.compile(r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def leaves_open(init: Function) -> Function:
    """Decorates an `__init__` so that it receives omitted arguments as UNSET, although it declares real defaults.

    Editors, type checkers and `inspect.signature` see the declared defaults. An unknown name raises an error that
    suggests the nearest one.

    Args:
        init: a method with keyword-only arguments.

    Example:
        >>> class Oven:
        ...     @leaves_open
        ...     def __init__(self, *, degrees=180, minutes=30):
        ...         print(degrees, minutes)
        >>> inspect.signature(Oven)
        <Signature (*, degrees=180, minutes=30)>
        >>> _ = Oven(minutes=30)
        UNSET 30
    """
    owner = init.__qualname__.rpartition(".")[0]
    unset = dict.fromkeys(_names(init), UNSET)

    @functools.wraps(init)
    def with_given(self: object, *args: Any, **given: Any) -> None:
        if args:
            raise UnknownArgumentError(f"{owner} takes its arguments by name: {owner}({next(iter(unset))}=…).")
        for name in given:
            if name not in unset:
                raise unknown_argument(owner, name, unset)
        init(self, **{**unset, **given})

    return with_given  # type: ignore[return-value]


def checks_names(init: Function) -> Function:
    """Decorates an `__init__` so that an unknown argument raises an error that suggests the nearest one.

    Example:
        >>> class Oven:
        ...     @checks_names
        ...     def __init__(self, heat=180): ...
        >>> Oven(heet=200)
        Traceback (most recent call last):
        leyden.core.errors.UnknownArgumentError: Oven has no argument 'heet'. Did you mean 'heat'? Known: heat.
    """
    owner, known = init.__qualname__.rpartition(".")[0], _names(init)

    @functools.wraps(init)
    def checked(self: object, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise unknown_argument(owner, name, known)
        init(self, *args, **given)

    return checked  # type: ignore[return-value]


def refuse(function: Callable[..., Any], unknown: Iterable[str]) -> None:
    """Raises an error for arguments that a method does not have.

    Args:
        function: the method.
        unknown: the names that its `**unknown` received.

    Raises:
        UnknownArgumentError: for the first name, if there is one.
    """
    for name in unknown:
        raise unknown_argument(function.__qualname__, name, _names(function))


def as_list(value: Any) -> list[Any]:
    """Returns a value, a list or a tuple of values as a list; empty for None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def unknown_argument(call: str, name: str, known: Iterable[str]) -> UnknownArgumentError:
    """Returns the error for an argument that a function does not have.

    Args:
        call: the name of the function or class.
        name: the unknown argument.
        known: the function's arguments.

    Example:
        >>> print(unknown_argument("Trainer", "gpus", ["devices"]))
        Trainer has no argument 'gpus': use devices, with accelerator='gpu'.
    """
    instead = ELSEWHERE.get(call.rpartition(".")[2], {}).get(name)
    advice = f". {nearest(name, known)}" if instead is None else f": use {instead}."
    return UnknownArgumentError(f"{call} has no argument {name!r}{advice}")


def in_known_names(error: BaseException, owners: Iterable[object]) -> UnknownArgumentError | None:
    """Converts Python's error about an unknown argument of a Leyden method to one that suggests the nearest name.

    So methods that are called in every step, such as `self.log`, need no check of their own.

    Args:
        error: the raised error.
        owners: the objects whose methods users call.

    Returns:
        The new error; None for any other error.
    """
    match = _UNEXPECTED.match(str(error)) if isinstance(error, TypeError) else None
    if match is None:
        return None
    kind, method, name = match.groups()
    for base in (base for owner in owners for base in type(owner).__mro__):
        if base.__name__ == kind and base.__module__.startswith("leyden.") and method in base.__dict__:
            return unknown_argument(f"{kind}.{method}", name, _names(base.__dict__[method]))
    return None


def _names(function: Callable[..., Any]) -> list[str]:
    """Returns the arguments that can be passed by name, except `self`."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
