"""Takes the README's picture of the report's page: ``python docs/figures/draw_report_page.py bench_final2_mfu2.csv``.

Needs Chromium and its driver (``tests/analysis/packages``). The table is the study's, which is not shipped.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from analysis import report  # noqa: E402
from analysis.options import Options  # noqa: E402
from tests.analysis.browser import chromium  # noqa: E402


def main(table: Path) -> None:
    options = Options(figures=("outcomes",), price_per_gpu_hour=2.5)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        page = report.build(table, Path(folder) / "report", options)
        browser.open(page, "#m=8.86B&g=64", size=(1400, 900))
        browser.wait("window.Report?.ready")
        browser.screenshot(ROOT / "docs" / "figures" / "report_page.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
