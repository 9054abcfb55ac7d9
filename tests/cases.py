"""Where the collected cases are, and what a test says that cannot run where they are not."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ.get("ROLLOUT_CASES") or Path(__file__).resolve().parents[2] / "shared" / "cases")


def needs(what: str) -> str:
    """The reason of a test that is skipped."""
    return f"needs {what}: see docs/contributing.md"


NEEDS_CASES = needs("the collected cases")
