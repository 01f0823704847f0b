from __future__ import annotations

from xml.etree import ElementTree

from partita.reporting.drawing.scales import Scale
from partita.reporting.drawing.time_axis import time_axis


def test_ticks_stand_at_round_milliseconds_within_the_scale() -> None:
    root = ElementTree.fromstring(f"<g>{time_axis(Scale(0.0, 0.01, 50.0, 250.0), 80.0)}</g>")
    words = [(item.text, float(item.get("x", 0))) for item in root.iter("text")]
    assert words[:3] == [("0", 50.0), ("1", 70.0), ("2", 90.0)]
    assert words[-1] == ("ms", 40.0)
