"""The demo runs, and says which figures it could not measure."""

from __future__ import annotations

import os
from pathlib import Path

from suites.programs import run_python

DEMO = Path(__file__).parent.parent / "examples/demo.py"


def test_the_demo_runs_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a double of torch that is not there')")
    done = run_python(DEMO, "out", 12, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for text in ("images-tfrecord", "every byte", "cold, order known ahead", "is not installed. To install it",
                 "the same names and bytes", "packer view out/page"):  # fmt: skip
        assert text in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert (tmp_path / "out/page/index.html").is_file()
