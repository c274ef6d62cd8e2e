"""A communicator that is closed in the middle of a call, as a handler of a signal may do."""

from __future__ import annotations

import pytest

import flagcx as fc


@pytest.mark.parametrize("module", ["flagcx.transport.somewhere", "users"])
def test_what_a_call_fails_of_after_a_close_is_told_as_the_close(module):
    comm = fc.init()
    names = {"__name__": module, "close": comm.close}
    exec("def run(*arrays):\n    close()\n    None[0] = 1", names)
    kind, text = (
        (fc.CommunicatorError, "is closed, and was in the middle of a call")
        if module.startswith("flagcx")
        else (TypeError, "does not support item assignment")
    )
    with pytest.raises(kind, match=text):
        comm._host._run(names["run"], None, None)
