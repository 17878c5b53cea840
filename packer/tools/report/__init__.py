"""Reports as one HTML file that needs nothing else: text, tables and charts, for any browser, a phone and paper.

    page = Page("Diagnosis of train.py", lead="storage starves the training")
    page.section("The ladder")
    page.chart(charts.bars(["step", "read"], {"ms a step": [20.0, 41.5]}, unit="ms"), "What each stage adds")
    page.table(["stage", "ms a step"], [["step", "20.0"], ["read", "41.5"]])
    write_page(Path("report.html"), page)

Pages need matplotlib and Jinja2, the extra `report`; `require_charts()` says so before the work and not after it.
"""

from __future__ import annotations

from packer.tools.report import charts
from packer.tools.report.charts import Chart, require_charts, svg_image
from packer.tools.report.page import Page, write_page

__all__ = ["Chart", "Page", "charts", "require_charts", "svg_image", "write_page"]
