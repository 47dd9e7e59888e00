"""`leyden env`, and `leyden test` on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import leyden as leyden_package


def test_env_lists_versions_backends_and_the_configuration_file(invoke: Any, tmp_path: Path) -> None:
    text = invoke("env").stdout
    assert text.splitlines()[0].split() == ["leyden", leyden_package.__version__]
    assert str(torch.__version__) in text
    assert "gloo" in text
    assert "no configuration file: there is no " in text
    file = tmp_path / "cache" / "leyden" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("num_processes: 2\n")
    assert "  num_processes: 2\n" in invoke("env").stdout


def test_env_masks_secrets(invoke: Any, environ: dict[str, str], monkeypatch: Any, tmp_path: Path) -> None:
    token = "hf_" + "aB3" * 12
    variables = {
        "WANDB_API_KEY": "secret-of-mine",
        # env prints variables with these prefixes.
        "LEYDEN_API_KEY": "secret-of-mine",
        "NCCL_CONF": f"user=me;token={token}",
        "TORCH_HOME": "https://me:secret-of-mine@host/x",
    }
    for name, value in variables.items():
        environ[name] = value
        monkeypatch.setenv(name, value)
    file = tmp_path / "cache" / "leyden" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"num_processes: 2\ntpu_env: ['HUB={token}', WANDB_API_KEY=secret-of-mine]\n")
    text = invoke("env").stdout
    assert "secret-of-mine" not in text
    assert token not in text
    assert "TORCH_HOME" in text and "https://***@host/x" in text
    assert "  num_processes: 2\n  tpu_env: ['HUB=***', WANDB_API_KEY=***]\n" in text


CONFIG = "use_cpu: true\nnum_processes: 2\nmixed_precision: bf16\n"
FSDP = """\
use_fsdp: true
fsdp_config: {fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 100, fsdp_sharding_strategy: 1}
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_the_self_test_passes_on_two_ranks(strategy: str, leyden: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG + (FSDP if strategy == "fsdp" else ""))
    done = leyden("test", "--config_file", file)
    assert done.returncode == 0, done.stderr
    checks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert checks == ["collectives", "parity", "accumulation", "resume", "precision"]
    assert f"2 ranks, {strategy} on cpu" in done.stdout
    assert "bf16-mixed" in done.stdout


def test_a_failed_check_ends_the_self_test() -> None:
    from leyden.cli.launch.trial import check

    with pytest.raises(leyden_package.LeydenError, match="parity does not hold: the weights differ"):
        check("parity", False, "the weights differ")
