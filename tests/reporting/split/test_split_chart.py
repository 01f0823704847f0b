"""The pieces of a model in SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from tests.reporting.split.test_split_report import model_report

from partita.reporting import split_chart


@pytest.mark.parametrize("stages", [4, 40])
def test_the_picture_is_xml_and_within_its_frame(stages: int) -> None:
    root = ET.fromstring(split_chart(model_report(stages)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for node in root.iter():
        if "x" in node.attrib:
            assert 0 <= float(node.attrib["x"]) <= width
            assert 0 <= float(node.attrib["y"]) <= height
    assert not [node for node in root.iter() if node.tag.endswith("script")]
