"""The page of the package, made from README.md; everything else about it is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"<picture>.*?</picture>\n\n", re.DOTALL)
RELATIVE_LINK = re.compile(r"\[([^]]+)\]\((?!https?://)[^)]+\)")


def package_page(readme: str) -> str:
    """Return the README for a package index, where a relative link leads nowhere: each becomes its text."""
    return RELATIVE_LINK.sub(r"\1", PICTURE.sub("", readme))


setup(long_description=package_page(Path("README.md").read_text()), long_description_content_type="text/markdown")
