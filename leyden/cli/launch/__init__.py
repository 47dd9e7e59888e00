"""`leyden launch` and `leyden test`: the plan of a launch, and the ranks that it starts."""
