"""`leyden config` asks for the settings that it cannot detect, and writes the answers to a file."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from leyden.cli.settings.keys import KEYS, SECTIONS, ConfigKey
from leyden.cli.settings.machine import Machine, this_machine
from leyden.cli.settings.settings import Settings, default_file, read_file, write_file
from leyden.core.errors import ConfigurationError
from leyden.core.paths import local_path
from leyden.core.text import aligned

SPREADS = {
    "ddp": "every rank holds the whole model",
    "fsdp": "parameters are sharded over the ranks",
    "deepspeed": "DeepSpeed's ZeRO",
    "parallel": "layers are split (tensor parallel), sequences or experts divided, within FSDP or replicas",
    "megatron": "layers are split, and blocks divided into stages, by Megatron-LM's settings",
}
BACKENDS = ("inductor", "eager", "aot_eager", "cudagraphs")
"""Backends that every build of torch has. A file may name others."""
PORT = dataclasses.replace(KEYS["main_process_port"], least=1)
WITHOUT_REPLICAS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
KINDS = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
AXES = {
    "tp": "Ranks that split each layer (tensor parallel)",
    "cp": "Ranks that divide each sequence (context parallel)",
    "dp_shard": "Ranks that shard the parameters",
    "dp_replicate": "Replicas of the model",
}


class Wizard:
    """Asks the questions in order. Nothing is written before the last answer.

    Args:
        machine: the hardware, which is not asked about.
        before: an earlier file, whose answers are the defaults.
    """

    def __init__(self, machine: Machine, before: Settings) -> None:
        self.machine = machine
        self.before = before
        self.values: dict[str, Any] = {}
        self.sections: dict[str, dict[str, Any]] = {}
        self.on_gpus = False

    def run(self) -> Settings:
        """Asks all questions and returns the answers as settings."""
        self._place()
        self._devices()
        self._machines()
        self._ranks()
        self._spread()
        if self.values["num_processes"] != 1:
            self._ask("debug", False, "Check the operands of each collective (slower)")
        self._compile()
        if self.on_gpus and (self.machine.numa_nodes != 1 or self.values.get("num_machines", 1) > 1):
            self._ask("enable_cpu_affinity", False, "Bind each rank to the CPUs beside its GPU")
        self._precision()
        return Settings(self.values, self.sections)

    # one question -----------------------------------------------------------------------------------------------------
    def _ask(
        self,
        name: str,
        default: Any,
        text: str = "",
        check: Callable[[Any], Any] | None = None,
        choices: tuple[str, ...] = (),
    ) -> Any:
        """Asks for the value of one key of the file until it is valid.

        Args:
            name: of the key.
            default: the answer, unless an earlier file has another one.
            text: the question; what the key does if left out.
            check: reads the answer in place of the key.
            choices: those of the key that are offered; all if left out.
        """
        key, section = KEYS[name], SECTIONS.get(name, "")
        if choices:
            key = dataclasses.replace(key, kind=choices)
        earlier = self.before.section(section).get(name) if section else self.before.get(name)
        # An earlier answer that is invalid on this machine is ignored.
        with contextlib.suppress(ConfigurationError):
            default = default if earlier is None else (check or key.read)(earlier)
        text = text or key.help[:1].upper() + key.help[1:]
        if isinstance(key.kind, tuple) and check is None:
            # Accelerate numbers these from 1, and all other choices from 0.
            text, check = numbered(text, key, 1 if name == "fsdp_sharding_strategy" else 0)
        value = ask(text, default, check or key.read)
        (self.sections.setdefault(section, {}) if section else self.values)[name] = value
        return value

    # the questions ----------------------------------------------------------------------------------------------------
    def _place(self) -> None:
        self.values["compute_environment"] = "LOCAL_MACHINE"
        if self.machine.slurm:
            text = "Where do ranks run: on this machine, or on the machines of a SLURM job"
            self._ask("compute_environment", "SLURM", text)

    def _devices(self) -> None:
        self.on_gpus = self.machine.gpus > 0
        if self.on_gpus:
            earlier = "cpu" if self.before.get("use_cpu", False) else "gpu"
            self.on_gpus = choose("Run on", {"gpu": "", "cpu": ""}, earlier) == "gpu"
        self.values["use_cpu"] = not self.on_gpus
        if self.on_gpus and self.machine.gpus > 1:
            text = f"GPUs to use: all, or some of 0 to {self.machine.gpus - 1}, such as 0,1"
            self._ask("gpu_ids", "all", text, lambda value: gpu_numbers(value, self.machine.gpus))

    def _machines(self) -> None:
        if self.values["compute_environment"] == "SLURM":
            return
        count = self._ask("num_machines", 1, "How many machines")
        if count == 1:
            return
        self._ask("machine_rank", 0, f"Which of them is this, from 0 to {count - 1}", self._rank)
        self._ask("main_process_ip", None, check=address)
        self._ask("main_process_port", 29500, "Port of machine 0", PORT.read)

    def _rank(self, value: Any) -> int:
        rank, count = int(KEYS["machine_rank"].read(value)), int(self.values["num_machines"])
        if rank >= count:
            raise ConfigurationError(
                f"machine_rank: {rank} is out of range for {count} machines: give 0 to {count - 1}."
            )
        return rank

    def _ranks(self) -> None:
        """Asks for the number of ranks, unless it is the number of GPUs of this machine."""
        machines = self.values.get("num_machines", 1)
        slurm = self.values["compute_environment"] == "SLURM"
        chosen = self.values.get("gpu_ids", "all")
        gpus = self.machine.gpus if chosen == "all" else len(chosen.split(","))
        if slurm:
            # srun or the number of GPUs decides.
            self.values["num_processes"] = -1
        elif self.on_gpus and machines == 1:
            self.values["num_processes"] = gpus
        else:
            default = gpus if self.on_gpus else 1
            earlier = self.before.get("num_processes", -1)
            default = earlier // machines if earlier >= machines else default
            each = ConfigKey("ranks", int, least=1)
            text = "How many ranks" + (" on each machine" if machines > 1 else "")
            self.values["num_processes"] = machines * int(ask(text, default, each.read))
        several = self.values["num_processes"] != 1
        kind = "MULTI_GPU" if self.on_gpus else "MULTI_CPU"
        self.values["distributed_type"] = kind if several else "NO"

    def _spread(self) -> None:
        """Asks how the model is distributed over ranks; a single GPU may still use DeepSpeed's offloading."""
        if self.values["num_processes"] == 1 and not self.on_gpus:
            return
        earlier = KINDS.get(self.before.kind, "parallel" if self.before.section("parallelism_config") else "ddp")
        choices = SPREADS
        if self.values["num_processes"] == 1:
            choices = {"ddp": "one rank, nothing to distribute", "deepspeed": "DeepSpeed, for its offloading"}
        spread = choose("How is the model distributed", choices, earlier if earlier in choices else "ddp")
        if spread == "fsdp":
            self._fsdp()
        elif spread == "deepspeed":
            self._deepspeed()
        elif spread == "parallel":
            self._parallel()
        elif spread == "megatron":
            self._megatron()

    def _fsdp(self) -> None:
        self.values["distributed_type"] = "FSDP"
        ranks = self.values["num_processes"]
        # Hybrid sharding needs at least two replicas of two ranks.
        choices = () if ranks < 0 or (ranks >= 4 and ranks % 2 == 0) else WITHOUT_REPLICAS
        self._ask("fsdp_sharding_strategy", "FULL_SHARD", "What is sharded", choices=choices)
        policy = self._ask("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "How are modules grouped")
        if policy == "TRANSFORMER_BASED_WRAP":
            text = "Classes of the blocks to group, separated by commas (auto: the repeated block of the model)"
            if self._ask("fsdp_transformer_layer_cls_to_wrap", "auto", text) == "auto":
                del self.sections["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
        elif policy == "SIZE_BASED_WRAP":
            self._ask("fsdp_min_num_params", 100_000_000, "Minimum parameters per group")
        self._ask("fsdp_offload_params", False)
        self._ask("fsdp_activation_checkpointing", False)

    def _deepspeed(self) -> None:
        self.values["distributed_type"] = "DEEPSPEED"
        text = "DeepSpeed's own JSON file (none: answer questions)"
        file = self._ask("deepspeed_config_file", "none", text, existing_file)
        if file != "none":
            return
        del self.sections["deepspeed_config"]["deepspeed_config_file"]
        text = "ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters"
        stage = self._ask("zero_stage", 2, text)
        self._ask("gradient_accumulation_steps", 1, check=batches)
        self._ask("gradient_clipping", "none", "Largest norm of the gradients (none: no clipping)", norm)
        if stage >= 2:
            device = self._ask("offload_optimizer_device", "none", "Where is optimizer state offloaded to")
            if device == "nvme":
                self._ask("offload_optimizer_nvme_path", "/nvme", "Folder on that disk")
        if stage == 3:
            device = self._ask("offload_param_device", "none", "Where are parameters offloaded to")
            if device == "nvme":
                self._ask("offload_param_nvme_path", "/nvme", "Folder on that disk")
            self._ask("zero3_init_flag", True, "Build the model sharded (zero.Init)")
            self._ask("zero3_save_16bit_model", False, "Also save 16-bit weights of the whole model")

    def _parallel(self) -> None:
        """Asks for the sizes of the axes until their product is the number of ranks."""
        ranks = self.values["num_processes"]
        while True:
            product = 1
            for axis, text in AXES.items():
                last = axis == "dp_replicate" and ranks > 0 and ranks % product == 0
                default = ranks // product if last else 1
                product *= self._ask(f"parallelism_config_{axis}_size", default, text)
            if ranks < 0 or product == ranks:
                break
            click.echo(f"Error: these make {product} ranks, and there are {ranks}: their product must be {ranks}.")
        sizes = self.sections["parallelism_config"]
        shards = sizes["parallelism_config_dp_shard_size"] * sizes["parallelism_config_cp_size"]
        if shards > 1:
            text = f"Of the {shards} ranks that shard, how many divide the experts of a mixture (expert parallel)"
            self._ask("parallelism_config_ep_size", 1, text, lambda value: part_of(shards, value))

    def _megatron(self) -> None:
        self.values["distributed_type"] = "MEGATRON_LM"
        self._ask("megatron_lm_tp_degree", 1, "Ranks that split each layer")
        stages = self._ask("megatron_lm_pp_degree", 1, "Stages of the pipeline")
        if stages > 1:
            self._ask("megatron_lm_num_micro_batches", stages, "Micro-batches per batch")
        self._ask("megatron_lm_recompute_activations", False)
        self._ask("megatron_lm_use_distributed_optimizer", False)
        self._ask("megatron_lm_gradient_clipping", 1.0)

    def _compile(self) -> None:
        earlier = self.before.section("dynamo_config").get("dynamo_backend", "no") != "no"
        if not ask("Compile the model (torch.compile)", earlier, ConfigKey("compile", bool).read):
            return
        self._ask("dynamo_backend", "inductor", "Which backend", choices=BACKENDS)
        self._ask("dynamo_mode", "default", "Mode")
        self._ask("dynamo_use_fullgraph", False, "Raise on graph breaks")
        self._ask("dynamo_use_dynamic", False)

    def _precision(self) -> None:
        """Asks for one of the precisions that the machine supports."""
        choices = ["no", "bf16"]
        if self.on_gpus:
            choices = ["no", "fp16", *(["bf16"] if self.machine.bf16 else []), *(["fp8"] if self.machine.fp8 else [])]
        self._ask("mixed_precision", "no", "Mixed precision", choices=tuple(choices))


def ask(text: str, default: Any, read: Callable[[Any], Any]) -> Any:
    """Asks until the answer is valid. An empty answer means the default in brackets."""

    def checked(answer: Any) -> Any:
        try:
            return read(answer.strip() if isinstance(answer, str) else answer)
        except ConfigurationError as error:
            # The question did not name the key, so the error does not either.
            reason = str(error).partition(": ")[2] or str(error)
            if sys.stdin.isatty():
                raise click.UsageError(reason) from None
            # Asking again would take the next question's answer.
            raise ConfigurationError(f"the answer to {text!r}: {reason}") from None

    shown = ("yes" if default else "no") if isinstance(default, bool) else default
    try:
        return click.prompt(text, default=shown, value_proc=checked, err=False)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise ConfigurationError(
            f"config asks {text!r}, and the input has no answer to it. Pipe one answer per line (an empty line takes "
            "the default), use a terminal, or use `leyden config default`."
        ) from None


def numbered(text: str, key: ConfigKey, first: int) -> tuple[str, Callable[[Any], Any]]:
    """Prints the choices with numbers. Returns the question, and a function that accepts a number or a name."""
    assert isinstance(key.kind, tuple)
    by_number = {str(number): name for number, name in enumerate(key.kind, first)}
    click.echo("  " + "   ".join(f"{number} {name}" for number, name in by_number.items()))
    return f"{text} ({', '.join(key.kind)})", lambda answer: key.read(by_number.get(str(answer), answer))


def choose(text: str, choices: dict[str, str], default: str) -> str:
    """Asks for one of several choices, by name or number, and explains each."""
    meanings = [(name, meaning) for name, meaning in choices.items() if meaning]
    for row in aligned(meanings) if meanings else ():
        click.echo(f"  {row}")
    question, read = numbered(text, ConfigKey("answer", tuple(choices)), 0)
    return str(ask(question, default, read))


def gpu_numbers(value: Any, count: int) -> str:
    """Checks GPU numbers and returns them in the file's format: "all", or separated by commas."""
    text = str(value).replace(" ", "").lower()
    if text == "all":
        return text
    numbers = text.split(",")
    if not all(part.isdigit() for part in numbers) or len(set(numbers)) < len(numbers):
        raise ConfigurationError(
            f"gpu_ids: {value!r} is not a list of GPUs: give all, or each number once, such as 0,1."
        )
    missing = [part for part in numbers if int(part) >= count]
    if missing:
        raise ConfigurationError(f"gpu_ids: there is no GPU {missing[0]}: this machine has 0 to {count - 1}.")
    return text


def address(value: Any) -> str:
    """Checks a host's name or IP address."""
    text = str(value)
    if not text or any(letter.isspace() or letter in "/,;" for letter in text):
        raise ConfigurationError(
            f"main_process_ip: {text!r} is not an address: give a host name or an IP address, such as 10.0.0.1."
        )
    return text


def batches(value: Any) -> Any:
    return value if value == "auto" else ConfigKey("gradient_accumulation_steps", int, least=1).read(value)


def norm(value: Any) -> Any:
    if value == "auto" or str(value).lower() == "none":
        return value if value == "auto" else None
    return ConfigKey("gradient_clipping", float, least=0).read(value)


def part_of(shards: int, value: Any) -> int:
    ranks = int(KEYS["parallelism_config_ep_size"].read(value))
    if shards % ranks:
        raise ConfigurationError(f"parallelism_config_ep_size: {ranks} does not divide {shards}: give a divisor.")
    return ranks


def existing_file(value: Any) -> str:
    text = str(value)
    if text.lower() == "none":
        return "none"
    if not Path(text).expanduser().is_file():
        raise ConfigurationError(f"deepspeed_config_file: there is no file {text}: give its path, or none.")
    return text


# the command ----------------------------------------------------------------------------------------------------------
FILE_OPTION = click.option(
    "--config_file", "file", type=click.Path(dir_okay=False), help="Where to write; by default the default file."
)


@click.group("config", invoke_without_command=True)
@FILE_OPTION
@click.option("--gpus", type=click.IntRange(0), help="Answer for a machine with this many GPUs.")
@click.pass_context
def command(ctx: click.Context, file: str | None, gpus: int | None) -> None:
    """Ask how to run on this machine, and save the answers to a file that `leyden launch` reads.

    Defaults are in brackets. Settings that can be detected are not asked.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = file
        return
    path = Path(local_path(file, "config_file")) if file else default_file()
    machine = this_machine()
    if gpus is not None:
        machine = dataclasses.replace(machine, gpus=gpus, bf16=gpus > 0, fp8=gpus > 0, numa_nodes=0)
    before = read_file(path) if path.is_file() else Settings()
    if before.source is not None:
        click.echo(f"The answers in {path} are the defaults.")
    _written(write_file(Wizard(machine, before).run(), path))


@command.command("default")
@FILE_OPTION
@click.option("--mixed_precision", type=click.Choice(["no", "fp16", "bf16", "fp8"]), default="no", show_default=True)
@click.pass_obj
def default(above: str | None, file: str | None, mixed_precision: str) -> None:
    """Write the file without asking: all GPUs of this machine, or one CPU rank."""
    machine = this_machine()
    kind = "MULTI_GPU" if machine.gpus > 1 else "NO"
    values: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind}
    values |= {"mixed_precision": mixed_precision, "use_cpu": not machine.gpus, "debug": False}
    values |= {"num_processes": max(1, machine.gpus), "num_machines": 1, "machine_rank": 0}
    path = Path(file or above or default_file())
    if path.exists():
        raise ConfigurationError(f"{path} exists already: remove it first, or choose --config_file.")
    _written(write_file(Settings(values), path))


@command.command("update")
@FILE_OPTION
@click.pass_obj
def update(above: str | None, file: str | None) -> None:
    """Rewrite an older file, or one of Accelerate, with the current keys."""
    path = Path(file or above or default_file())
    settings = read_file(path)
    for note in settings.notes:
        click.echo(note)
    for name, why in settings.without_effect():
        click.echo(f"{name} has no effect here: {why}")
    _written(write_file(settings, path))


def _written(path: Path) -> None:
    file = "" if path == default_file() else f" --config_file {path}"
    click.echo(f"Written to {path}. Look at the plan with: leyden launch --dry-run{file} SCRIPT")
