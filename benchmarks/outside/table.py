"""Run the installed suites of other projects, and print one table: `make yardsticks`.

Each suite's output goes to OUT/NAME.txt, and live to the terminal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAD = "| suite | measure | ours | theirs | ours / theirs |\n|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="suites (default: all installed suites)")
    parser.add_argument("--venvs", type=Path, default=HERE.parents[1] / ".venvs", help="folder of outside-NAME")
    parser.add_argument("--images", type=Path, help="folder of JPEGs, for suites that need images")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "build" / "yardsticks")
    options = parser.parse_args()
    known = sorted(script.parent.name for script in HERE.glob("*/run.sh"))
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no suite {', '.join(unknown)}; expected {', '.join(known)}")
    if options.images and not options.images.is_dir():
        parser.error(f"--images: {options.images} is not a folder")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    failed: list[str] = []
    for name in options.names or known:
        venv = options.venvs.absolute() / f"outside-{name}"
        if not (venv / ".ready").exists():
            print(f"{name}: not installed; run make outside-{name}", file=sys.stderr)
            failed += [name] if options.names else []
            continue
        print(f"== {name}", flush=True)
        command = ["sh", str(HERE / name / "run.sh"), str(venv)]
        command += [str(options.images.absolute())] if options.images else []
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            (options.out / f"{name}.txt").open("w") as kept,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                kept.write(line)
                rows += [line.rstrip()] if line.startswith("| ") and line.count("|") == 6 else []  # five cells
        failed += [name] if process.returncode else []
    print("\n".join(("", HEAD, *rows)))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
