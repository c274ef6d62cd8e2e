"""Which GPU a rank uses, and what is refused: all of it without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flagcx.errors import ArrayError, ResourceError
from flagcx.transport.device import (
    DeviceIdentity,
    address,
    bind_local_device,
    check_devices,
    choose_device,
)


def identity(host: str = "a", uuid: str = "1", nccl: int = 23007, pid: int = 7) -> DeviceIdentity:
    return DeviceIdentity(host, pid, 0, uuid, nccl)


def test_each_local_rank_gets_the_gpu_of_its_number():
    assert [choose_device(r, 4, shared=False) for r in range(4)] == [0, 1, 2, 3]


def test_a_process_that_sees_one_gpu_takes_it():
    assert choose_device(3, 1, shared=False) == 0


def test_ranks_that_share_go_round_the_gpus():
    assert [choose_device(r, 2, shared=True) for r in range(5)] == [0, 1, 0, 1, 0]


def test_more_ranks_than_gpus_are_told_how_to_share():
    with pytest.raises(ResourceError, match=r"local rank 2 needs a GPU of its own.*sees 2.*--share-gpu"):
        choose_device(2, 2, shared=False)


def test_duplicates_are_named():
    devices = [identity(uuid="1"), identity(uuid="2"), identity(uuid="1")]
    with pytest.raises(ResourceError, match=r"ranks 0, 2 use one GPU .*uuid 1.*flagcx run -n 3 --share-gpu"):
        check_devices(devices, shared=False)
    check_devices(devices, shared=True)


def test_one_number_on_two_hosts_is_no_duplicate():
    check_devices([identity(host="a"), identity(host="b")], shared=False)


def test_different_versions_of_nccl_are_refused():
    with pytest.raises(ResourceError, match="rank 0: 23007, rank 1: 22809"):
        check_devices([identity(), identity(uuid="2", nccl=22809)], shared=False)


def test_an_array_on_another_device_is_refused():
    def array(device: int) -> SimpleNamespace:
        return SimpleNamespace(data=SimpleNamespace(device_id=device, ptr=4096))

    order = SimpleNamespace(device=1, rank=3)
    assert address(array(1), order) == 4096 and address(None, order) == 0
    with pytest.raises(ArrayError, match=r"the array is on device 0, but rank 3 uses device 1.*Device\(1\)"):
        address(array(0), order)


def test_an_identity_survives_its_journey():
    assert DeviceIdentity.unpack(identity().pack()) == identity()


def test_binding_needs_nothing_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("flagcx.transport.device._DRIVER", "/dev/null/driver")
    assert bind_local_device(0, shared=False) == 0
    assert bind_local_device(3, shared=False) is None
