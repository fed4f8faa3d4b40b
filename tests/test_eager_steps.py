"""The benchmark of eager steps runs on any machine, on tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import eager_steps


def test_every_way_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    eager_steps.main(["--small", "--parts", "prompts", "steps", "--out", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["prompts"] for row in rows if "prompts" in row] == [count for count, _ in eager_steps.PROMPTS]
    ways = [row for row in rows if "way" in row]
    assert len(ways) == 5 and all(0.0 < row["step_ms"] <= row["p90_ms"] for row in ways)
