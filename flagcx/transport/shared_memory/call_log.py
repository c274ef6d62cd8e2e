"""The log of calls: what each rank called lately, so that ranks that make different calls find out.

The n-th collective call of a rank leaves ``signature << 17 | n << 1 | shared`` in word n mod 16 of its log,
with the lowest 16 bits of n. The signature, 47 bits of a hash, stands for collective, count, dtype,
operation, root, algorithm and the operation that the call is a step of; its text lies in the segment too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from flagcx.errors import MismatchError
from flagcx.transport.base import signature_of
from flagcx.transport.shared_memory.words import (
    CALL_LOG_DEPTH,
    CALL_LOG_MASK,
    EXCHANGE,
    REASON_NBYTES,
    SEQUENCE_MASK,
    SHARED_BIT,
    SIGNATURE_SHIFT,
    TEXT_NBYTES,
    TEXTS,
    header_index,
    nbytes_of_header,
    numbered,
    reason_offset,
    sent_index,
)

_SIGNATURE = (1 << 47) - 1
_SIGNATURE_NBYTES = 8
_MOST_TEXT_NBYTES = TEXT_NBYTES - _SIGNATURE_NBYTES - 1


class CallLog:
    """One rank's view of every rank's log.

    Args:
        rank: This rank.
        words: Every rank's words, by rank.
        memory: The bytes of every rank's segment, by rank.
    """

    def __init__(self, rank: int, words: list[memoryview], memory: list[memoryview]) -> None:
        self._rank, self._words, self._memory = rank, words, memory
        self._reason_at = reason_offset(len(words))
        self._own: dict[int, str] = {}  # the texts of this rank that are in its segment, oldest first
        self._texts = 0

    def close(self) -> None:
        """Lets go of the peers' memory."""
        self._words, self._memory = [], []

    def kind(self, text: str) -> int:
        """Leaves ``text`` for peers to read, and returns the signature that stands for it."""
        signature = signature_of(text) & _SIGNATURE
        if signature not in self._own:
            record = signature.to_bytes(_SIGNATURE_NBYTES, "little") + text.encode()[:_MOST_TEXT_NBYTES]
            self._write(self._text_at(self._texts % TEXTS), record, TEXT_NBYTES)
            self._texts += 1
            if len(self._own) == TEXTS:
                del self._own[next(iter(self._own))]
            self._own[signature] = text
        return signature

    def signature(self, text: str) -> int:
        """The same, shifted to where a word of the log has it."""
        return self.kind(text) << SIGNATURE_SHIFT

    def _text_at(self, number: int) -> int:
        return self._reason_at + REASON_NBYTES + number * TEXT_NBYTES

    def _write(self, at: int, record: bytes, nbytes: int) -> None:
        self._memory[self._rank][at : at + nbytes] = record.ljust(nbytes, b"\0")

    def _texts_of(self, peer: int) -> Iterator[tuple[int, str]]:
        """The signatures that a peer has used lately, with their texts."""
        for number in range(TEXTS):
            at = self._text_at(number)
            record = bytes(self._memory[peer][at : at + TEXT_NBYTES])
            signature, text = record[:_SIGNATURE_NBYTES], record[_SIGNATURE_NBYTES:].rstrip(b"\0")
            if not text:
                return
            yield int.from_bytes(signature, "little"), text.decode(errors="replace")

    def _call_of(self, peer: int, word: int) -> str:
        signature = word >> SIGNATURE_SHIFT
        own = self._own.get(signature)
        return own or next((text for kind, text in self._texts_of(peer) if kind == signature), "another call")

    def _message_of(self, peer: int, header: int) -> str:
        """A message of a peer in words."""
        logs = (*self._words[self._rank][:CALL_LOG_DEPTH], *self._words[peer][:CALL_LOG_DEPTH])
        numbers = {word >> 1 & SEQUENCE_MASK for word in logs}
        for kind, text in (*self._own.items(), *self._texts_of(peer)):
            nbytes = nbytes_of_header(header, kind)
            if nbytes is not None:
                return f"{nbytes:,} bytes of {text}"
            for number in numbers:
                nbytes = nbytes_of_header(header, numbered(kind, number))
                if nbytes is not None:
                    return f"{nbytes:,} bytes of call {number}, {text}"
        return "bytes of another call"

    def calls_of(self, peer: int) -> list[tuple[int, str]]:
        """The calls of a rank that are still in sight, oldest first: their numbers modulo 65536, in words."""
        words, texts = self._words[peer], dict(self._texts_of(peer))
        found = {
            word >> 1 & SEQUENCE_MASK: word >> SIGNATURE_SHIFT for word in words[:CALL_LOG_DEPTH] if word
        }
        last = next((number for number in found if (number + 1) & SEQUENCE_MASK not in found), 0)
        numbers = sorted(found, key=lambda number: (number - last - 1) & SEQUENCE_MASK)
        return [(number, texts.get(found[number], "another call")) for number in numbers]

    def last_call(self, sequence: int) -> str:
        """This rank's last call in words, if it has made ``sequence`` calls; empty for none."""
        word = self._words[self._rank][(sequence - 1) & CALL_LOG_MASK]
        return f" in {self._call_of(self._rank, word)}" if sequence else ""

    def write_reason(self, reason: str) -> None:
        """Leaves the reason why this rank gives up."""
        self._write(self._reason_at, reason.encode()[: REASON_NBYTES - 1], REASON_NBYTES)

    def reason_of(self, peer: int) -> str:
        """Why a peer gave up."""
        raw = bytes(self._memory[peer][self._reason_at : self._reason_at + REASON_NBYTES])
        return raw.rstrip(b"\0").decode(errors="replace")

    def refuse(self, peer: int, header: int, expected: int, sequence: int) -> None:
        """Raises MismatchError for a message of a peer whose header is not the one that is expected.

        Args:
            peer: The peer.
            header: The header of its message.
            expected: The header that was expected.
            sequence: How many calls this rank has made.
        """
        self.compare(sequence - 1)  # a call before may have left the message
        sent, wanted = self._message_of(peer, header), self._message_of(self._rank, expected)
        raise MismatchError(
            f"ranks disagree: rank {peer} sent {sent}, and rank {self._rank} expects {wanted}; every rank "
            f"must make the same calls in the same order, with the same count, dtype, operation, algorithm "
            f"and root",
            peer=peer,
        )

    def compare(self, sequence: int) -> None:
        """Compares the calls that are still in sight, the latest first.

        Args:
            sequence: How many calls this rank has made.

        Raises:
            MismatchError: A peer called something else.
        """
        for number in range(sequence - 1, max(sequence - CALL_LOG_DEPTH, 0) - 1, -1):
            index = number & CALL_LOG_MASK
            mine = self._words[self._rank][index]
            for q, words in enumerate(self._words):
                theirs = words[index]
                low = number & SEQUENCE_MASK
                same_number = theirs >> 1 & SEQUENCE_MASK == low == mine >> 1 & SEQUENCE_MASK
                if same_number and (theirs ^ mine) > SHARED_BIT and theirs:
                    raise self._disagreement(number, mine, q, theirs)
        self._compare_exchanges(sequence)

    def _compare_exchanges(self, sequence: int) -> None:
        """Compares the words of the exchange that is the last call, which hold a hash of the calls before."""
        for index in (EXCHANGE, EXCHANGE + 1):
            mine, number = self._words[self._rank][index], (sequence - 1) & SEQUENCE_MASK
            for q, words in enumerate(self._words):
                theirs = words[index]
                same_number = theirs >> 1 & SEQUENCE_MASK == number == mine >> 1 & SEQUENCE_MASK
                if same_number and (theirs ^ mine) > SHARED_BIT and theirs:
                    raise self._long_ago(q, sequence - 1)

    def _long_ago(self, peer: int, number: int) -> MismatchError:
        return MismatchError(
            f"ranks {self._rank} and {peer} came to call {number} by different calls, longer ago than the "
            f"last {CALL_LOG_DEPTH}; every rank must make the same calls",
            peer=peer,
        )

    def refuse_calls_before(self, peer: int, number: int) -> NoReturn:
        """Raises MismatchError for calls before call ``number`` that were not the same on a peer."""
        self.compare(number + 1)
        raise self._long_ago(peer, number)

    def refuse_call(self, peer: int, word: int, number: int) -> NoReturn:
        """Raises MismatchError for a call of a peer, whose log need not show it any more.

        Args:
            peer: The peer.
            word: Its word for the call.
            number: Number of the call, for this rank.
        """
        self.compare(number + 1)  # a call before may be the reason
        raise self._disagreement(number, self._words[self._rank][number & CALL_LOG_MASK], peer, word)

    def _disagreement(self, number: int, mine: int, peer: int, theirs: int) -> MismatchError:
        return MismatchError(
            f"ranks disagree on call {number}: rank {self._rank} called {self._call_of(self._rank, mine)}, "
            f"rank {peer} called {self._call_of(peer, theirs)}; every rank must make the same calls in the "
            f"same order, with the same count, dtype, operation and root",
            peer=peer,
        )

    def compare_last(self, sequence: int) -> None:
        """Checks that the peers, which have come to call ``sequence``, made the same call before it.

        Raises:
            MismatchError: A peer called something else.
        """
        index = (sequence - 1) & CALL_LOG_MASK
        mine = self._words[self._rank][index]
        for words in self._words:
            if (words[index] ^ mine) > SHARED_BIT:
                self.compare(sequence + 1)

    def check_end(self, sequence: int, received: Sequence[Sequence[int]]) -> None:
        """Looks for signs, when all calls have been made, that a peer made others.

        Args:
            sequence: How many calls this rank has made.
            received: How many pieces it has received from each, for each lane.

        Raises:
            MismatchError: A peer called something else lately, or sent what this rank has never received.
        """
        self.compare(sequence)
        for lane, counts in enumerate(received):
            for peer, words in enumerate(self._words):
                if words[sent_index(self._rank, lane)] > counts[peer]:
                    header = words[header_index(self._rank, lane, counts[peer])]
                    raise MismatchError(
                        f"rank {peer} sent {self._message_of(peer, header)}, which rank {self._rank} never "
                        f"received; every rank must make the same calls",
                        peer=peer,
                    )
