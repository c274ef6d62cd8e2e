"""A peer that can't be installed is missing, with the reason; one that's installed is used again."""

import json
import sys

import environments
import pytest


@pytest.mark.exhaustive
def test_failed_installation_is_reported_with_pips_words(tmp_path):
    with pytest.raises(environments.PeerMissing, match=r"pip install \./no-such-package failed: ERROR"):
        environments.ensure("peer", ["./no-such-package"], root=tmp_path)
    assert not (tmp_path / "peer" / "requirements.json").exists()


def test_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(environments.PeerMissing, match="no environment at"):
        environments.ensure("peer", ["numpy"], root=tmp_path / "file")


def test_environment_with_the_same_requirements_is_used_again(tmp_path):
    home = tmp_path / "peer"
    home.mkdir()
    stamp = {"python": sys.version, "requirements": ["numpy"]}
    (home / "requirements.json").write_text(json.dumps(stamp))
    assert environments.ensure("peer", ["numpy"], root=tmp_path) == home / "bin"
