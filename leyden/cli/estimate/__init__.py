"""What a model takes before it trains: `leyden estimate` and `leyden plan`."""
