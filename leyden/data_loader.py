"""Stand-in for `accelerate.data_loader`, so that scripts written for Accelerate only change the package name."""

from leyden.accelerator.prepared.loader import skip_first_batches
from leyden.accelerator.prepared.rank_loaders import SeedableRandomSampler
from leyden.accelerator.standalone.world import synchronize_rng_states
from leyden.compat.accelerate.absent import lacking

__all__ = ["SeedableRandomSampler", "skip_first_batches", "synchronize_rng_states"]
__getattr__ = lacking(__name__)
