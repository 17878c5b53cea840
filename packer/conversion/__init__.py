"""Conversion: `run` leads, `plan` decides, `pack` writes a shard in a worker, `journal` and `commit` keep it safe."""
