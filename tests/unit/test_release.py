"""A version is the same wherever it stands, and the changelog describes it."""

import re

import yaml

from foundations import __version__
from tests.conftest import ROOT


def test_the_changelog_begins_with_this_version_and_its_date():
    releases = re.findall(r"^## \[([\d.]+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert releases[0] == (__version__, str(citation["date-released"]))
    assert citation["version"] == __version__


def test_documents_name_images_and_wheels_of_this_version():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docker/*.md")]:
        named = re.findall(r"(?:slipway:|slipway_serving-)(\d+\.\d+\.\d+)", path.read_text())
        assert set(named) <= {__version__}, path
