"""Conversion: `run` leads, `plan` plans, `pack` writes a shard in a worker, `journal` and `commit` keep it safe."""
