"""One folder an op: the definition in plain torch, and for each backend a path that equals it."""
