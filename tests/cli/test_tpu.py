"""TPU keys of a configuration file, as Accelerate writes them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from leyden import ConfigurationError
from leyden.cli.launch.plan import ElasticOptions, LaunchPlan, resolve
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import parse
from leyden.trainer.launched import read_launched

# The file that `accelerate config` writes for a TPU host.
FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: XLA
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def plan(**changes: Any) -> LaunchPlan:
    return resolve(parse({**yaml.safe_load(FILE), **changes}), ElasticOptions(), Machine(cpus=8), {})


def test_each_process_in_the_file_becomes_a_rank() -> None:
    found = plan()
    launched = read_launched(found.variables())
    assert launched is not None
    assert (found.per_machine, found.accelerator) == (8, "xla")
    assert (launched.accelerator, launched.strategy, launched.precision) == ("xla", "xla_ddp", "bf16-mixed")
    assert {name for name, _ in found.settings.without_effect()} == {"same_network", "main_training_function"}


def test_one_process_drives_all_devices() -> None:
    launched = read_launched(plan(num_processes=1).variables())
    assert launched is not None
    assert launched.strategy == "xla"
    # TPU is the older name of the type XLA.
    launched = read_launched(plan(distributed_type="TPU", num_processes=-1).variables())
    assert launched is not None
    assert launched.strategy == "xla"


def test_tpu_env_sets_variables_of_the_ranks() -> None:
    variables = plan(tpu_env=["PJRT_DEVICE=TPU", "LIBTPU_INIT_ARGS=--a=b"]).variables()
    assert variables["PJRT_DEVICE"] == "TPU"
    assert variables["LIBTPU_INIT_ARGS"] == "--a=b"
    with pytest.raises(ConfigurationError, match=r"give NAME=value"):
        plan(tpu_env=["PJRT_DEVICE"]).variables()


def test_a_tpu_pod_raises_with_the_gcloud_command() -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan(tpu_use_cluster=True, tpu_name="pod-1", tpu_zone="us-central2-b", tpu_use_sudo=True)
    words = str(refused.value)
    assert "gcloud compute tpus tpu-vm ssh pod-1 --zone us-central2-b --worker=all" in words
    assert "'sudo leyden launch --tpu SCRIPT'" in words
