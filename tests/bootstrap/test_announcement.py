"""Files of jobs that are gone, by any kind of address."""

from __future__ import annotations

import socket

import pytest

from flagcx.bootstrap.announcement import Place, read_file, remove_stale_files, write_file
from flagcx.bootstrap.sockets import format_address, parse_address


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:0", "tcp:[::1]:0", "unix:@flagcx-test-announced"])
def test_files_go_with_the_store_that_they_name(tmp_path, address):
    family, place = parse_address(address)
    with socket.socket(family) as store:
        try:
            store.bind(place)
        except OSError:
            pytest.skip("this machine has no IPv6")
        store.listen()
        write_file(tmp_path / "job.json", Place(format_address(store), b"k" * 16))
        remove_stale_files(tmp_path)
        assert read_file(tmp_path / "job.json")
    remove_stale_files(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"address": "nowhere", "key": "00"}', '{"address": 3, "key": 4}']
)
def test_a_file_that_cannot_be_read_harms_nobody(tmp_path, text):
    (tmp_path / "job.json").write_text(text)
    remove_stale_files(tmp_path)
