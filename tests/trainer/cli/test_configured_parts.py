"""`LeydenCLI`: arguments that a strategy passes on, a Trainer or a CLI of one's own, and plain Namespaces."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from configured import OwnNet, Points
from models import QUIET

from leyden import LeydenCLI, Trainer
from leyden.callbacks import LambdaCallback, Timer
from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy
from leyden.trainer.cli import LeydenArgumentParser


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def built(*args: str, **kwargs: Any) -> LeydenCLI:
    return LeydenCLI(OwnNet, run=False, args=["--trainer.accelerator=cpu", *args], **kwargs)


def test_a_strategy_takes_what_it_passes_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameters=true"]
    described = {"class_path": "DDPStrategy", "init_args": {"find_unused_parameters": True, "start_method": "spawn"}}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": described}}))
    for args in (words, ["--config=run.yaml"]):
        cli = built(*args)
        strategy = cli.trainer.strategy
        assert isinstance(strategy, DDPStrategy) and strategy.ddp_arguments == {"find_unused_parameters": True}
        # The configuration that is saved gives it again, and no default of torch's.
        saved = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]["strategy"]
        assert saved["init_args"]["find_unused_parameters"] is True and "static_graph" not in saved["init_args"]
        Path("saved.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": saved}}))
        again: Any = built("--config=saved.yaml").trainer.strategy
        assert again.ddp_arguments == strategy.ddp_arguments
    for line, text in (
        (["--trainer.strategy.help=DDPStrategy"], "--trainer.strategy.find_unused_parameters"),
        (["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused=true"], "'find_unused' is not accepted"),
    ):
        with pytest.raises(SystemExit):
            built(*line)
        printed = capsys.readouterr()
        assert text in printed.out + printed.err


@pytest.mark.parametrize("kind", [FSDPStrategy, MeshStrategy])
def test_words_of_other_trainers_are_translated_from_a_file_too(kind: type[FSDPStrategy]) -> None:
    given = {"sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "sharded", "cpu_offload": True}
    described = {"class_path": kind.__name__, "init_args": given}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": described}}))
    assert type(built("--config=run.yaml").trainer.strategy) is kind


def test_loggers_profilers_and_callbacks_take_what_they_pass_on() -> None:
    words = ["--trainer.logger=TensorBoardLogger", "--trainer.logger.flush_secs=7"]
    words += ["--trainer.profiler=PyTorchProfiler", "--trainer.profiler.profile_memory=true"]
    words += ["--trainer.callbacks+=RichModelSummary", "--trainer.callbacks.header_style=bold"]
    words += ["--trainer.callbacks+=LambdaCallback", "--trainer.callbacks.on_fit_end=builtins.print"]
    cli = built(*words)
    trainer = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]
    assert trainer["logger"]["init_args"]["flush_secs"] == 7
    assert trainer["profiler"]["init_args"]["profile_memory"] is True
    assert [one["init_args"].get("header_style") for one in trainer["callbacks"]] == ["bold", None]
    [of_hooks] = [one for one in cli.trainer.callbacks if isinstance(one, LambdaCallback)]
    assert of_hooks.on_fit_end is print


def test_a_fit_of_the_clis_own_takes_the_place_of_the_trainers() -> None:
    seen: list[Any] = []

    class Own(LeydenCLI):
        def before_fit(self) -> None:
            seen.append("before")

        def fit(self, **arguments: Any) -> None:
            seen.append((type(arguments["model"]), type(arguments["datamodule"]), arguments["ckpt_path"]))

        def after_fit(self) -> None:
            seen.append(self.trainer.global_step)

    Own(OwnNet, Points, args=["fit", "--trainer.logger=false", "--ckpt_path=mine"])
    assert seen == ["before", (OwnNet, Points, "mine"), 0]


def test_a_trainer_that_takes_no_callbacks_is_built_without_them() -> None:
    class Own(Trainer):
        def __init__(self) -> None:
            super().__init__(**QUIET)

    with pytest.warns(UserWarning, match="Own has no argument callbacks, so the configuration is not saved"):
        cli = LeydenCLI(OwnNet, run=False, args=[], trainer_class=Own, trainer_defaults={"callbacks": Timer()})
    assert not any(isinstance(one, Timer) for one in cli.trainer.callbacks)


def test_a_configuration_may_be_a_namespace_of_argparse() -> None:
    values = Namespace(trainer=Namespace(logger=False, max_epochs=4), model=Namespace(width=3))
    cli = LeydenCLI(OwnNet, run=False, args=values)
    assert (cli.trainer.max_epochs, cli.model.hparams.width) == (4, 3)


def test_a_parser_shows_what_it_added() -> None:
    added = LeydenArgumentParser().add_class_arguments(DDPStrategy)
    assert {"find_unused_parameters", "ddp_comm_hook", "devices"} <= set(added)
