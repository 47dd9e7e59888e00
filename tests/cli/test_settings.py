"""The configuration file: Accelerate's files, older keys, round trips, and errors of invalid files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from leyden import ConfigurationError
from leyden.cli.settings.keys import FAMILIES, TOP, ConfigKey
from leyden.cli.settings.settings import default_file, found_file, parse, read_file, write_file
from leyden.strategies.deepspeed.config import ZeroConfig
from leyden.strategies.fsdp.fsdp_strategy import FSDPStrategy

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: no
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
command_file: null
commands: null
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: auto
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: 'False'
  zero3_save_16bit_model: false
  zero_stage: 3
distributed_type: DEEPSPEED
dynamo_backend: NO
fsdp_config: {}
fp16: true
tpu_name: null
use_cpu: false
"""


def write_config(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_accelerates_configuration_file_is_supported(tmp_path: Path) -> None:
    settings = read_file(write_config(tmp_path, ACCELERATE))
    assert (settings.kind, settings.precision, settings.get("num_processes"), settings.get("use_cpu")) == (
        "FSDP",
        "no",
        2,
        True,
    )
    assert settings.section("fsdp_config")["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert settings.section("fsdp_config")["fsdp_backward_prefetch"] == "BACKWARD_PRE"
    unused = dict(settings.without_effect())
    # Keys that are false or empty are not listed.
    assert set(unused) == {
        *("same_network", "main_training_function", "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type"),
        *("fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_version"),
    }
    assert all(unused.values())


def test_an_older_deepspeed_file_is_read(tmp_path: Path) -> None:
    settings = read_file(write_config(tmp_path, DEEPSPEED))
    assert settings.kind == "DEEPSPEED"
    assert settings.precision == "fp16"
    assert settings.section("deepspeed_config")["zero3_init_flag"] is False
    assert settings.section("dynamo_config") == {"dynamo_backend": "no"}
    assert settings.notes == ["fp16: true is read as mixed_precision: fp16"]


@pytest.mark.parametrize(
    ("switch", "kind"),
    [("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED"), ("use_megatron_lm", "MEGATRON_LM"), ("use_ddp", "NO")],
)
def test_older_switches_select_the_distributed_type(switch: str, kind: str) -> None:
    assert parse({switch: True}).kind == kind
    assert parse({switch: "false"}).kind == "NO"
    assert len(parse({switch: True}).notes) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_procesess: 2", "'num_procesess' is not known. Did you mean 'num_processes'"),
        ("mixed_precision: bf61", "mixed_precision: 'bf61' is not known. Did you mean 'bf16'"),
        ("num_machines: two", "num_machines: 'two' is not a whole number"),
        ("num_machines: 0", "give a whole number from 1"),
        ("debug: maybe", "debug: 'maybe' is not true or false"),
        ("zero_stage: 2", "'zero_stage' belongs in the section deepspeed_config"),
        (
            "fsdp_config:\n  fsdp_ofload_params: true",
            "fsdp_config: the key 'fsdp_ofload_params' is not known. Did you mean 'fsdp_offload_params'",
        ),
        ("fsdp_config: yes", "is not a section of keys"),
        ("use_fsdp: true\ndistributed_type: DEEPSPEED", "contradict each other"),
        ("compute_environment: AMAZON_SAGEMAKER", "inside the job"),
        ("a: [", "is not a valid configuration file in YAML"),
        ("- a", "holds no keys"),
        ("!!python/object/apply:os.system ['true']", "is not a valid configuration file in YAML"),
    ],
)
def test_an_invalid_key_or_value_raises(tmp_path: Path, text: str, words: str) -> None:
    path = write_config(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_file(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_raises_with_the_command_that_creates_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="leyden config --config_file"):
        read_file(tmp_path / "none.yaml")


def test_every_key_has_an_effect_or_a_reason() -> None:
    every = [key for keys in (TOP, *FAMILIES.values()) for key in keys]
    assert [key.name for key in every if not key.help and not key.without] == []
    names = [name for key in every for name in (key.name, *key.older)]
    assert len(names) == len(set(names))


def test_a_settings_file_survives_a_round_trip(tmp_path: Path) -> None:
    settings = read_file(write_config(tmp_path, ACCELERATE))
    again = read_file(write_file(settings, tmp_path / "new" / "file.yaml"))
    assert (again.values, again.sections) == (settings.values, settings.sections)
    # YAML 1.1 reads an unquoted no as false.
    assert "'no'" in (tmp_path / "new" / "file.yaml").read_text()
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "file.yaml"]
    assert yaml.safe_load((tmp_path / "new" / "file.yaml").read_text())["mixed_precision"] == "no"


def test_flags_override_the_file() -> None:
    below = parse(
        {"num_processes": 4, "debug": True, "fsdp_config": {"fsdp_offload_params": True, "fsdp_min_num_params": 3}}
    )
    above = parse({"num_processes": 2, "debug": None, "fsdp_config": {"fsdp_offload_params": False}})
    settings = above.over(below)
    assert settings.values == {"num_processes": 2, "debug": True}
    assert settings.section("fsdp_config") == {"fsdp_offload_params": False, "fsdp_min_num_params": 3}


def test_default_files_are_found_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert default_file() == Path.home() / ".cache" / "leyden" / "default_config.yaml"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_file() == tmp_path / "leyden" / "default_config.yaml"
    assert found_file()[0] is None
    theirs = tmp_path / "huggingface" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    assert found_file()[0] == theirs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    assert found_file()[0] == theirs


def test_flag_values_are_parsed_by_type() -> None:
    assert ConfigKey("x", bool).read("False") is False
    assert ConfigKey("x", float).read("1e-3") == 0.001
    with pytest.raises(ConfigurationError):
        ConfigKey("x", int).read(True)


MALICIOUS_FILES = {
    "nested too deeply": "[" * 5000,
    "nested too deeply:": "num_processes: " + "[" * 1000 + "]" * 1000,
    "it holds a number with thousands of digits": f"num_processes: {'9' * 5000}",
    "num_processes: a number with thousands of digits is not a whole number": f"num_processes: 0x{'f' * 5000}",
    "month must be in 1..12": "main_process_ip: 2020-13-45",
    "mixed_precision: .*is not one value": "mixed_precision: &a [*a]",
    "the key None is not known": "null: 3",
    "main_process_port: 70000 is not a whole number from 0 to 65535": "main_process_port: 70000",
    "characters, too many for a configuration file": "#" * 2_000_000,
}


@pytest.mark.parametrize("error", MALICIOUS_FILES)
def test_a_malicious_file_raises_a_short_error(error: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(MALICIOUS_FILES[error])
    with pytest.raises(ConfigurationError, match=error) as caught:
        read_file(file)
    assert len(str(caught.value)) < 900
    assert str(caught.value).count(str(file)) == 1 + str(caught.value).count("leyden config")


def test_exponential_yaml_aliases_are_not_expanded_in_the_error(tmp_path: Path) -> None:
    names = ["tpu_env", "commands", "ipex_config", "mixed_precision", "num_processes"]
    lines = ["tpu_vm: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{name}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]" for i, name in enumerate(names)]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigurationError) as caught:
        read_file(file)
    assert len(str(caught.value)) < 20_000


def test_a_pipe_as_configuration_file_raises_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        read_file(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match="is not a regular file"):
        ZeroConfig(str(tmp_path / "pipe"))


def test_null_and_fp8_keys_of_accelerate_are_read() -> None:
    section = {"fsdp_ignored_modules": None, "fsdp_activation_checkpointing_offload": False}
    found = parse({"use_fsdp": True, "fsdp_config": section, "tpu_config_file": None})
    assert found.section("fsdp_config") == {"fsdp_activation_checkpointing_offload": False}
    assert FSDPStrategy.from_accelerate(section | {"fsdp_activation_checkpointing_offload": None})
    for given in ((False, False, False), "(false, false, false)", [False] * 3, False, "false"):
        fp8 = parse({"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "override_linear_precision": given}})
        assert fp8.section("fp8_config")["fp8_override_linear_precision"] == [False] * 3
        assert "fp8_override_linear_precision" not in dict(fp8.without_effect())
    assert parse({"fp8_config": {"amax_compute_algorithm": "max", "override_linear_precision": "true,no,1"}}).section(
        "fp8_config"
    ) == {"fp8_amax_compute_algo": "max", "fp8_override_linear_precision": [True, False, True]}
    with pytest.raises(ConfigurationError, match="three booleans"):
        parse({"fp8_config": {"override_linear_precision": "true,false"}})
