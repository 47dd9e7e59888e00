"""The record of how a module was sharded, and the torch policies derived from FSDPStrategy's arguments."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from leyden.core.errors import ConfigurationError
from leyden.strategies.fsdp.policy import Groups
from leyden.strategies.precision import MixedPrecision, Precision


@dataclass(slots=True)
class ShardRecord:
    """How a module was sharded: printed as one line, and compared when a later run uses the same module.

    Attributes:
        groups: name of each group → its class. The root is always a group and is not listed.
        tied: name of a module that the policy chose but that stays in the enclosing group → the reason.
        checkpointed: modules whose activations are recomputed in backward.
        dtypes: dtype of shards → number of parameters.
        policy: dtypes in which parameters are gathered and gradients reduced.
        mesh: sizes, (shard,) or (replicate, shard).
        form: the layers that the precision substituted; empty if it kept the model's own.
        kept_whole: parameters that stay unsharded: 0-d ones, and those that several roots share.
    """

    groups: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    checkpointed: list[str] = field(default_factory=list)
    dtypes: dict[torch.dtype, int] = field(default_factory=dict)
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    mesh: tuple[int, ...] = ()
    form: str = ""
    kept_whole: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        groups: Groups,
        checkpointed: list[str],
        policy: MixedPrecisionPolicy,
        mesh: tuple[int, ...],
        form: str,
        unsharded: set[nn.Parameter],
    ) -> ShardRecord:
        kinds = {name: type(module.get_submodule(name)).__name__.removeprefix("FSDP") for name in sorted(groups.names)}
        dtypes: Counter[torch.dtype] = Counter()
        for parameter in module.parameters():
            dtypes[parameter.dtype] += parameter.numel()
        kept_whole = [name for name, parameter in module.named_parameters() if parameter in unsharded]
        return cls(kinds, dict(groups.tied), checkpointed, dict(dtypes), policy, mesh, form, kept_whole)

    def line(self) -> str:
        """Returns the record as one line, for the summary at the start of fit."""
        if not self.mesh:
            return ""
        kinds = Counter(self.groups.values())
        groups = " + ".join([*(f"{count} {kind}" for kind, count in kinds.items()), "root"])
        held = "/".join(_short(dtype) for dtype in self.dtypes)
        parts = [
            f"{groups} over {' × '.join(map(str, self.mesh))} rank{'s' if math.prod(self.mesh) > 1 else ''}",
            f"{held} shards",
        ]
        if self.policy.param_dtype is not None:
            parts.append(f"gathered in {_short(self.policy.param_dtype)}")
        if self.policy.reduce_dtype is not None:
            parts.append(f"reduced in {_short(self.policy.reduce_dtype)}")
        if self.checkpointed:
            parts.append(f"{len(self.checkpointed)} checkpointed")
        if self.kept_whole:
            parts.append(f"{', '.join(self.kept_whole[:3])}{', …' if len(self.kept_whole) > 3 else ''} unsharded")
        if self.tied:
            parts.append(f"{len(self.tied)} tied, kept in the root")
        return ", ".join(parts)

    def check_same(self, policy: MixedPrecisionPolicy, form: str) -> None:
        """Refuses a second run with dtypes or layers other than those the module was sharded with.

        Raises:
            ConfigurationError: if either differs; shows both.
        """
        if policy != self.policy or form != self.form:
            before, now = (
                f"{kind}{', ' + how if how else ''}" for kind, how in ((self.policy, self.form), (policy, form))
            )
            raise ConfigurationError(
                f"the module was sharded by an earlier run with {before}, and this run asks for {now}: use the same "
                "precision, or load the checkpoint into a new module."
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def policy_of(precision: Precision) -> MixedPrecisionPolicy:
    """Returns the `fully_shard` policy for a precision.

    Mixed precision keeps float32 shards, gathers them in half precision (half the bytes of autocast alone) and reduces
    gradients in float32. Forward inputs are not cast: autocast converts them for each operation, so losses and norms
    are computed in float32, as under every other strategy.
    """
    if isinstance(precision, MixedPrecision):
        return MixedPrecisionPolicy(param_dtype=precision.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(cast_forward_inputs=False)


def offload_of(wanted: bool | OffloadPolicy, device: torch.device) -> OffloadPolicy:
    """Returns torch's policy for `cpu_offload`. Memory is pinned only if there is an accelerator to copy to."""
    if isinstance(wanted, OffloadPolicy):
        return wanted
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if wanted else OffloadPolicy()
