"""The README's snippets, those with CuPy too."""

import sys

from tests.test_readme import ROOT, run, session


def test_snippets_go_on_from_each_other(tmp_path):
    script = tmp_path / "session.py"
    script.write_text(session())
    run([sys.executable, str(script)], tmp_path)


def test_ranks_that_share_the_gpu():
    command = ["-m", "flagcx.cli", "run", "-n", "8", "--share-gpu", "examples/train_digits.py"]
    assert "accuracy" in run([sys.executable, *command], ROOT)
