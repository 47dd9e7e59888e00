"""`leyden launch` starts ranks from flags, the configuration file and defaults; `leyden test` runs a trial on them."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from typing import Any

import click

from leyden.checkpoint.format.secrets import masked_words
from leyden.cli.configuration import stages
from leyden.cli.launch import agent, preflight
from leyden.cli.launch.cluster_variables import pairs, read_key, with_cluster
from leyden.cli.launch.plan import ElasticOptions, LaunchPlan, planned_for, resolve
from leyden.cli.settings.keys import FAMILIES, KEYS, SECTIONS, TOP, ConfigKey, read_section
from leyden.cli.settings.machine import this_machine
from leyden.cli.settings.settings import Settings, found_file, read_file
from leyden.core.errors import ConfigurationError
from leyden.launch.processes import temporary

KINDS = {
    "multi_gpu": ("MULTI_GPU", "Use the GPUs of this machine."),
    "use_fsdp": ("FSDP", "Shard the model with FSDP."),
    "use_deepspeed": ("DEEPSPEED", "Shard with DeepSpeed."),
    "use_megatron_lm": ("MEGATRON_LM", "Use Megatron-LM."),
    "tpu": ("XLA", "Run on TPUs with XLA."),
}
"""Flags that set distributed_type, each with the value and its help."""
TORCHRUN = {
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
"""torchrun's names of flags."""
TITLES = {
    "fsdp_config": "FSDP",
    "deepspeed_config": "DeepSpeed",
    "parallelism_config": "The mesh of ranks: replicas, FSDP, layers, sequences, experts",
    "megatron_lm_config": "Megatron-LM",
    "fp8_config": "fp8",
    "dynamo_config": "torch.compile",
}
"""Sections of the file, as the help names them."""


class KeyType(click.ParamType):  # type: ignore[type-arg]
    """Parses a flag's value in the same way as in the file: "False" is false."""

    def __init__(self, key: ConfigKey) -> None:
        self.key = key
        self.name = "text"
        if isinstance(key.kind, type):
            self.name = {bool: "true|false", int: "number", float: "number"}.get(key.kind, "text")

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.key.kind)}]" if isinstance(self.key.kind, tuple) else self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            if self.key.name == "num_machines":
                return read_key("num_machines", "num_machines", value)
            return read_section((self.key,), {self.key.name: value})[self.key.name]
        except ConfigurationError as error:
            self.fail(str(error).partition(": ")[2], param, ctx)


class Launch(click.Command):
    """A command whose help groups the flags of keys by the section of the file."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(_group(str(param.name)), []).append(record)
        for name, rows in groups.items():
            with formatter.section(name):
                formatter.write_dl(rows)


def _group(name: str) -> str:
    """Returns the title under which the help lists a parameter."""
    if name not in KEYS:
        return "Options"
    if KEYS[name].without:
        return "Without effect here"
    return TITLES[SECTIONS[name]] if name in SECTIONS else "The same keys as in the file"


def _flag(key: ConfigKey) -> click.Option:
    name, help = key.flag or key.name, key.help or key.without
    if not key.name.startswith(tuple(name.removesuffix("config") for name in FAMILIES)) and key.kind is bool:
        return click.Option([f"--{name}/--no_{name}", key.name], default=None, help=help)
    other = [f"--{other}" for other in key.older if other.startswith(("fsdp_", "fp8_", "megatron_lm_"))]
    other += [f"--{TORCHRUN[name]}"] if name in TORCHRUN else []
    return click.Option([f"--{name}", *other, key.name], type=KeyType(key), help=help)


def _switch(name: str, help: str) -> click.Option:
    return click.Option([f"--{name}"], is_flag=True, default=False, help=help)


OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--config_file", "file"],
        help="Read this file, Leyden's or Accelerate's; by default Leyden's default file, else Accelerate's.",
    ),
    _switch("dry_run", "Show the plan and start nothing."),
    click.Option(["-q", "--quiet"], is_flag=True, help="Do not show the plan."),
    click.Option(["-m", "--module"], is_flag=True, help="SCRIPT is a module, as for python -m."),
    _switch("no_python", "SCRIPT is an executable, not run by Python."),
    *(_switch(name, help) for name, (_, help) in KINDS.items()),
    _switch("use_parallelism_config", "Has no effect: the sizes of the axes decide."),
    click.Option(
        ["--nproc_per_node"],
        metavar="number|auto|cpu|gpu",
        help="Ranks on each machine, as for torchrun: auto takes its GPUs, else its CPUs.",
    ),
    click.Option(
        ["--rdzv_endpoint", "endpoint"], metavar="HOST:PORT", help="Where machines meet, instead of at a main machine."
    ),
    click.Option(["--rdzv_id"], help="Name of the rendezvous, if several jobs share an endpoint."),
    click.Option(
        ["--rdzv_conf"],
        default="",
        metavar="KEY=VALUE,…",
        callback=lambda ctx, param, text: pairs("--rdzv_conf", text),
        help="Further settings of the rendezvous.",
    ),
    click.Option(
        ["--monitor_interval"],
        type=click.FloatRange(0.01),
        default=0.1,
        show_default=True,
        help="Seconds between two checks of the ranks.",
    ),
    click.Option(
        ["--log_dir"], type=click.Path(file_okay=False), help="Also write the output of each rank to files here."
    ),
    click.Option(
        ["--tee"],
        metavar="[0|1|2|3]",
        help="What is written there: 1 stdout, 2 stderr, 3 both, 0 only errors; or by local rank, such as 0:3,1:0.",
    ),
    click.Option(["--role"], default="default", help="Name of the ranks in the logs."),
    click.Option(
        ["--preflight_timeout"],
        type=click.FloatRange(0),
        default=300.0,
        show_default=True,
        help="Seconds to wait for the other machines before the start; 0 skips the check.",
    ),
    *(_flag(key) for key in KEYS.values() if key.flag != ""),
    click.Argument(["script"]),
    click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED),
]


def run(
    *,
    script: str,
    arguments: tuple[str, ...],
    file: str | None,
    dry_run: bool,
    quiet: bool,
    module: bool,
    no_python: bool,
    preflight_timeout: float,
    nproc_per_node: str | None,
    **flags: Any,
) -> int:
    """Reads the settings, makes the plan, shows it and runs it."""
    if module and no_python:
        raise ConfigurationError(
            "--module and --no_python exclude each other, since Python runs a module: give one of them."
        )
    elastic = ElasticOptions(**{field.name: flags.pop(field.name) for field in dataclasses.fields(ElasticOptions)})
    given = _given(flags)
    below = _file(file, alone=bool(given.get("use_cpu", False)))
    machine = this_machine()
    settings, elastic = with_cluster(given, below, elastic, nproc_per_node, machine, os.environ)
    if dry_run:
        machine = planned_for(settings, machine)
    plan = resolve(settings, elastic, machine, os.environ)
    words = [*(["-m"] if module else []), script, *arguments]
    # A script runs inside a small program of ours that records its errors.
    command = words if no_python else [sys.executable, "-u", "-m", "leyden.cli.launch.rank", *words]
    # Under srun, only the first task prints the plan.
    if dry_run or not (quiet or (plan.rank is not None and plan.rank.rank)):
        shown = words if no_python else ["python", *words]
        click.echo(plan.lines(shlex.join(masked_words(shown)), reasons=dry_run))
        sys.stdout.flush()
    if dry_run:
        return 0
    # A folder or an archive with a __main__.py is a script too.
    is_script = os.path.exists(script) and (not os.path.isdir(script) or os.path.isfile(f"{script}/__main__.py"))
    if not no_python and not module and not is_script:
        raise ConfigurationError(
            f"there is no script {script}: give its path, -m for a module, or --no_python for a program."
        )
    if plan.machines == 1 and plan.rank is None:
        plan = plan.started_by([sys.executable, *sys.orig_argv[1:]])
    _preflight(plan, preflight_timeout)
    return agent.start(plan, command)


def _given(flags: dict[str, Any]) -> Settings:
    """Returns the flags as the settings of a file."""
    kinds = [name for name in KINDS if flags.pop(name)]
    flags.pop("use_parallelism_config")
    if len(kinds) > 1:
        raise ConfigurationError(f"{' and '.join(f'--{name}' for name in kinds)} exclude each other: give one of them.")
    sections = {
        family: {key.name: flags[key.name] for key in keys if flags.get(key.name) is not None}
        for family, keys in FAMILIES.items()
    }
    values = {key.name: flags.get(key.name) for key in TOP}
    if kinds:
        values["distributed_type"] = KINDS[kinds[0]][0]
    return Settings(values, {name: section for name, section in sections.items() if section})


def _file(file: str | None, *, alone: bool) -> Settings:
    """Reads the named file, or the default one if it exists.

    Args:
        file: the file that was named.
        alone: True under --cpu: Accelerate's default file describes this machine's GPUs, so it is ignored.
    """
    path, why = (file, "") if file is not None else found_file()
    return Settings() if path is None or (why and alone) else read_file(path, why)


def _preflight(plan: LaunchPlan, timeout: float) -> None:
    is_fixed = plan.machines > 1 and plan.rank is None and not plan.least_machines
    if not is_fixed or not timeout or plan.backend not in ("static", "c10d"):
        return
    facts = preflight.facts_of(plan.machine_rank, plan.machines, plan.backend)
    preflight.check(facts, plan.machines, plan.address, plan.port, timeout)


command = Launch(
    "launch",
    callback=run,
    params=OPTIONS,
    help="Run SCRIPT with its ARGUMENTS on all ranks of this machine, or of several.\n\nFlags override a cluster's "
    "variables, these the file, and the file the defaults. Words in a flag are joined by _ or -.",
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)


@click.command(
    "test", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def selftest_command(ctx: click.Context, flags: tuple[str, ...]) -> Any:
    """Test the ranks with a real training of a few steps, or test the module of a configuration.

    Takes the flags of `leyden launch`, such as --config_file. It checks collectives, parity with a plain loop,
    accumulation, the precision, and saving and resuming.

    With --config, --model, --data, --trainer or --ckpt_path it runs Trainer.test on the module of a configuration:
    `leyden test --config run.yaml --help` lists its options.
    """
    if stages.is_stage(["test", *flags]):
        return stages.run(["test", *flags])
    if flags[:1] in (("--help",), ("-h",)):
        click.echo(ctx.get_help())
        return 0
    with temporary("test") as folder:
        arguments = [*flags, "--module", "leyden.cli.launch.trial", str(folder)]
        with command.make_context("test", arguments, parent=ctx.parent) as inner:
            return command.invoke(inner)
