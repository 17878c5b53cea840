"""Draw the chart of the docs: images/s of the rows that hand out uint8, in the last run of `pipeline.py` with some.

python benchmarks/figure.py FIGURES.json docs/figures/feeding.svg          (needs the extra report)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from harness import REPOSITORY
from report import group_of, values_of

sys.path.insert(1, str(REPOSITORY))
from packer.tools.report import charts, svg_image

_KIND = " [u8]"


def draw(figures: Path, chart: Path) -> None:
    runs = [run["results"] for run in json.loads(figures.read_text())]
    results = next(run for run in reversed(runs) if any(name.endswith(_KIND) for name in run))
    rows = {name: values_of(results, name, "images_s") for name in results if name.endswith(_KIND)}
    names = sorted((name for name in rows if rows[name]), key=lambda name: -median(rows[name]))
    labels = [name.removesuffix(_KIND).removeprefix("ours: ") for name in names]
    low, middle, high = ([pick(rows[name]) for name in names] for pick in (min, median, max))
    strong = [place for place, name in enumerate(names) if group_of(name) == "ours"]
    drawn = charts.bars(labels, {"images/s": middle}, low=low, high=high, strong=strong)
    chart.write_text(svg_image(drawn))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
