"""The command line: `leyden config`, `launch`, `env`, `test`, `estimate`, `merge`, `convert` and `checkpoint`."""
