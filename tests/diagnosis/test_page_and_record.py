"""The page of a rank, the file of a flight record, and the look into a store."""

from __future__ import annotations

import gc
import json
import os
import threading

import pytest

from flagcx.bootstrap.observe import observe
from flagcx.bootstrap.rank_page import RankPage, read_page
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store import StoreServer
from flagcx.diagnosis import flight_record
from flagcx.diagnosis.account import account
from flagcx.diagnosis.jobs import pages_of
from flagcx.diagnosis.state import Progress, RankState
from flagcx.errors import ArgumentError, BootstrapError
from flagcx.transport.waits import ON_HOST, Waits


def _path(page: RankPage) -> str:
    return f"/proc/self/fd/{page.descriptor}"


def test_a_page_shows_what_is_open():
    page = RankPage({"rank": 3})
    kept, dropped = page.add("world", range(4)), page.add("split 1 of world", (1, 3))
    kept.set(waits={"a": {"for": 1}})
    shown = read_page(_path(page))
    assert [each["name"] for each in shown["communicators"]] == ["world", "split 1 of world"]
    assert shown["communicators"][0]["waits"] == {"a": {"for": 1}} and shown["pid"] == os.getpid()
    del dropped
    gc.collect()
    page.set(phase="joined")
    assert [each["name"] for each in read_page(_path(page))["communicators"]] == ["world"]
    kept.close()
    assert read_page(_path(page))["communicators"] == []
    path = _path(page)
    page.close()
    page.set(phase="closed")
    assert read_page(path) is None


def test_a_page_holds_many_communicators_and_is_read_whole_while_it_is_written():
    page = RankPage({"rank": 0})
    entries = [page.add(f"split {n}", range(1000 if n < 2 else 20_000)) for n in range(15)]  # over 1 MiB
    shown = read_page(_path(page))
    assert 0 < len(shown["communicators"]) < 15
    assert shown["communicators"][-1]["name"] == "split 14"
    for entry in entries[2:]:
        entry.open = False
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            entries[0].set(a=number, b="x" * (number % 500), c=number)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            seen = read_page(_path(page))
            if seen is not None and "a" in seen["communicators"][0]:
                assert seen["communicators"][0]["a"] == seen["communicators"][0]["c"]
    finally:
        stop.set()
        writer.join()
    page.close()


def test_a_page_is_whole_where_its_process_stops_while_it_writes(monkeypatch):
    page = RankPage({"rank": 0})
    page.set(phase="before")
    write = os.pwrite

    def stop_half_way(descriptor: int, data: bytes, at: int) -> int:
        write(descriptor, data[: len(data) // 2], at)
        raise InterruptedError

    monkeypatch.setattr(os, "pwrite", stop_half_way)
    with pytest.raises(InterruptedError):
        page.set(phase="after")
    assert read_page(_path(page))["phase"] == "before"
    monkeypatch.undo()
    page.set(phase="after")
    assert read_page(_path(page))["phase"] == "after"
    page.close()


def test_a_forked_child_has_no_page_of_its_own():
    others = {"size": 1, "began": 0.0, "host": "here", "script": "", "launcher": "alone"}
    page = RankPage({"rank": 0, "store": "x", **others})  # whole, since another test may look for jobs now
    child = os.fork()
    if child == 0:
        page.set(rank=7)  # does nothing here
        os._exit(len(pages_of(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_page(_path(page))["rank"] == 0
    page.close()


def test_records_are_added_and_files_bounded(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "flagcx-a.json"
    for rank in range(3):
        flight_record.add(path, {"job": "a", "size": 3}, {"rank": rank})
    found = flight_record.read(path)
    assert [record["rank"] for record in found["records"]] == [0, 1, 2] and found["size"] == 3
    monkeypatch.setattr(flight_record, "_MOST_NBYTES", 300)
    for rank in range(9):
        flight_record.add(path, {"job": "a", "size": 3}, {"rank": rank, "text": "x" * 100})
        assert path.stat().st_size < 600
        assert flight_record.read(path)["records"][-1]["rank"] == rank
    for number in range(30):
        other = path.with_name(f"flagcx-{number}.json")
        flight_record.add(other, {"job": str(number)}, {"rank": 0})
    assert len([*path.parent.iterdir()]) == flight_record.MOST_FILES
    assert flight_record.read(other)["job"] == "29"


def test_a_record_that_was_cut_off_begins_anew(tmp_path):
    path = tmp_path / "flagcx-a.json"
    flight_record.add(path, {"job": "a"}, {"rank": 0})
    path.write_bytes(path.read_bytes()[:-9])
    flight_record.add(path, {"job": "a"}, {"rank": 1})
    assert [record["rank"] for record in flight_record.read(path)["records"]] == [1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "flagcx flight record"}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="flight record"):
        account(path)
    path.write_text(json.dumps({"format": flight_record.FORMAT, "records": [{"at": 1}]}))
    with pytest.raises(ArgumentError, match="another version"):
        account(path)


def test_parts_of_two_hosts_are_told_together(tmp_path):
    here = RankState(0, "a", 5, "sleeps", False, "", (Progress("world", (0, 1), False, 1, "x", "x", 1, 3.0),))
    there = RankState(1, "b", 6, "computes", False, "", (Progress("world", (0, 1), False, 0, ""),))
    common = {"threads": [], "communicators": [], "error": "", "traceback": "", "others": []}
    job = {"job": "j", "size": 2, "script": "s", "hosts": {"0": "a/1", "1": "b/2"}}
    paths = []
    for state in (here, there):
        paths.append(tmp_path / f"flagcx-{state.host}.json")
        record = {"rank": state.rank, "at": 1.0, "reason": "SIGUSR2", "state": state.to_dict(), **common}
        flight_record.add(paths[-1], job, record)
    alone = account(paths[0])
    assert "rank 1 is on another host, which cannot be seen from here." in alone.sentences
    whole = " ".join(account(*paths).sentences)
    assert "rank 0 waits for rank 1 in x of communicator world" in whole
    assert "rank 1 (process 6 on b) itself waits for no rank; it computes" in whole
    flight_record.add(tmp_path / "flagcx-c.json", {**job, "job": "k"}, {"rank": 0})
    with pytest.raises(ArgumentError, match="different jobs"):
        account(paths[0], tmp_path / "flagcx-c.json")


def test_a_look_into_a_store():
    with StoreServer(2) as server:
        first, second = (RemoteStore(server.address, server.authkey, rank, 2) for rank in range(2))
        waits = Waits(first.scoped("world/"), "world", after_s=1.0)
        waits.look(ON_HOST, "barrier", 1, 0.9)
        second.set("secret", b"not shown")
        found = observe(server.address, server.authkey)
        assert found["connected"] == {"0": os.getpid(), "1": os.getpid()} and not found["lost"]
        assert list(found["notes"]) == [f"waits/0/{ON_HOST}"]
        assert json.loads(found["notes"][f"waits/0/{ON_HOST}"])["for"] == 1
        with pytest.raises(BootstrapError):
            observe(server.address, b"wrong", timeout_s=1.0)
        second.abort("it raised ValueError")
        assert observe(server.address, server.authkey)["lost"] == {"1": "it raised ValueError"}
        first.close()
