"""A mesh of ranks: tensor, sequence and pipeline parallelism, alone or combined with FSDP and HSDP."""
