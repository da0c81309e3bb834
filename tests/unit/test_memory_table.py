"""The memory tables of docs/three-edits.md are what the formulas give for the released files."""

from __future__ import annotations

from pathlib import Path

import released
import tiny_wan

PAGE = Path(__file__).resolve().parents[2] / "docs" / "three-edits.md"


def test_the_tables_are_computed() -> None:
    tiny_wan.use_worker_site()
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = released.tables()
    assert len(rows) > 20 and [row for row in rows if row not in lines] == []
