"""``flagcx topo``, by its function in a small application of our own."""

import json

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli.topo import topo
from flagcx.topology import matrix, nccl_xml, preset
from tests.topology.machines import FIXTURES


@pytest.fixture
def call():
    application = typer.Typer()
    application.command()(topo)
    return lambda *arguments: CliRunner().invoke(application, [str(argument) for argument in arguments])


def test_this_machine(call):
    result = call()
    assert result.exit_code == 0 and "Topology " in result.stdout


def test_a_preset_as_text_json_and_xml(call):
    text = call("--preset", "dgx-1v")
    assert "GPU0  " in text.stdout and "60.6% of the bound" in text.stdout
    values = json.loads(call("--preset", "dgx-1v", "--json").stdout)
    assert values["matrix"] == matrix(preset("dgx-1v"))
    xml = call("--preset", "dgx-1v", "--xml").stdout
    assert matrix(nccl_xml.parse(xml)) == matrix(preset("dgx-1v"))


@pytest.mark.parametrize("name", ["switched_4.xml", "pairs_tabs_8.txt"])
def test_files_of_both_kinds(call, name):
    result = call("--file", FIXTURES / name, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["plan_gb_per_s"] > 0


def test_a_file_that_names_no_gpu(call):
    result = call("--file", FIXTURES / "classless.xml", "--json")
    assert json.loads(result.stdout)["plan_gb_per_s"] is None


def test_hosts_and_gpus(call):
    values = json.loads(call("--preset", "dgx-a100", "--hosts", 2, "--gpus", "0-1,8,9", "--json").stdout)
    assert sorted(values["rings"][0]["order"]) == [0, 1, 8, 9]


def test_a_paste_with_what_it_cannot_tell(call, tmp_path):
    (tmp_path / "post.md").write_text("> GPU0 GPU1\n> GPU0 X NV18\n> GPU1 NV18 X\n", encoding="utf-8")
    found = ("--file", tmp_path / "post.md")
    guessed, named = call(*found), call(*found, "--gpu-model", "b300")
    assert "name the model (--gpu-model, --sm)" in guessed.stdout and "370.80 GB/s" in guessed.stdout
    assert "721.80 GB/s" in named.stdout and named.stdout == call(*found, "--sm", 103).stdout
    assert "--network-gb-per-s" in call(*found, "--hosts", 2).stderr
    joined = call(*found, "--hosts", 2, "--network-gb-per-s", 25)
    assert joined.exit_code == 0 and "each host is taken to have one of 25 GB/s each way" in joined.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sm", 90, "--gpu-model", "H100"), "--sm and --gpu-model were both given"),
        (("--sm", 9), "--sm 9 is no compute capability times ten"),
        (("--gpu-model", "K9"), "GPU model 'K9' is not known"),
        (("--sm", 90), "are about a file that does not name its GPUs, and dgx-1v does"),
        (("--network-gb-per-s", 25), "is about the network between hosts, and this is one host"),
    ],
)
def test_models_that_make_no_sense(call, arguments, message):
    result = call("--preset", "dgx-1v", *arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_a_picture_beside_the_rest(call, tmp_path):
    pytest.importorskip("matplotlib")
    result = call("--preset", "4xpcie", "--json", "--plot", tmp_path / "out.svg")
    assert json.loads(result.stdout)["name"] == "4xpcie"
    assert (tmp_path / "out.svg").exists() and "drawn to" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "none"), "no preset 'none'; there are 8xa100-pcie"),
        (("--file", FIXTURES / "graph_file.xml"), "this is an NCCL graph file"),
        (("--file", FIXTURES / "cut_short.xml"), "not well-formed XML"),
        (("--file", "/none"), "cannot be opened as a topology"),
        (("--file", "a", "--preset", "b"), "--file and --preset were both given"),
        (("--preset", "dgx-1v", "--json", "--xml"), "--json and --xml were both given"),
        (("--preset", "dgx-1v", "--gpus", "1-x"), "--gpus '1-x': '1-x' is not a number or a range"),
        (("--preset", "dgx-1v", "--gpus", "0-999999"), "names over 65536 GPUs"),
        (("--preset", "dgx-1v", "--gpus", "9"), "no GPU 9"),
        (("--preset", "dgx-1v", "--plot", "a.gif"), "cannot draw to '.gif'"),
        (("--preset", "dgx-1v", "--hosts", "0"), "hosts is 0"),
    ],
)
def test_mistakes_are_told_in_a_line_with_exit_code_2(call, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.stderr
