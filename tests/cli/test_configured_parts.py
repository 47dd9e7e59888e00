"""`LeydenCLI`: arguments that classes forward, custom Trainers and CLIs, and plain Namespaces."""

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
from leyden.cli import LeydenArgumentParser
from leyden.strategies import DDPStrategy, FSDPStrategy, MeshStrategy


@pytest.fixture(autouse=True)
def _change_to_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def build_cli(*args: str, **kwargs: Any) -> LeydenCLI:
    return LeydenCLI(OwnNet, run=False, args=["--trainer.accelerator=cpu", *args], **kwargs)


def test_arguments_a_strategy_forwards_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameters=true"]
    described = {"class_path": "DDPStrategy", "init_args": {"find_unused_parameters": True, "start_method": "spawn"}}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": described}}))
    for args in (words, ["--config=run.yaml"]):
        cli = build_cli(*args)
        strategy = cli.trainer.strategy
        assert isinstance(strategy, DDPStrategy) and strategy.ddp_arguments == {"find_unused_parameters": True}
        # The saved configuration holds the given argument, and none of torch's defaults.
        saved = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]["strategy"]
        assert saved["init_args"]["find_unused_parameters"] is True and "static_graph" not in saved["init_args"]
        Path("saved.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": saved}}))
        again: Any = build_cli("--config=saved.yaml").trainer.strategy
        assert again.ddp_arguments == strategy.ddp_arguments
    for line, text in (
        (["--trainer.strategy.help=DDPStrategy"], "--trainer.strategy.find_unused_parameters"),
        (["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused=true"], "'find_unused' is not accepted"),
    ):
        with pytest.raises(SystemExit):
            build_cli(*line)
        printed = capsys.readouterr()
        assert text in printed.out + printed.err


@pytest.mark.parametrize("kind", [FSDPStrategy, MeshStrategy])
def test_argument_names_of_other_trainers_work_in_a_file(kind: type[FSDPStrategy]) -> None:
    given = {"sharding_strategy": "SHARD_GRAD_OP", "state_dict_type": "sharded", "cpu_offload": True}
    described = {"class_path": kind.__name__, "init_args": given}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": described}}))
    assert type(build_cli("--config=run.yaml").trainer.strategy) is kind


def test_arguments_that_loggers_profilers_and_callbacks_forward_are_options() -> None:
    words = ["--trainer.logger=TensorBoardLogger", "--trainer.logger.flush_secs=7"]
    words += ["--trainer.profiler=PyTorchProfiler", "--trainer.profiler.profile_memory=true"]
    words += ["--trainer.callbacks+=RichModelSummary", "--trainer.callbacks.header_style=bold"]
    words += ["--trainer.callbacks+=LambdaCallback", "--trainer.callbacks.on_fit_end=builtins.print"]
    cli = build_cli(*words)
    trainer = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]
    assert trainer["logger"]["init_args"]["flush_secs"] == 7
    assert trainer["profiler"]["init_args"]["profile_memory"] is True
    assert [one["init_args"].get("header_style") for one in trainer["callbacks"]] == ["bold", None]
    [callback] = [one for one in cli.trainer.callbacks if isinstance(one, LambdaCallback)]
    assert callback.on_fit_end is print


def test_a_fit_method_of_the_cli_replaces_trainer_fit() -> None:
    seen: list[Any] = []

    class CustomFitCLI(LeydenCLI):
        def before_fit(self) -> None:
            seen.append("before")

        def fit(self, **arguments: Any) -> None:
            seen.append((type(arguments["model"]), type(arguments["datamodule"]), arguments["ckpt_path"]))

        def after_fit(self) -> None:
            seen.append(self.trainer.global_step)

    CustomFitCLI(OwnNet, Points, args=["fit", "--trainer.logger=false", "--ckpt_path=mine"])
    assert seen == ["before", (OwnNet, Points, "mine"), 0]


def test_a_trainer_without_a_callbacks_argument_is_built_without_callbacks() -> None:
    class TrainerWithoutCallbacks(Trainer):
        def __init__(self) -> None:
            super().__init__(**QUIET)

    with pytest.warns(
        UserWarning, match="TrainerWithoutCallbacks has no argument callbacks, so the configuration is not saved"
    ):
        cli = LeydenCLI(
            OwnNet, run=False, args=[], trainer_class=TrainerWithoutCallbacks, trainer_defaults={"callbacks": Timer()}
        )
    assert not any(isinstance(one, Timer) for one in cli.trainer.callbacks)


def test_a_configuration_may_be_an_argparse_namespace() -> None:
    values = Namespace(trainer=Namespace(logger=False, max_epochs=4), model=Namespace(width=3))
    cli = LeydenCLI(OwnNet, run=False, args=values)
    assert (cli.trainer.max_epochs, cli.model.hparams.width) == (4, 3)


def test_add_class_arguments_returns_the_added_options() -> None:
    added = LeydenArgumentParser().add_class_arguments(DDPStrategy)
    assert {"find_unused_parameters", "ddp_comm_hook", "devices"} <= set(added)
