"""Jobs that need not exist: spec, topology and source maps from model shapes and sharding rules, for planning ahead."""
