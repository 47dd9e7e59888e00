"""The checkpoint on disk: a folder of safetensors and JSON, complete or absent, verified when read, without a pickle."""
