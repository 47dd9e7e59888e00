"""`leyden convert` converts another trainer's checkpoint, or one of HFModule to a folder of transformers.

This file reads weights and hyperparameters; `convert_state.py` reads the state of the run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from leyden.checkpoint.foreign import load_weights_only
from leyden.checkpoint.format.bucket import BucketPath, Place, place_of
from leyden.checkpoint.format.codec import check_encodable
from leyden.checkpoint.format.errors import CheckpointError
from leyden.checkpoint.format.manifest import MANIFEST
from leyden.checkpoint.format.secrets import masked_values
from leyden.checkpoint.frozen import FrozenPart
from leyden.checkpoint.reader import CheckpointReader
from leyden.checkpoint.writer import CheckpointWriter
from leyden.cli.checkpoint.convert_state import Names, of_accelerate, of_lightning
from leyden.cli.models import ARGS, load_model
from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path

MODEL = re.compile(r"(?:model|pytorch_model)(?:_(\d+))?\.(?:safetensors|bin)(\.index\.json)?$")
OTHERS = ("optimizer", "schedul", "random_states", "sampler", "scaler", "dl_state", "custom_checkpoint")


@click.command("convert")
@click.argument("file")
@click.argument("out", required=False)
@click.option(
    "--trust", is_flag=True, help="Also read files that torch's safe loader refuses. This runs any code in FILE."
)
@click.option("--model", type=click.IntRange(0), help="Which of several models of an Accelerate folder, from 0.")
@click.option("--prefix", help="Prefix for each name: the module's attribute that holds the model.")
@click.option(
    "--like",
    metavar="MODULE:CLASS",
    help="The model's class, to get the order of its parameters if FILE does not record it.",
)
@click.option("--merged", is_flag=True, help="Of a checkpoint of HFModule: merge its adapters into the model.")
@ARGS
def command(
    file: str,
    out: str | None,
    trust: bool,
    model: int | None,
    prefix: str | None,
    like: str | None,
    merged: bool,
    arguments: dict[str, Any],
) -> None:
    """Convert FILE to a checkpoint and write it to OUT.

    FILE is a Lightning .ckpt, a folder of Accelerate's save_state or of DeepSpeed, or a file with a state dict. Weights
    and hyperparameters are always converted. Optimizers, schedulers and counters are converted if they can be
    identified, since other trainers save them by order, not by name. Continue with fit(ckpt_path=OUT,
    restore={"weights", "optimizers", "progress"}) or restore="weights"; with an Accelerator, call load_state(OUT). The
    data starts from the beginning.

    If FILE is a checkpoint that Leyden's HFModule saved, OUT becomes a folder for transformers' from_pretrained; for
    peft, if the model has adapters.
    """
    place = place_of(file, "FILE")
    # "." and ".." have no stem. What is in a bucket is converted to the current folder.
    named = Path(place.name) if isinstance(place, BucketPath) else place if place.name.strip(".") else place.resolve()
    if (place / MANIFEST).is_file():
        folder = Path(local_path(out, "OUT")) if out else named.with_name(f"{named.name}-pretrained")
        _save_pretrained(place, folder, merged)
        click.echo(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        return
    if merged:
        raise ConfigurationError(f"--merged is for checkpoints of Leyden's HFModule, and {place} is none.")
    target = place_of(out, "OUT") if out else named.with_name(f"{named.stem}-leyden")
    order = None if like is None else [name for name, _ in load_model(like, arguments)[0].named_parameters()]
    with tempfile.TemporaryDirectory(prefix="leyden-convert-") as temporary:
        source = _downloaded(place, Path(temporary)) if isinstance(place, BucketPath) else place
        _convert(source, target, trust, model, f"{prefix}." if prefix else "", order)


def _downloaded(place: BucketPath, folder: Path) -> Path:
    """Copies a file or a folder from a bucket to a local folder, and returns its path there."""
    target = folder / place.name
    try:
        files = [place] if place.is_file() else [path for path, _ in place.below()]
        for path in files:
            path.download(target / path.relative_to(place))
    except OSError as error:
        raise CheckpointError(place, f"cannot be read: {error}.") from error
    if not files:
        raise CheckpointError(place, "does not exist.")
    return target


def _convert(source: Path, target: Place, trust: bool, model: int | None, prefix: str, order: list[str] | None) -> None:
    hparams: dict[str, Any] = {}
    if source.is_dir():
        weights, others = folder_weights(source, trust, model)
        taken = of_accelerate(source, Names(weights, order, prefix), trust, model or 0)
        taken.left += [
            name for name in others if not any(name in left for left in taken.left) and name not in taken.files
        ]
    else:
        loaded = load_weights_only(source, trust=trust)
        weights, hparams = _state_dict(loaded, source), _hparams(loaded)
        names = Names(weights, order, prefix)
        taken = of_lightning(loaded if isinstance(loaded, Mapping) else {}, names)
    kept, dropped = _encodable(hparams)
    with CheckpointWriter(target) as writer:
        writer.model({f"{prefix}{name}": tensor for name, tensor in weights.items()})
        if kept:
            writer.state("hparams", {"module": masked_values(kept)})
        if not taken.is_empty:
            taken.write(writer)
        path = writer.commit(progress=taken.progress.to_dict(), strategy="converted")
    also = f", {taken.words}" if taken.words else ""
    click.echo(f"{path}: {len(weights)} tensors, {len(kept)} hyperparameters, step {taken.progress.global_step}{also}")
    if taken.optimizers:
        click.echo("by order   optimizers are right only if both runs make them from model.parameters()")
    for name in dropped:
        click.echo(f"not converted: the hyperparameter {name}, which is not a plain value")
    for left in taken.left:
        click.echo(f"not converted: {left}")


def _save_pretrained(checkpoint: Place, folder: Path, merged: bool) -> None:
    """Writes a checkpoint of HFModule as a folder of transformers; of a model with adapters, one of peft.

    Raises:
        ConfigurationError: if another module saved the checkpoint, or its model cannot be built from a name.
    """
    from leyden.hf import HFModule

    reader = CheckpointReader(checkpoint)
    saved = reader.state("hparams").get("module", {}) if reader.has("hparams") else {}
    if not {"label_smoothing", "scheduler_kwargs", "warmup_steps"} <= saved.keys():
        raise ConfigurationError(
            f"{checkpoint} was not saved by HFModule. To write the weights of another module, use `leyden merge`."
        )
    frozen = FrozenPart.read(reader)
    source = saved.get("model") or (frozen and frozen.source)
    if source is None:
        raise ConfigurationError(
            f"{checkpoint} does not name its pretrained model. In Python, pass the model: "
            "HFModule.load_from_checkpoint(checkpoint, model=…).save_pretrained(folder)."
        )
    HFModule.load_from_checkpoint(str(checkpoint), model=source).save_pretrained(folder, merged=merged)


def _state_dict(loaded: Any, source: Path) -> dict[str, Tensor]:
    """Returns the weights in a file: its own dict, or the entry state_dict (Lightning) or model."""
    candidates = [loaded.get("state_dict"), loaded.get("model"), loaded] if isinstance(loaded, Mapping) else []
    for found in candidates:
        if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
            return {str(name): tensor for name, tensor in found.items()}
    raise CheckpointError(
        source, "holds no dict of tensors, neither at the top level nor under 'state_dict' or 'model'."
    )


def _hparams(loaded: Any) -> dict[str, Any]:
    found = loaded.get("hyper_parameters") if isinstance(loaded, Mapping) else None
    return {str(name): value for name, value in found.items()} if isinstance(found, Mapping) else {}


def _encodable(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    kept, dropped = {}, []
    for name, value in values.items():
        try:
            check_encodable(value)
            kept[name] = value
        except ConfigurationError:
            dropped.append(name)
    return kept, dropped


def folder_weights(source: Path, trust: bool, model: int | None) -> tuple[dict[str, Tensor], list[str]]:
    """Reads the weights of one model from a folder of Accelerate, and lists the other files.

    Raises:
        CheckpointError: if there is no model, or several and `model` chooses none.
    """
    files: dict[int, list[Path]] = {}
    for path in sorted(source.iterdir()):
        if name := MODEL.match(path.name):
            files.setdefault(int(name[1] or 0), []).append(path)
    others = [path.name for path in sorted(source.iterdir()) if path.name.startswith(OTHERS)]
    sharded = [path for path in sorted(source.glob("pytorch_model_fsdp_*")) if path.is_dir()]
    zero = _zero_folders(source)
    found: dict[int, Any] = files or dict(enumerate(sharded or zero))
    read: Callable[[Any, bool], dict[str, Tensor]] = _of_files if files else _sharded if sharded else _zero
    if not found:
        raise CheckpointError(
            source, "holds no model.safetensors and no pytorch_model.bin: give a folder of Accelerate's save_state."
        )
    count = len(found)
    if model is None and count > 1:
        raise CheckpointError(source, f"holds {count} models: choose one with --model 0 to --model {count - 1}.")
    model = model or 0
    if model not in found:
        raise CheckpointError(source, f"has no model {model}: there are {', '.join(map(str, sorted(found)))}.")
    return read(found[model], trust), others


def _of_files(files: list[Path], trust: bool) -> dict[str, Tensor]:
    """Reads the weights of one model. A single file has precedence over an index and its parts."""
    whole = [path for path in files if not path.name.endswith(".index.json")]
    if not whole:
        return _indexed(files[0], trust)
    best = next((path for path in whole if path.suffix == ".safetensors"), whole[0])
    return _state_dict(load_weights_only(best, trust=trust), best)


def _indexed(index: Path, trust: bool) -> dict[str, Tensor]:
    """Reads the weights of the files that an index names."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(index, "is not an index of weights.") from error
    weights: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(index, f"names {name!r}, which leads out of its folder.")
        weights |= _state_dict(load_weights_only(index.with_name(name), trust=trust), index.with_name(name))
    return weights


def _sharded(folder: Path, trust: bool) -> dict[str, Tensor]:
    """Reads the weights of torch's own distributed checkpoint, whose metadata is a pickle."""
    if not trust:
        raise CheckpointError(
            folder, "is a sharded checkpoint whose .metadata is a pickle. If you trust who wrote it, pass --trust."
        )
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole.pt"
        dcp_to_torch_save(folder, whole)
        return _state_dict(load_weights_only(whole), folder)


def _zero_folders(source: Path) -> list[Path]:
    """Returns the folders that DeepSpeed's engine saved: this one, its latest, or those inside Accelerate's or
    Lightning's.
    """
    latest = source / "latest"
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    inside = [source / tag] if tag and Path(tag).name == tag else []
    found = [source, *inside, source / "checkpoint", *sorted(source.glob("pytorch_model*"))]
    return [path for path in dict.fromkeys(found) if path.is_dir() and any(path.glob("*_optim_states.pt"))]


def _zero(folder: Path, trust: bool) -> dict[str, Tensor]:
    """Reads the float32 master weights of DeepSpeed's engine. DeepSpeed merges them; its files are pickles."""
    if not trust:
        raise CheckpointError(
            folder, "was saved by DeepSpeed's engine, in pickles. If you trust who wrote it, pass --trust."
        )
    from leyden.strategies.deepspeed.initialize import import_deepspeed

    # DeepSpeed reports its progress on standard output.
    with contextlib.redirect_stdout(sys.stderr):
        import_deepspeed(torch.device("cpu"))
        reading = importlib.import_module("deepspeed.utils.zero_to_fp32")
        try:
            found = reading.get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
        except Exception as error:
            # A damaged or unrelated pickle may raise anything.
            raise CheckpointError(folder, f"cannot be read by DeepSpeed ({type(error).__name__}: {error}).") from error
    weights: dict[str, Tensor] = {str(name): tensor.contiguous() for name, tensor in found.items()}
    for wrapper in ("_forward_module.", "module."):
        # Lightning's wrappers add these prefixes.
        if all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): tensor for name, tensor in weights.items()}
    return weights
