"""The digits example: its gradients are right, its parts add up, and it runs under every launcher."""

import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_digits.py"


def load_script(source):
    """The example as a module, from its text."""
    module = types.ModuleType("train_digits")
    exec(compile(source, str(SCRIPT), "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def example():
    return load_script(SCRIPT.read_text())


@pytest.fixture(scope="module")
def pictures(example):
    return example.load_pictures(np, seed=0)


def mean_loss(network, pixels, labels):
    scores = network.forward(pixels)[-1].astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    log_likelihood = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return -log_likelihood[np.arange(len(labels)), labels].mean()


def slope_by_differences(network, position, pixels, labels, step=1e-2):
    """The slope of the mean loss along one parameter, without back-propagation."""
    original = network.parameters[position]
    losses = []
    for value in (original + step, original - step):
        network.parameters[position] = value
        losses.append(mean_loss(network, pixels, labels))
    network.parameters[position] = original
    return (losses[0] - losses[1]) / (2 * step)


def gradient_and_differences(example, pictures):
    """The gradient at 60 parameters by back-propagation, and the same by differences."""
    pixels, labels = (array[:50] for array in pictures[0])
    network = example.Network(np, seed=1)
    network.backward(pixels, labels, batch=50)
    positions = np.random.default_rng(2).choice(network.parameters.size, 50, replace=False)
    positions = [*positions, *range(network.parameters.size - 10, network.parameters.size)]  # last biases
    differences = [slope_by_differences(network, position, pixels, labels) for position in positions]
    return network.gradient[positions], np.array(differences)


def test_gradient_is_the_slope_of_the_loss(example, pictures):
    gradient, differences = gradient_and_differences(example, pictures)
    np.testing.assert_allclose(gradient, differences, atol=1e-4)
    assert abs(differences).max() > 1e-2  # or else zeros would do


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(1 - values**2)", "(1 - values)"),
        ("gradient[-1] = slope.sum(axis=0)", "gradient[-1] = slope.mean(axis=0)"),
        ("weights[:-1].T", "abs(weights[:-1].T)"),
        ("/ xp.float32(batch)", "/ xp.float32(batch + 1)"),
    ],
)
def test_wrong_back_propagation_is_noticed(pictures, right, wrong):
    source = SCRIPT.read_text()
    assert right in source
    mutant = load_script(source.replace(right, wrong))
    gradient, differences = gradient_and_differences(mutant, pictures)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(gradient, differences, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_parts_of_any_number_of_ranks_add_up_to_the_batch(example, pictures, size, batch):
    pixels, labels = (array[:batch] for array in pictures[0])
    network = example.Network(np, seed=3)
    network.backward(pixels, labels, batch)
    whole = network.gradient.copy()
    total = np.zeros_like(whole)
    for rank in range(size):  # with more ranks than pictures, some have none
        network.backward(pixels[rank::size], labels[rank::size], batch)
        total += network.gradient
    np.testing.assert_allclose(total, whole, atol=1e-6)


def test_each_epoch_has_every_row_once_and_the_same_on_all_ranks(example):
    steps = list(example.batches(count=10, batch=4, epochs=2, seed=5))
    assert [len(rows) for rows in steps] == [4, 4, 2] * 2
    for epoch in (steps[:3], steps[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(10))
    assert all(map(np.array_equal, steps, example.batches(count=10, batch=4, epochs=2, seed=5)))


def run(*command):
    """Runs a command in the checkout and returns its exit code and its output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def check_summary(output, ranks):
    """What the closing summary must say."""
    assert float(re.search(r"held-out accuracy +([\d.]+)%", output)[1]) >= 96
    assert f"parameters         equal on {ranks} ranks" in output
    assert re.search(r"time +([\d.]+) s", output)
    assert float(re.search(r"parameters within (\S+) of", output)[1]) <= 1e-4


@pytest.mark.slow
def test_flagcx_run_learns_what_one_rank_learns():
    code, output = run(sys.executable, "-m", "flagcx.cli", "run", "-n", 3, SCRIPT, "--check")
    assert code == 0, output
    check_summary(output, ranks=3)


@pytest.mark.exhaustive
def test_overlap_learns_what_one_rank_learns():
    code, output = run(sys.executable, "-m", "flagcx.cli", "run", "-n", 2, SCRIPT, "--check", "--overlap")
    assert code == 0, output
    check_summary(output, ranks=2)


@pytest.mark.exhaustive
def test_alone():
    code, output = run(sys.executable, SCRIPT, "--check")
    assert code == 0, output
    check_summary(output, ranks=1)


@pytest.mark.exhaustive
def test_mpirun_learns_what_one_rank_learns():
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python; the extra 'test' brings Open MPI's")
    flags = ["--allow-run-as-root", "--oversubscribe"]
    code, output = run(mpirun, *flags, "-n", 2, sys.executable, SCRIPT, "--check")
    assert code == 0, output
    check_summary(output, ranks=2)


LOSSY = """
import runpy, sys
import flagcx as fc

allreduce = fc.Communicator.allreduce

def lossy(self, x, *arguments, **options):
    if self.rank == 1 and self.size == 2:
        x[...] = 0
    return allreduce(self, x, *arguments, **options)

fc.Communicator.allreduce = lossy
sys.argv = [sys.argv[1], "--check"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.exhaustive
def test_check_fails_where_a_contribution_is_lost(tmp_path):
    script = tmp_path / "lossy.py"
    script.write_text(LOSSY)
    code, output = run(sys.executable, "-m", "flagcx.cli", "run", "-n", 2, script, SCRIPT)
    assert code == 1, output
    assert float(re.search(r"parameters within (\S+) of", output)[1]) > 1e-4
