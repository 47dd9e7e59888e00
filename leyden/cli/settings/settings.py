"""Finds, reads and writes the configuration file. `keys.py` defines its keys."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leyden.cli.settings.keys import FAMILIES, OLDER_TYPES, TOP, ConfigKey, read_section, shown
from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path

FILE = "default_config.yaml"
LARGEST = 1_000_000
"""Maximum number of characters in a file."""
NO_FP8 = "mixed_precision is not fp8."


def default_file() -> Path:
    """Returns the file that `leyden config` writes, and `leyden launch` reads, by default."""
    return _cache() / "leyden" / FILE


def found_file() -> tuple[Path | None, str]:
    """Finds the file that a launch reads if none is named.

    Returns:
        The file and a remark: Leyden's default file, else Accelerate's, else None with the places searched.
    """
    ours = default_file()
    if ours.is_file():
        return ours, ""
    home = Path(os.environ.get("HF_HOME") or _cache() / "huggingface")
    for name in (FILE, "default_config.yml", "default_config.json"):
        theirs = home / "accelerate" / name
        if theirs.is_file():
            return theirs, f"Accelerate's; there is no {ours}"
    return None, f"there is no {ours}, and no file of Accelerate"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


@dataclass
class Settings:
    """The settings of a configuration file, or of flags laid over a file.

    Attributes:
        values: the keys of the top level; open ones are missing or None.
        sections: the keys of each section.
        source: the file they were read from.
        origin: a remark about that file, if the user did not name it.
        notes: how older keys were interpreted.
        variables: a cluster's environment variables that override the file, as NAME=value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    source: Path | None = None
    origin: str = ""
    notes: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the top level, or `default` if it is open.

        Example:
            >>> Settings({"num_machines": None}).get("num_machines", 1)
            1
        """
        value = self.values.get(name)
        return default if value is None else value

    def section(self, name: str) -> dict[str, Any]:
        """Returns the values that are set in a section."""
        return {key: value for key, value in self.sections.get(name, {}).items() if value is not None}

    def effective(self, name: str) -> dict[str, Any]:
        """Returns the values of a section, without those that have no effect here."""
        unused = {key for key, _ in self.without_effect()}
        return {key: value for key, value in self.section(name).items() if key not in unused}

    def over(self, below: Settings) -> Settings:
        """Returns these settings, completed by those of `below`."""
        given = {name: value for name, value in self.values.items() if value is not None}
        sections = {name: {**below.section(name), **self.section(name)} for name in FAMILIES}
        return dataclasses.replace(
            below,
            values={**below.values, **given},
            sections={name: values for name, values in sections.items() if values},
        )

    @property
    def kind(self) -> str:
        """How the model is distributed over ranks: NO, MULTI_CPU, MULTI_GPU, FSDP, DEEPSPEED, MEGATRON_LM, XLA, …"""
        return str(self.get("distributed_type", "NO"))

    @property
    def precision(self) -> str:
        """The mixed precision; "no" by default."""
        return str(self.get("mixed_precision", "no"))

    def without_effect(self) -> list[tuple[str, str]]:
        """Returns the keys that are set but have no effect here, each with the reason."""
        found = [(key, self.values.get(key.name)) for key in TOP] + [
            (key, self.section(name).get(key.name)) for name, keys in FAMILIES.items() for key in keys
        ]
        unused = [(key.name, key.without) for key, value in found if key.without and not _is_off(value)]
        fp8 = self.section("fp8_config")
        if fp8:
            from leyden.strategies.precision.fp8_config import without_effect

            named = {name for name, _ in unused}
            more = without_effect(fp8, self.kind == "FSDP") if self.precision == "fp8" else dict.fromkeys(fp8, NO_FP8)
            unused += [(name, why) for name, why in more.items() if name not in named and not _is_off(fp8[name])]
        return unused


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", "no", [], {}, [False, False, False])


def read_file(path: str | os.PathLike[str], origin: str = "") -> Settings:
    """Reads a configuration file, Leyden's or Accelerate's.

    Args:
        path: YAML, or JSON, which is YAML too.
        origin: a remark about the file, if the user did not name it.

    Raises:
        ConfigurationError: if the file is missing, is not valid YAML, or has an unknown key or an invalid value.
    """
    path = Path(path)
    found = _loaded(path)
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} holds no keys: write a new one with `leyden config --config_file {path}`.")
    try:
        settings = parse(found)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return dataclasses.replace(settings, source=path, origin=origin)


def _loaded(path: Path) -> Any:
    """Parses a YAML file.

    Raises:
        ConfigurationError: if it cannot be read, or is not valid YAML.
    """
    import yaml

    local_path(path, "config_file")
    write = f"write one with `leyden config --config_file {path}`"
    if path.exists() and not path.is_file():
        # Reading a pipe would wait for its writer.
        raise ConfigurationError(f"the configuration file {path} is not a regular file: {write}.")
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) <= LARGEST:
            return yaml.safe_load(text)
    except OSError as error:
        raise ConfigurationError(
            f"the configuration file {path} cannot be read ({error.strerror}): {write}."
        ) from error
    except RecursionError:
        raise ConfigurationError(
            f"{path} is nested too deeply: a configuration file has sections of keys, and nothing below them."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: text that is not UTF-8, a number with thousands of digits, an impossible date.
        reason = " ".join(str(error).split())
        if "integer string conversion" in reason:
            reason = "it holds a number with thousands of digits."
        raise ConfigurationError(f"{path} is not a valid configuration file in YAML: {reason}") from None
    raise ConfigurationError(f"{path} has {len(text):,} characters, too many for a configuration file: {write}.")


def parse(found: Mapping[str, Any]) -> Settings:
    """Reads the keys of a file.

    Raises:
        ConfigurationError: for an unknown key or an invalid value.

    Example:
        >>> parse({"use_fsdp": True, "fsdp_config": {"fsdp_sharding_strategy": 1}}).kind
        'FSDP'
    """
    rest = dict(found)
    if str(rest.get("compute_environment")).upper() == "AMAZON_SAGEMAKER":
        raise ConfigurationError(
            "compute_environment: AMAZON_SAGEMAKER is not supported: run `leyden launch` inside the job, with "
            "LOCAL_MACHINE."
        )
    notes = _older_switches(rest)
    _older_tensor_section(rest, notes)
    sections = {}
    for name, keys in FAMILIES.items():
        section = rest.pop(name, None)
        if section is not None and not isinstance(section, dict):
            raise ConfigurationError(f"{name}: {shown(section)} is not a section of keys: indent its keys below it.")
        if section:
            sections[name] = read_section(keys, section, name)
    if "dynamo_backend" in rest:
        sections.setdefault("dynamo_config", {}).update(
            read_section(FAMILIES["dynamo_config"], {"dynamo_backend": rest.pop("dynamo_backend")})
        )
    settings = Settings(read_section(TOP, rest), sections, notes=notes)
    if settings.kind == "TPU":
        settings.values["distributed_type"] = "XLA"
    return settings


def _older_switches(rest: dict[str, Any]) -> list[str]:
    """Replaces older switches, such as `use_fsdp: true` and `fp16: true`, by the current keys."""
    notes = []
    for name, kind in OLDER_TYPES.items():
        value = ConfigKey(name, bool).read(rest.pop(name, None))
        if not value:
            continue
        if not kind:
            notes.append(f"{name} is not needed: ranks and axes decide")
            continue
        before = rest.get("distributed_type")
        if before not in (None, False, "NO", "MULTI_GPU", "MULTI_CPU", kind):
            raise ConfigurationError(f"{name}: true and distributed_type: {before} contradict each other: keep one.")
        rest["distributed_type"] = kind
        notes.append(f"{name}: true is read as distributed_type: {kind}")
    if ConfigKey("fp16", bool).read(rest.pop("fp16", None)):
        rest.setdefault("mixed_precision", "fp16")
        notes.append("fp16: true is read as mixed_precision: fp16")
    return notes


def _older_tensor_section(rest: dict[str, Any], notes: list[str]) -> None:
    """Replaces `tp_config: {tp_size: 2}` of older files, with `distributed_type: TP`, by the size of the mesh."""
    section, tp = rest.pop("tp_config", None), "parallelism_config_tp_size"
    if str(rest.get("distributed_type")).upper() == "TP":
        del rest["distributed_type"]
    if not section:
        return
    if not isinstance(section, dict) or set(section) != {"tp_size"}:
        raise ConfigurationError(f"tp_config: {shown(section)}: give tp_size below it, and nothing else.")
    sizes = rest.setdefault("parallelism_config", {})
    if sizes.setdefault(tp, section["tp_size"]) != section["tp_size"]:
        raise ConfigurationError(f"tp_config has tp_size {section['tp_size']}, and {tp} is {sizes[tp]}: keep one.")
    notes.append(f"tp_config is read as {tp}: {section['tp_size']}")


def write_file(settings: Settings, path: str | os.PathLike[str]) -> Path:
    """Writes a configuration file, replacing an existing one.

    Raises:
        ConfigurationError: if it cannot be written.
    """
    import yaml

    path = Path(local_path(path, "config_file"))
    ordered = {key.name: settings.values[key.name] for key in TOP if settings.values.get(key.name) is not None}
    for name in FAMILIES:
        if settings.section(name):
            ordered[name] = settings.section(name)
    text = yaml.safe_dump(ordered, sort_keys=False, default_flow_style=False)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written ({error.strerror}): choose --config_file.") from error
    return path
