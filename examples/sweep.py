# /// script
# requires-python = ">=3.10"
# dependencies = ["leyden", "matplotlib>=3.8", "optuna>=4.0", "scikit-learn>=1.3"]
#
# [tool.uv.sources]
# leyden = { path = "..", editable = true }
# ///
"""Searches hyperparameters of digits.py with Optuna, which stops poor trials early; a killed sweep continues.

python examples/sweep.py               runs 12 trials, and draws their curves to out/sweep/trials.png
python examples/sweep.py --trials 20   the same study with 8 more
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import matplotlib
import optuna
import torch
from digits import Digits, make_loaders
from optuna.trial import TrialState

from leyden import Callback, Trainer, TrainModule, seed_everything
from leyden.callbacks import ModelCheckpoint


class Pruning(Callback):
    """Reports a metric to a trial after each validation, and ends the fit if the trial is not worth going on.

    Args:
        trial: Optuna's trial.
        monitor: the name of the logged metric.
    """

    def __init__(self, trial: optuna.Trial, monitor: str) -> None:
        self.trial = trial
        self.monitor = monitor
        self.pruned = False

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.trial.report(float(trainer.callback_metrics[self.monitor]), step=trainer.current_epoch + 1)
            self.pruned = trainer.should_stop = self.trial.should_prune()


def run_trial(trial: optuna.Trial, epochs: int, root: Path) -> float:
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    width = trial.suggest_int("width", 4, 32, log=True)
    pruning = Pruning(trial, "val_acc")
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        callbacks=[pruning, ModelCheckpoint(monitor="val_acc", mode="max", save_last=True)],
    )
    seed_everything(0)
    train, val, _ = make_loaders(batch_size=32)
    # "auto" continues a run with the same hyperparameters: a trial that was killed. All others start anew.
    trainer.fit(Digits(lr, width), train, val, ckpt_path="auto")
    if pruning.pruned:
        raise optuna.TrialPruned
    return float(trainer.checkpoint_callback.best_model_score)


def save_picture(study: optuna.Study, path: Path) -> None:
    """Draws the accuracy of each trial after each epoch, and where in the space the trials were."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (curves, space) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for trial in study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)):
        best, pruned = trial.number == study.best_trial.number, trial.state == TrialState.PRUNED
        color = "tab:orange" if best else "silver" if pruned else "tab:blue"
        values = trial.intermediate_values
        curves.plot(list(values), list(values.values()), color=color, marker=".", zorder=2 + best - pruned)
        space.scatter(trial.params["lr"], trial.params["width"], color=color, edgecolors="gray")
    curves.set(xlabel="epoch", ylabel="accuracy in validation", title="orange: best, gray: pruned")
    curves.xaxis.get_major_locator().set_params(integer=True)
    space.set(xlabel="lr", ylabel="width", xscale="log", title=f"best accuracy {study.best_value:.3f}")
    space.set_xlim(1e-4, 1e-1)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12, help="of the whole study (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--root", default="out/sweep", help="folder of the study and its runs (default: %(default)s)")
    args = parser.parse_args()
    root = Path(args.root)
    root.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.getLogger("leyden").setLevel(logging.WARNING)  # Optuna prints a line for each trial.

    study = optuna.create_study(
        storage=f"sqlite:///{root / 'study.db'}",
        study_name="digits",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=2),
    )
    # Random, but repeatable; a continued study with seed 0 would propose its first trials again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        # A kill interrupted it: its values are tried again, in a trial that continues its run.
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    ended = len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED)))
    study.optimize(lambda trial: run_trial(trial, args.epochs, root), n_trials=max(args.trials - ended, 0))
    save_picture(study, root / "trials.png")
    pruned = len(study.get_trials(states=(TrialState.PRUNED,)))
    print(
        f"best accuracy {study.best_value:.3f} with {study.best_params}; {pruned} of {args.trials} trials were pruned"
    )


if __name__ == "__main__":
    main()
