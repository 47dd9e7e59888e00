"""XLA: strategies for TPUs and other XLA devices, with one process for all devices or one per device."""
