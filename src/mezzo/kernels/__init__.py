"""The arithmetic of a step: one definition in plain torch for each op, and faster paths that equal it."""
