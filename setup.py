"""What a package index shows: the README, whose links to files of the source would lead nowhere there."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!https?:)(?P<path>[^)#]+)[^)]*\)")
NOTE = "\n\nGuides and benchmarks are in the source archive, in the files that stand in brackets.\n"


def without_link(link: re.Match[str]) -> str:
    """The text of a link, with the path of its file behind it."""
    text, path = link["text"], link["path"]
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


setup(
    long_description=LINK.sub(without_link, PICTURE.sub("", README)).rstrip() + NOTE,
    long_description_content_type="text/markdown",
)
