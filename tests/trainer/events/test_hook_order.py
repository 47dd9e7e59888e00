"""The order of hooks: recorded runs against the executed pseudocode in `leyden.trainer.events.hooks`'s docstring."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from leyden import Callback, DataModule, Trainer, TrainModule
from leyden.trainer.events import hooks

Event = tuple[str, str]
OWNERS = ("datamodule", "callback", "module", "closing")
GROUPS = {"callback": ("callback", "closing"), "main": OWNERS[:3], "": OWNERS} | {name: (name,) for name in OWNERS[::2]}
GROUPS["closing"] = ("closing",)
HOOK = re.compile(r"(?:(\w+)\.)?(\w+)$")


# the pseudocode -------------------------------------------------------------------------------------------------------
@dataclass
class Line:
    """A line of the docstring: its conditions, a loop or names, and its nested lines."""

    conditions: list[str]
    loop: str
    names: list[str]
    inside: list[Line] = field(default_factory=list)


def parse(text: str) -> dict[str, list[Line]]:
    """Parses the indented block into sections by name. Several names may share one body."""
    sections: dict[str, list[Line]] = {}
    open_at: list[tuple[int, list[Line]]] = []
    for raw in text.splitlines():
        line = re.sub(r"\(.*?\)", "", raw).rstrip()
        indent = len(line) - len(line.lstrip())
        if not line or indent < 4:
            continue
        if indent == 4:
            body: list[Line] = []
            sections |= {name.strip(): body for name in line.split(",")}
            open_at = [(4, body)]
            continue
        while open_at[-1][0] >= indent:
            open_at.pop()
        match = re.fullmatch(r"(?:\[(.*?)\] )?(?:for (\w+)|([\w., ]+))", line.strip())
        assert match, f"this line of the docstring is not pseudocode: {raw!r}"
        conditions, loop, names = match.groups(default="")
        parsed = Line(_split(conditions), loop, _split(names))
        open_at[-1][1].append(parsed)
        open_at.append((indent, parsed.inside))
    return sections


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


SECTIONS = parse(hooks.__doc__ or "")


@dataclass
class Plan:
    """The parameters of a run, which decide the conditions and loops of the docstring."""

    epochs: int = 0
    batches: int = 0
    accumulated: int = 1
    optimizers: int = 1
    schedulers: tuple[str, ...] = ()
    validate_every: int = 0
    evaluated: int = 0
    sanity: int = 0
    at_start: bool = False
    resume: bool = False
    ckpt_path: bool = False
    fitted_before: bool = False
    stage: str = "fit"
    window: int = 0
    batch: int = 0
    in_sanity_check: bool = False

    def holds(self, condition: str) -> bool:
        done = self.batch + 1
        return {
            "resume": self.resume,
            "with ckpt_path": self.ckpt_path,
            "fitted before": self.fitted_before,
            "first fit": not self.fitted_before and not self.resume,
            "in fit": self.stage == "fit",
            "sanity check": self.sanity > 0 and not self.resume and not self.at_start,
            "validate at start": self.at_start and not self.resume,
            "first of the window": self.batch % self.accumulated == 0,
            "last of the window": done % self.accumulated == 0 or done == self.batches,
            "last of the epoch": done == self.batches,
            "validation due": self._validation_due(done),
            **{
                f"{word} by {interval}": f"{word} by {interval}" in self.schedulers
                for word in ("scheduler", "plateau scheduler")
                for interval in ("step", "epoch")
            },
        }[condition]

    def _validation_due(self, done: int) -> bool:
        before = self.window * self.accumulated
        return bool(self.validate_every) and done // self.validate_every > before // self.validate_every

    def rounds(self, loop: str, section: str) -> Iterator[None]:
        if loop == "batch" and section == "evaluation":
            yield from [None] * (self.sanity if self.in_sanity_check else self.evaluated)
        elif loop == "batch":
            start = self.window * self.accumulated
            for batch in range(start, min(start + self.accumulated, self.batches)):
                self.batch = batch
                yield
        elif loop == "window":
            for window in range(-(-self.batches // self.accumulated)):
                self.window = window
                yield
        elif loop == "epoch":
            yield from [None] * self.epochs
        else:
            yield from [None] * {"optimizer": self.optimizers}[loop]


STAGES = {"fit": "validation", "validate": "validation", "test": "test", "predict": "predict"}


def expected(section: str, plan: Plan) -> Iterator[Event]:
    """Executes a section of the docstring."""
    yield from _run(SECTIONS[section], section, plan)


def _run(lines: list[Line], section: str, plan: Plan) -> Iterator[Event]:
    for line in lines:
        if not all(plan.holds(condition) for condition in line.conditions):
            continue
        if line.loop:
            for _ in plan.rounds(line.loop, section):
                yield from _run(line.inside, section, plan)
            continue
        for name in line.names:
            if name in SECTIONS:
                yield from _run(SECTIONS[name], name, plan)
                continue
            match = HOOK.match(name)
            assert match
            kind = STAGES[plan.stage]
            loader = name == "X_dataloader"
            hook = match[2].replace("X", "val" if loader and kind == "validation" else kind)
            for owner in GROUPS[match[1] or ""]:
                if hook in RECORDED[owner] and not (owner == "module" and hook in DATA_HOOKS):
                    yield owner, hook
            plan.in_sanity_check = hook == "on_sanity_check_start" or (
                plan.in_sanity_check and hook != "on_sanity_check_end"
            )


# the recording --------------------------------------------------------------------------------------------------------
def hooks_of(base: type) -> set[str]:
    wanted = r"(on_|setup|teardown|(load_)?state_dict|configure_|prepare_data|optimizer_|lr_scheduler_step|transfer_|"
    wanted += "backward)"
    more = r"|.*_(step|dataloader)$"
    return {name for name, value in vars(base).items() if inspect.isfunction(value) and re.match(wanted + more, name)}


# The DataModule's hooks replace those of the module.
DATA_HOOKS = {
    *(f"{kind}_dataloader" for kind in ("train", "val", "test", "predict")),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
}
RECORDED = {
    "datamodule": hooks_of(DataModule),
    "callback": hooks_of(Callback),
    "module": hooks_of(TrainModule),
    "closing": hooks_of(Callback),
}


def recording(owner: str, base: type, trace: list[Event]) -> Any:
    """Returns a subclass of `base` whose hooks record each call and then call super."""

    def recorded(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            trace.append((owner, name))
            return original(*args, **kwargs)

        return call

    return type(f"Recording{base.__name__}", (base,), {name: recorded(name) for name in RECORDED[owner]})


class StatefulCallback(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"saved": True}


class ClosingStatefulCallback(StatefulCallback):
    order: ClassVar[int] = 100


class Module(TrainModule):
    def __init__(self, optimizers: int, schedulers: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(optimizers))
        self.wanted = schedulers

    def forward(self, batch: Any) -> Any:
        return sum(layer(batch[0]).sum() for layer in self.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", loss := self(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in self.layers]
        make = {
            "scheduler": lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2)},
            "plateau scheduler": lambda o: {
                "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o),
                "monitor": "loss",
            },
        }
        configs = [name.split(" by ") for name in self.wanted]
        return optimizers, [make[kind](optimizers[0]) | {"interval": interval} for kind, interval in configs]


class Data(DataModule):
    def __init__(self, batches: int, evaluated: int) -> None:
        super().__init__()
        self.batches, self.evaluated = batches, evaluated

    def _loader(self, count: int) -> Any:
        return DataLoader(TensorDataset(torch.ones(count, 2)), batch_size=1)

    def train_dataloader(self) -> Any:
        return self._loader(self.batches)

    def val_dataloader(self) -> Any:
        return self._loader(self.evaluated)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"saved": True}


@dataclass
class Run:
    """A Trainer whose module, DataModule and two callbacks record every call in `trace`."""

    plan: Plan
    folder: Path
    trace: list[Event] = field(default_factory=list)
    save_at: int | None = None

    def __post_init__(self) -> None:
        plan, trace = self.plan, self.trace
        self.module = recording("module", Module, trace)(plan.optimizers, plan.schedulers)
        self.data = recording("datamodule", Data, trace)(plan.batches, plan.evaluated)
        closing = recording("closing", ClosingStatefulCallback, trace)()
        self.trainer = Trainer(
            # The closing callback comes first: only its order determines its place.
            callbacks=[closing, recording("callback", StatefulCallback, trace)(), Saver(self)],
            max_epochs=plan.epochs or 1,
            accumulate_grad_batches=plan.accumulated,
            val_check_interval=plan.validate_every or 1.0,
            num_sanity_val_steps=plan.sanity,
            validate_at_start=plan.at_start,
            gradient_clip_val=1.0,
            default_root_dir=self.folder,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trace.clear()


class Saver(Callback):
    """Saves at one step, after all other callbacks, and leaves the hooks of the save out of the record."""

    order: ClassVar[int] = 1000

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.window_is_over and trainer.global_step == self.run.save_at:
            length_before = len(self.run.trace)
            trainer.save_checkpoint(self.run.folder / "saved")
            del self.run.trace[length_before:]
            self.run.trace.append(("saver", "saved"))


def assert_same(found: list[Event], wanted: list[Event]) -> None:
    for index, (a, b) in enumerate(zip(found, wanted, strict=False)):
        assert a == b, f"call {index} is {a}, the docstring says {b}, after {found[max(index - 4, 0) : index]}"
    assert len(found) == len(wanted), (found[len(wanted) :], wanted[len(found) :])


SCHEDULERS = ("scheduler by step", "scheduler by epoch", "plateau scheduler by step", "plateau scheduler by epoch")
FITS = {
    "plain": Plan(epochs=2, batches=3, validate_every=3, evaluated=2, sanity=1),
    "no sanity check": Plan(epochs=1, batches=2, validate_every=2, evaluated=1),
    "validation at the start": Plan(epochs=2, batches=3, validate_every=3, evaluated=3, sanity=1, at_start=True),
    "accumulation with a short window": Plan(
        epochs=2, batches=5, accumulated=2, validate_every=5, evaluated=1, sanity=1
    ),
    "validation inside a window": Plan(epochs=1, batches=8, accumulated=3, validate_every=4, evaluated=1),
    "two optimizers": Plan(epochs=1, batches=4, accumulated=2, optimizers=2, validate_every=4, evaluated=1, sanity=1),
    "schedulers": Plan(epochs=2, batches=4, schedulers=SCHEDULERS, validate_every=2, evaluated=1),
}


@pytest.mark.parametrize("name", FITS)
def test_fit_follows_the_pseudocode(name: str, tmp_path: Path) -> None:
    run = Run(FITS[name], tmp_path)
    run.trainer.fit(run.module, datamodule=run.data)
    assert_same(run.trace, list(expected("fit", FITS[name])))


def test_a_second_fit_follows_the_pseudocode(tmp_path: Path) -> None:
    run = Run(FITS["plain"], tmp_path)
    run.trainer.fit(run.module, datamodule=run.data)
    run.trace.clear()
    run.trainer.fit(run.module, datamodule=run.data)
    assert_same(run.trace, list(expected("fit", dataclasses.replace(FITS["plain"], fitted_before=True))))


@pytest.mark.parametrize("save_at", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["accumulation with a short window", "schedulers", "validation at the start"])
def test_a_resume_follows_the_pseudocode(name: str, save_at: int, tmp_path: Path) -> None:
    plan = FITS[name]
    first = Run(plan, tmp_path, save_at=save_at)
    first.trainer.fit(first.module, datamodule=first.data)
    after = first.trace[first.trace.index(("saver", "saved")) + 1 :]

    second = Run(plan, tmp_path)
    second.trainer.fit(second.module, datamodule=second.data, ckpt_path=tmp_path / "saved")
    resumed = list(expected("fit", dataclasses.replace(plan, resume=True)))
    begin = resumed.index(("closing", "on_train_start")) + 1 + len(list(expected("compose", plan)))
    assert_same(second.trace, resumed[:begin] + after)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_follows_the_pseudocode(stage: str, resume: bool, tmp_path: Path) -> None:
    fitted = Run(Plan(epochs=1, batches=1, validate_every=1, evaluated=1), tmp_path, save_at=1)
    if resume:
        fitted.trainer.fit(fitted.module, datamodule=fitted.data)
    plan = Plan(evaluated=2, stage=stage, ckpt_path=resume)
    run = Run(plan, tmp_path)
    path = tmp_path / "saved" if resume else None
    getattr(run.trainer, stage)(run.module, datamodule=run.data, ckpt_path=path)
    assert_same(run.trace, list(expected(stage, plan)))


def test_a_save_follows_the_pseudocode(tmp_path: Path) -> None:
    run = Run(FITS["plain"], tmp_path)
    run.trainer.fit(run.module, datamodule=run.data)
    run.trace.clear()
    run.trainer.save_checkpoint(tmp_path / "after")
    assert_same(run.trace, list(expected("save", FITS["plain"])))


def test_an_error_follows_the_pseudocode(tmp_path: Path) -> None:
    run = Run(FITS["plain"], tmp_path)

    def fail(batch: Any, batch_idx: int) -> None:
        run.trace.clear()
        raise ValueError("the user's own error")

    run.module.training_step = fail
    with pytest.raises(ValueError, match="the user's own error"):
        run.trainer.fit(run.module, datamodule=run.data)
    teardown = [(owner, "teardown") for owner in OWNERS]
    assert_same(run.trace, [*expected("error", FITS["plain"]), *teardown])


def test_the_docstring_has_every_hook() -> None:
    def names(lines: list[Line]) -> Iterator[str]:
        for line in lines:
            yield from (name.rpartition(".")[2] for name in line.names)
            yield from names(line.inside)

    written = {name for body in SECTIONS.values() for name in names(body)}
    written |= {name.replace("X", kind) for name in written for kind in ("validation", "val", "test", "predict")}
    for owner, known in RECORDED.items():
        assert not known - written, f"the docstring lacks these hooks of the {owner}: {sorted(known - written)}"
    assert not set(hooks.EVENTS) - written
