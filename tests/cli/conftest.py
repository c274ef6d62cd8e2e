"""What the tests of ``flagcx run`` share."""

import textwrap

import pytest

from tests.bootstrap.processes import program


@pytest.fixture
def script(tmp_path):
    """Writes a rank's program to a file."""

    def write(body):
        path = tmp_path / "script.py"
        path.write_text(program(textwrap.dedent(body)))
        return str(path)

    return write
