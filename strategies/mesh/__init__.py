"""The mesh of ranks: tensor and sequence parallel, alone or with FSDP and HSDP."""
