"""What a run found, for a person: one self-contained HTML page.

`data` reads a run folder, `plots` draws with matplotlib, `page` writes the HTML around both.
"""

from eyas.report.page import build

__all__ = ["build"]
