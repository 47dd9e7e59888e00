"""Makes the plan of a launch from flags and a file: which ranks run where, and with which settings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from leyden.checkpoint.format.secrets import masked_value
from leyden.cli.launch.accelerate_variables import accelerate_variables
from leyden.cli.launch.strategy_choice import chosen_strategy
from leyden.cli.settings.keys import FP8, NO, PRECISIONS
from leyden.cli.settings.machine import Machine
from leyden.cli.settings.settings import Settings
from leyden.core.devices import VISIBLE
from leyden.core.environment import MACHINE_RANGE, STARTER, RankEnvironment, rank_environment
from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path
from leyden.launch.heartbeat import hang_limit
from leyden.trainer.launched import LaunchSettings

PORT = 29500
Meeting: TypeAlias = tuple[int | None, str, int, str]
"""The index of this machine, and the address, port and backend of the rendezvous."""
NOT_HERE = "torch sees no GPU on this machine: the plan is for a machine that has them, and would not start here"


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """Options of torch's elastic agent. Only flags set them.

    Attributes:
        endpoint: host:port where machines meet, instead of at the main machine.
        rdzv_id: name of the rendezvous.
        rdzv_conf: further settings of the rendezvous.
        monitor_interval: seconds between two checks of the ranks.
        log_dir: folder for the output of the ranks.
        tee: streams that are also written to files: "0" none, "1" stdout, "2" stderr, "3" both; or by local rank.
        role: name of the ranks in logs.
    """

    endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str | None = None
    role: str = "default"

    def __post_init__(self) -> None:
        if self.log_dir is not None:
            local_path(self.log_dir, "log_dir")


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The plan of one launch on this machine.

    Attributes:
        settings: flags over the file.
        elastic: options of torch's elastic agent.
        accelerator: cpu, xla, or the type of the GPUs, such as cuda.
        per_machine: number of ranks on this machine.
        machines: number of machines; the largest number, if they may come and go.
        machine_rank: the number of this machine; None if the rendezvous assigns it.
        address: of machine 0.
        port: of machine 0; 0 for any free port.
        backend: rendezvous backend, static or c10d.
        threads: CPU threads per rank.
        launched: the settings that scripts receive.
        caveats: remarks about this plan on this machine.
        rank: the rank that this process becomes; None if it starts ranks.
        least_machines: the smallest number of machines, if they may come and go; 0 for a fixed number.
    """

    settings: Settings
    elastic: ElasticOptions
    accelerator: str
    per_machine: int
    machines: int
    machine_rank: int | None
    address: str
    port: int
    backend: str
    threads: int
    launched: LaunchSettings
    caveats: tuple[str, ...] = ()
    rank: RankEnvironment | None = None
    least_machines: int = 0

    @property
    def max_restarts(self) -> int:
        return int(self.settings.get("max_restarts", 0))

    def started_by(self, words: Sequence[str]) -> LaunchPlan:
        """Returns this plan with a command line, which the ranks store in their run's checkpoints."""
        return replace(self, launched=replace(self.launched, command=list(words)))

    def variables(self) -> dict[str, str]:
        """Returns the ranks' environment variables in addition to torch's: Leyden's and Accelerate's."""
        found = {STARTER: "launch", "OMP_NUM_THREADS": str(self.threads), **self.launched.variables()}
        found |= accelerate_variables(self.settings, self.launched, self.accelerator)
        found |= _tpu_variables(self.settings)
        gpus = self.settings.get("gpu_ids", "all")
        if gpus != "all" and self.accelerator in VISIBLE:
            found[VISIBLE[self.accelerator][0]] = gpus
        if self.launched.debug:
            # gloo aborts the process if operands differ; with this setting they are compared first, and a mismatch
            # raises.
            found["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        if self.rank is not None:
            found |= {STARTER: self.rank.starter, **self.rank.variables()}
        if self.least_machines:
            found[MACHINE_RANGE] = f"{self.least_machines}:{self.machines}"
            # A rank that loses a machine would show C++ frames.
            found["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        return found

    def lines(self, command: str, *, reasons: bool = False) -> str:
        """Formats the plan in a few lines.

        Args:
            command: what the ranks run.
            reasons: add the variables, and why some keys have no effect.
        """
        settings, launched = self.settings, self.launched
        ranks = self.per_machine * self.machines
        where = f"{self.machines} machines × {self.per_machine}" if self.machines > 1 else "this machine"
        number = f"{ranks} on {where}"
        if self.least_machines:
            number = f"{self.least_machines * self.per_machine} to {ranks} on {self.least_machines} to {where}"
        source = f"{settings.source}{settings.origin and f' ({settings.origin})'}"
        found = [("file", source if settings.source else "none: flags and defaults")]
        found += [("read as", note) for note in settings.notes]
        if settings.variables:
            found += [("environment", ", ".join(settings.variables))]
        found += [("ranks", f"{number}, {self.accelerator}, {self.threads} thread{'s' * (self.threads > 1)} each")]
        found += self._meeting_lines()
        strategy = launched.strategy or ("ddp" if ranks > 1 else "one rank")
        found += [
            ("strategy", f"{strategy}{_listed(launched.options)}, precision {launched.precision or 'of the script'}")
        ]
        others = self._others()
        if others:
            found += [("also", ", ".join(others))]
        found += [("beware", words) for words in self.caveats]
        unused = settings.without_effect()
        if unused and not reasons:
            found += [("no effect", f"{', '.join(name for name, _ in unused)} (--dry-run says why)")]
        found += [("no effect", f"{name}: {why}") for name, why in unused if reasons]
        variables = sorted(self.variables().items()) if reasons else []
        found += [("variable", f"{name}={masked_value(name, value)}") for name, value in variables]
        return "\n".join(f"{name:<11} {value}" for name, value in [*found, ("command", command)])

    def _meeting_lines(self) -> list[tuple[str, str]]:
        if self.rank is not None:
            return [("started by", f"srun, one task for each rank; this is rank {self.rank.rank}")]
        if self.machines == 1:
            return []
        which = "numbered there" if self.machine_rank is None else f"machine {self.machine_rank}"
        if self.least_machines:
            which = "the main machine" if self.machine_rank == 0 else "one that may come and go"
            which = "numbered there" if self.machine_rank is None else which
        return [("meeting", f"{self.backend} at {self.address}:{self.port}, this is {which}")]

    def _others(self) -> list[str]:
        launched = self.launched
        found = [f"up to {self.max_restarts} restart{'s' * (self.max_restarts > 1)}"] if self.max_restarts else []
        found += [f"accumulation {launched.accumulate_grad_batches}"] if launched.accumulate_grad_batches else []
        found += [f"clipping {launched.gradient_clip_val}"] if launched.gradient_clip_val else []
        found += [f"fp8{_listed(launched.fp8)}"] if launched.fp8 else []
        found += [f"torch.compile{_listed(launched.compile)}"] if launched.compile else []
        found += [f"GPUs {self.settings.get('gpu_ids')}"] if "CUDA_VISIBLE_DEVICES" in self.variables() else []
        found += ["resume auto"] if launched.resume else []
        found += [f"hang_timeout {launched.hang_timeout or 'no'}"] if launched.hang_timeout is not None else []
        found += ["CPUs bound to GPUs"] if self.binds_cpus else []
        return found + (["debug checks"] if launched.debug else [])

    @property
    def binds_cpus(self) -> bool:
        """True if each rank is bound to the CPUs near its GPU (NUMA)."""
        return bool(self.settings.get("enable_cpu_affinity", False)) and is_gpu(self.accelerator)


def _listed(values: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{name} {value}' for name, value in values.items())})" if values else ""


def resolve(settings: Settings, elastic: ElasticOptions, machine: Machine, environ: Mapping[str, str]) -> LaunchPlan:
    """Makes the plan of a launch.

    Args:
        settings: flags over the file.
        elastic: options of torch's elastic agent.
        machine: the hardware of this machine.
        environ: the environment.

    Raises:
        ConfigurationError: if the settings are impossible here; names the fix.
    """
    _check_pod(settings)
    accelerator = _accelerator(settings, machine)
    task = _slurm_task(settings, environ)
    rank = task if task is not None and task.local_world_size > 1 else None
    wanted = settings.get("num_machines", 1)
    least = int(getattr(wanted, "least", 0))
    if least and task is not None:
        raise ConfigurationError(
            f"num_machines: {least}:{wanted} is a range, and srun starts a fixed number of tasks: leave it out. After "
            "a failure, SLURM requeues the job (#SBATCH --requeue)."
        )
    machines = int(wanted) if task is None else task.num_nodes
    if rank is not None:
        _check_rank(settings, rank)
        per_machine = rank.local_world_size
        meeting: Meeting = (rank.node_rank, *(rank.address or ("", 0)), "static")
    else:
        per_machine = _per_machine(settings, machine, accelerator, machines)
        meeting = _meeting(settings, elastic, machines, task, is_range=least > 0)
    return LaunchPlan(
        settings,
        elastic,
        accelerator,
        per_machine,
        machines,
        *meeting,
        _threads(settings, machine, per_machine, environ),
        _launched(settings, accelerator, per_machine * machines),
        _caveats(settings, machine, accelerator, is_range=least > 0),
        rank,
        least,
    )


def _caveats(settings: Settings, machine: Machine, accelerator: str, is_range: bool) -> tuple[str, ...]:
    if machine.supposed:
        return (NOT_HERE,)
    chosen, found = settings.get("gpu_ids", "all"), []
    if accelerator == "cpu" and chosen != "all":
        found.append(f"gpu_ids: {chosen} has no effect: ranks run on the CPU")
    if is_range and settings.get("resume") != "auto":
        found.append("without --resume auto, a script that does not resume by itself starts over when machines change")
    return tuple(found)


def _check_rank(settings: Settings, task: RankEnvironment) -> None:
    """Raises for settings that cannot apply to an srun task that is itself a rank."""
    wanted = settings.get("num_processes", -1)
    if wanted not in (-1, task.world_size):
        raise ConfigurationError(
            f"srun started {task.world_size} tasks, one for each rank, and num_processes is {wanted}: leave it out, or "
            "start one task on each machine (srun --ntasks-per-node=1)."
        )
    if settings.get("max_restarts", 0):
        raise ConfigurationError(
            "max_restarts needs an agent on each machine: start one task there (srun --ntasks-per-node=1)."
        )


def _tpu_variables(settings: Settings) -> dict[str, str]:
    """Returns the environment variables in `tpu_env`.

    Raises:
        ConfigurationError: for an entry that is not NAME=value.
    """
    if settings.kind != "XLA":
        return {}
    found = {}
    for entry in settings.get("tpu_env") or []:
        name, equals, value = str(entry).partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigurationError(f"tpu_env: {entry!r} sets no variable: give NAME=value.")
        found[name.strip()] = value
    return found


def _check_pod(settings: Settings) -> None:
    """Raises if the settings request a whole pod, whose hosts only Google's own tool reaches. Shows the command."""
    if settings.kind != "XLA" or not settings.get("tpu_use_cluster", False):
        return
    name, zone = settings.get("tpu_name") or "NAME", settings.get("tpu_zone")
    on_host = ["sudo"] * bool(settings.get("tpu_use_sudo", False)) + ["leyden", "launch", "--tpu", "SCRIPT"]
    command = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", str(name), *(["--zone", str(zone)] if zone else [])]
    raise ConfigurationError(
        "tpu_use_cluster: only Google's own tool reaches the hosts of a pod: start all of them with "
        f"`{shlex.join([*command, '--worker=all', '--command', shlex.join(on_host)])}`, and set tpu_use_cluster: false "
        "in the file that the hosts read."
    )


def _accelerator(settings: Settings, machine: Machine) -> str:
    if settings.kind == "XLA":
        return "xla"
    if settings.get("use_cpu", False) or settings.kind == "MULTI_CPU":
        return "cpu"
    own = f"MULTI_{machine.kind.upper()}" if machine.gpus else ""
    if settings.kind.startswith("MULTI_") and settings.kind not in ("MULTI_GPU", own):
        raise ConfigurationError(
            f"distributed_type: {settings.kind}: torch sees no such device on this machine: use MULTI_GPU or MULTI_CPU."
        )
    if wants_gpus(settings) and not machine.gpus:
        raise ConfigurationError(
            f"distributed_type: {settings.kind}{', use_cpu: false' * (settings.kind != 'MULTI_GPU')}, and torch sees "
            "no GPU on this machine: add --cpu, or look at `leyden env`. --dry-run shows the plan for a machine that "
            "has them."
        )
    return machine.kind if machine.gpus else "cpu"


def is_gpu(accelerator: str) -> bool:
    """Returns True for a type of GPU, and False for the CPU and for XLA."""
    return accelerator not in ("cpu", "xla")


def wants_gpus(settings: Settings) -> bool:
    """Returns True if the settings ask for GPUs. Types that also run on CPUs do so with `use_cpu: false`."""
    if settings.get("use_cpu", False):
        return False
    of_gpus = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    return settings.kind == "MULTI_GPU" or (settings.kind in of_gpus and settings.get("use_cpu") is False)


def planned_for(settings: Settings, machine: Machine) -> Machine:
    """Returns the machine to plan for in a dry run: this one, or one with the requested GPUs if this one has none.

    Raises:
        ConfigurationError: if the settings do not say how many GPUs the machine has.
    """
    if machine.gpus or not wants_gpus(settings):
        return machine
    chosen, machines = settings.get("gpu_ids", "all"), int(settings.get("num_machines", 1))
    ranks = int(settings.get("num_processes", -1))
    gpus = ranks // machines if ranks > 0 else 0 if chosen == "all" else len(chosen.split(","))
    if not gpus:
        raise ConfigurationError(
            "the plan is for a machine with GPUs, and nothing says how many: add --num_processes, or --cpu."
        )
    return replace(machine, gpus=gpus, supposed=True)


def _slurm_task(settings: Settings, environ: Mapping[str, str]) -> RankEnvironment | None:
    """Returns the rank of this srun task, or None outside of srun."""
    bare = {name: value for name, value in environ.items() if name.startswith("SLURM_")}
    given = {"MASTER_ADDR": settings.get("main_process_ip"), "MASTER_PORT": settings.get("main_process_port")}
    task = rank_environment({**bare, **{name: str(value) for name, value in given.items() if value is not None}})
    if task is None and settings.get("compute_environment") == "SLURM" and "SLURM_STEP_ID" not in environ:
        raise ConfigurationError(
            "compute_environment: SLURM, and srun did not start this process: use `srun --ntasks-per-node=1 leyden "
            "launch …`, or a file for this machine."
        )
    return task


def _per_machine(settings: Settings, machine: Machine, accelerator: str, machines: int) -> int:
    """Returns the number of ranks on this machine."""
    chosen = settings.get("gpu_ids", "all")
    gpus = machine.gpus if chosen == "all" else len(chosen.split(","))
    if is_gpu(accelerator) and gpus > machine.gpus:
        raise ConfigurationError(f"gpu_ids: {chosen} names {gpus} GPUs, and this machine has {machine.gpus}.")
    total = settings.get("num_processes", -1)
    if total == 0:
        raise ConfigurationError("num_processes: 0 starts nothing: give a number from 1, or leave it out.")
    if total == -1:
        return gpus if is_gpu(accelerator) else 1
    if total % machines:
        raise ConfigurationError(
            f"num_processes: {total} is the number of ranks on all {machines} machines: give a multiple of {machines}."
        )
    per_machine = int(total) // machines
    if is_gpu(accelerator) and per_machine > gpus:
        raise ConfigurationError(
            f"num_processes: {per_machine} ranks on this machine, which has {gpus} GPU{'s' * (gpus != 1)} to use: give "
            f"{gpus * machines}, or add --cpu."
        )
    return per_machine


def _meeting(
    settings: Settings, elastic: ElasticOptions, machines: int, task: RankEnvironment | None, is_range: bool
) -> Meeting:
    """Returns where and how the machines meet."""
    backend = settings.get("rdzv_backend")
    if backend not in (None, "static", "c10d", "etcd", "etcd-v2"):
        raise ConfigurationError(f"rdzv_backend: {backend!r} is not known: use static or c10d.")
    if machines == 1 and elastic.endpoint is None:
        return 0, "localhost", int(settings.get("main_process_port", 0)), "c10d"
    if is_range and backend not in (None, "c10d"):
        raise ConfigurationError(f"rdzv_backend: {backend}: a range of machines needs c10d: leave rdzv_backend out.")
    for name, value in elastic.rdzv_conf.items() if is_range else ():
        if name.endswith(("_timeout", "_interval", "_attempt")) and not (value.isdecimal() and int(value)):
            raise ConfigurationError(f"--rdzv_conf {name}={value}: give a whole number from 1.")
    # A static rendezvous hands stale addresses to restarted ranks.
    repeats = elastic.endpoint or settings.get("max_restarts", 0) or is_range
    backend = backend or ("c10d" if repeats else "static")
    if backend == "static" and settings.get("max_restarts", 0):
        raise ConfigurationError("max_restarts needs a rendezvous that can be repeated: use rdzv_backend: c10d.")
    rank = settings.get("machine_rank") if task is None else task.node_rank
    if elastic.endpoint is not None:
        if backend == "static":
            raise ConfigurationError(
                "--rdzv_endpoint belongs to c10d: leave rdzv_backend out, or give --main_process_ip."
            )
        return rank, *_host_and_port(elastic.endpoint), backend
    if task is not None and task.address is not None:
        return rank, *task.address, backend
    address = settings.get("main_process_ip")
    missing = [name for name, value in (("machine_rank", rank), ("main_process_ip", address)) if value is None]
    if missing:
        raise ConfigurationError(
            f"{machines} machines, but no {' and no '.join(missing)}: give --machine_rank (0 to {machines - 1}) and "
            "--main_process_ip (of machine 0) on each machine, or --rdzv_endpoint host:port."
        )
    if rank >= machines and not is_range:
        raise ConfigurationError(
            f"machine_rank: {rank} is out of range for {machines} machines: give 0 to {machines - 1}."
        )
    return rank, str(address), int(settings.get("main_process_port", PORT)), backend


def _host_and_port(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port[:6]) <= 65535:
        raise ConfigurationError(f"--rdzv_endpoint {endpoint}: give host:port, such as 10.0.0.1:29500.")
    return address, int(port)


def _threads(settings: Settings, machine: Machine, per_machine: int, environ: Mapping[str, str]) -> int:
    """Returns the CPU threads per rank: the requested number, or else an equal share of the machine's CPUs."""
    asked = settings.get("num_cpu_threads_per_process") or environ.get("OMP_NUM_THREADS")
    return int(asked) if asked else max(1, machine.cpus // per_machine)


def _launched(settings: Settings, accelerator: str, ranks: int) -> LaunchSettings:
    """Returns the settings that the script receives."""
    choice = chosen_strategy(settings, ranks)
    # DeepSpeed's own file fills in what ours leaves open.
    wanted = settings.precision if settings.precision != "no" else choice.precision or "no"
    compiled = {
        name.removeprefix("dynamo_").removeprefix("use_"): value
        for name, value in settings.effective("dynamo_config").items()
    }
    if compiled.get("backend", "no") == "no":
        compiled = {}
    precision = PRECISIONS.get(wanted)
    return LaunchSettings(
        str(settings.source or "flags"),
        accelerator=None if is_gpu(accelerator) else accelerator,
        strategy=choice.strategy,
        options=choice.options,
        precision=precision,
        accumulate_grad_batches=choice.steps,
        gradient_clip_val=choice.norm,
        compile=compiled,
        fp8=_fp8(settings) if precision == "fp8" else {},
        debug=bool(settings.get("debug", False)),
        resume="auto" if settings.get("resume") == "auto" else None,
        hang_timeout=_hang_timeout(settings.get("hang_timeout")),
    )


def _hang_timeout(value: Any) -> float | str | bool | None:
    """Reads `hang_timeout`: None if it is not set, False for no watchdog."""
    if value is None:
        return None
    text = str(value).lower()
    if text in NO:
        return False
    try:
        return hang_limit("auto" if text == "auto" else float(text))
    except (ValueError, ConfigurationError):
        raise ConfigurationError(
            f"hang_timeout: {value} is not a limit: give a positive number of seconds, auto, or no."
        ) from None


def _fp8(settings: Settings) -> dict[str, Any]:
    """Returns the fp8 recipe, without keys that have no effect."""
    section = settings.section("fp8_config")
    if not section:
        return {}
    from leyden.strategies.precision.fp8_config import backend_of

    backend_of(section)  # refuses MS-AMP before the launch
    unused = {key.name for key in FP8 if key.without}
    return {name: value for name, value in settings.effective("fp8_config").items() if name not in unused}
