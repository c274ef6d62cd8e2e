"""Files from strangers: an error of ours or a topology, in bounded time, whatever is in them."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flagcx.errors import TopologyError
from flagcx.topology import (
    Topology,
    make_plan,
    matrix,
    nccl_xml,
    nccl_xml_write,
    nvidia_smi,
    read,
)
from tests.speed import within
from tests.topology.mutants import TEXT, XML, mangled, read_mutants

FEW = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def read_or_refuse(parse, text):
    """The topology, or None where it was refused with an error of ours; anything else fails the test."""
    try:
        machine = parse(text, "fuzzed")
    except TopologyError as error:
        assert str(error).startswith("fuzzed"), error
        return None
    assert isinstance(machine, Topology)
    matrix(machine)
    return machine


@FEW
@given(st.sampled_from(XML), st.integers(0, 2**32))
def test_mangled_xml(path, seed):
    rng = random.Random(seed)
    text = mangled(path.read_text(), rng)
    machine = read_or_refuse(nccl_xml.parse, text)
    if machine is not None and 1 < len(machine.gpus) <= 8:
        try:
            plan = make_plan(machine)
        except TopologyError:
            return
        assert plan.bandwidth_gb_per_s <= plan.bound_gb_per_s * (1 + 1e-6)
        assert nccl_xml.parse(nccl_xml_write.format_xml(machine)) == machine


@FEW
@given(st.sampled_from(TEXT), st.integers(0, 2**32))
def test_mangled_matrices(path, seed):
    read_or_refuse(nvidia_smi.parse, mangled(path.read_text(), random.Random(seed)))


def test_some_mutants_are_read_or_refused_in_one_line(tmp_path):
    passed, refused = read_mutants(tmp_path / "mutant", range(200))
    assert passed > 40 and refused > 40


@FEW
@given(st.text(max_size=400))
def test_any_text(text):
    read_or_refuse(nccl_xml.parse, text)
    read_or_refuse(nvidia_smi.parse, text)


@FEW
@given(st.binary(max_size=300))
def test_any_bytes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "fuzzed"
    path.write_bytes(data)
    with pytest.raises(TopologyError, match="fuzzed"):
        read(path)


@pytest.mark.parametrize(
    "text",
    [
        '<!DOCTYPE x [<!ENTITY a "' + "a" * 100 + '"><!ENTITY b "' + "&a;" * 100 + '">]><system>&b;</system>',
        '<!DOCTYPE x SYSTEM "file:///etc/passwd"><system version="1"/>',
        '<!DOCTYPE x [<!ENTITY % p SYSTEM "http://localhost/x">%p;]><system/>',
        '<?xml version="1.0"?><system version="1">&undefined;</system>',
        "<system version='1'>" + "<cpu>" * 5000,
        "<system>" + "<a/>" * 200_000 + "</system>",
        '<system version="1"><cpu ' + " ".join(f'a{n}="1"' for n in range(20_000)) + "></cpu></system>",
    ],
    ids=["entities", "external", "parameter", "undefined", "deep", "many", "attributes"],
)
def test_bombs_are_refused_or_read_in_bounded_time(text):
    with within(5):
        read_or_refuse(nccl_xml.parse, text)


def test_a_matrix_of_too_many_columns_is_refused():
    names = [f"GPU{n}" for n in range(600)]
    with pytest.raises(TopologyError, match="600 columns of which some repeat, or over 128"):
        nvidia_smi.parse(" ".join(names) + "\n")


def test_a_large_machine_reads_in_bounded_time():
    inside = "".join(
        f'<pci busid="{n:04x}:00:00.0" class="0x030000"><gpu dev="{n}" sm="80"/></pci>' for n in range(2000)
    )
    with within(5):
        machine = nccl_xml.parse(f'<system version="1"><cpu numaid="0">{inside}</cpu></system>')
    assert len(machine.gpus) == 2000
