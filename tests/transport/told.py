"""What ranks of several hosts must have been told in the jobs of ``network_jobs``, by any engine."""

from __future__ import annotations

PARTS = ["done collectives", "done hierarchies", "done compressed", "done facade", "done messages"]
"""What rank 0 prints in ``everything``."""


def told_by(printed: str) -> dict[str, dict[int, list[str]]]:
    """What the ranks printed in each case: the case, the rank, and what it was told, between bars."""
    told: dict[str, dict[int, list[str]]] = {}
    for line in printed.splitlines():
        case, *parts = line.split(" | ")
        if len(parts) > 1 and parts[0].isdigit():
            told.setdefault(case, {})[int(parts[0])] = parts[1:]
    return told


def check_mistakes(printed: str) -> None:
    """What three ranks print in ``mistakes``."""
    told = told_by(printed)
    assert len(told) == 12, printed
    nobody = told.pop("message that nobody takes")
    assert any("rank 0 sent 40 bytes" in " ".join(texts) for texts in nobody.values()), printed
    for case, by_rank in told.items():
        texts = [" | ".join(by_rank[rank]) for rank in range(3)]
        assert all("MismatchError" in text or "AbortedError" in text for text in texts), (case, texts)
        assert any("MismatchError" in text for text in texts), (case, texts)
        assert all(by_rank[rank][0] == "soon=True" for rank in range(3)), (case, texts)
    assert "allreduce of 5 float64 by sum" in " ".join(told["count of an allreduce"][0]), printed
    sender, receiver, _ = (" | ".join(told["dtype of a long message"][rank]) for rank in range(3))
    assert "MismatchError: ranks disagree: rank 0 sent 400,000 bytes of send and receive of flo" in receiver
    assert "AbortedError: rank 1 gave up: ranks disagree" in sender, printed
    sizes = " ".join(told["count of a message"][1])
    assert "rank 0 sent 20 bytes of send and receive of float32, and rank 1 expects 40 bytes" in sizes


def check_waits(printed: str) -> None:
    """What three ranks print in ``waits``."""
    told = told_by(printed)
    assert len(told) == 4, printed
    warning, error = told["a receive"][0]
    call = "a receive of 3 float64 of communicator split 1 of world"
    assert warning.endswith(f"for rank 1 in {call}; rank 1 itself waits for no rank")
    assert error.startswith("PeerTimeoutError (1): rank 1 did not take part within")
    for rank in (0, 1):
        warning, error = told["two receives"][rank]
        assert f"rank {1 - rank} waits for rank {rank} in a receive" in warning, warning
        assert "so none of them can go on" in warning and error != "nothing"
    warning, error = told["a lone barrier"][1]
    assert "rank 1 has waited" in warning and "barrier" in warning
    assert error.startswith("PeerTimeoutError (0): ranks 0, 2 did not take part within"), error
    warning, error = told["a long send"][0]
    assert "for rank 2 in a send" in warning and error.startswith("PeerTimeoutError (2): rank 2 did not")
    assert printed.count("untouched=True") == 3, printed
    assert "rank 0 PeerTimeoutError untouched=True" in printed, printed


def check_losses(printed: str) -> None:
    """What four ranks print in ``losses``."""
    aborted = [line.split() for line in printed.splitlines() if " aborted " in line]
    assert len(aborted) == 3 and all(float(words[4]) < 2.6 for words in aborted), printed
    for line in (
        "rank 0 goes on as 0 of 3, lost (3,)",
        "rank 1 goes on as 1 of 3, lost (3,)",
        "rank 2 goes on as 2 of 3, lost (3,)",
        "rank 1 goes on as 0 of 2, lost (0,)",
        "rank 2 goes on as 1 of 2, lost (0,)",
    ):
        assert line in printed, printed
