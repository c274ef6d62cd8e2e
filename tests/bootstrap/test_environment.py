"""A rank's place in its job, from each launcher's variables, and what contradicts itself."""

import re

import pytest

from flagcx.bootstrap.environment import host_name, identify, launched_by_mpi, of_the_job, without_launchers
from flagcx.errors import BootstrapError

FLAGCX = {
    "FLAGCX_RANK": "2",
    "FLAGCX_SIZE": "6",
    "FLAGCX_LOCAL_RANK": "1",
    "FLAGCX_LOCAL_SIZE": "3",
    "FLAGCX_JOB": "flagcx-7",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-h-1@1",
}
MPICH = {
    "PMI_RANK": "2",
    "PMI_SIZE": "6",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "3",
    "FLAGCX_JOB": "given",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,3,1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "2",
    "MV2_COMM_WORLD_SIZE": "6",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "3",
    "MPIRUN_ID": "77",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "2",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "3",
    "LSB_JOBID": "8",
    "JSM_NAMESPACE_ID": "0",
}
HOROVOD = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "3",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}
PALS = {
    "PALS_RANKID": "2",
    "PMI_SIZE": "6",
    "PMI_RANK": "2",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "3",
    "PALS_APID": "e1",
}
PALS_BY_PMI = {
    "PMI_RANK": "2",
    "PMI_SIZE": "6",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "3",
    "PALS_APID": "e1",
}
FLUX = {
    "FLUX_TASK_RANK": "2",
    "FLUX_JOB_SIZE": "6",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f1",
    "PMI_RANK": "2",
    "PMI_SIZE": "6",
}
LAUNCHERS = {
    "mvapich": (MVAPICH, "mvapich-77"),
    "jsrun": (JSRUN, "jsrun-8-0"),
    "horovod": (HOROVOD, "horovod-4000"),
    "pals": (PALS, "pals-e1"),
    "pals by pmi": (PALS_BY_PMI, "pals-e1"),
    "flux": (FLUX, "flux-f1"),
    "flagcx": (FLAGCX, "flagcx-7"),
    "openmpi": (OPENMPI, "openmpi-prterun-h-1@1"),
    "mpich": (MPICH, "given"),
    "slurm": (SLURM, "slurm-41-0"),
    "torchrun": (TORCHRUN, "torchrun-none-a-29500"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_is_understood(launcher):
    environ, job = LAUNCHERS[launcher]
    me = identify(environ | {"PATH": "/bin", "FLAGCX_TIMEOUT_S": "3"})
    assert (me.rank, me.size, me.local_rank, me.local_size) == (2, 6, 1, 3)
    assert (me.launcher, me.job, me.host) == (launcher.removesuffix(" by pmi"), job, host_name())


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "flagcx"])
def test_flagcx_run_hides_the_launcher_that_it_was_started_by(launcher):
    outer, _ = LAUNCHERS[launcher]
    kept = {"PATH": "/bin", "PMIX_MCA_gds": "hash", "OMPI_MCA_btl": "self", "SLURM_JOB_ID": "41"}
    hidden = without_launchers(outer | kept)
    assert identify(hidden).launcher == "alone"
    assert identify(hidden | FLAGCX).launcher == "flagcx"
    assert kept.items() <= hidden.items()


def test_what_flagcx_run_told_its_rank_is_not_told_to_a_launcher_that_the_rank_starts():
    environ = FLAGCX | {"FLAGCX_STORE_ADDRESS": "a:1", "FLAGCX_STORE_KEY": "00", "FLAGCX_TIMEOUT_S": "3"}
    assert of_the_job(environ) == environ
    assert of_the_job(environ | OPENMPI) == OPENMPI | {"FLAGCX_TIMEOUT_S": "3"}
    assert identify(environ | OPENMPI).job == identify(OPENMPI).job


def test_variables_that_a_script_sets_by_hand_do_not_hide_flagcx_run():
    environ = {"RANK": "1", "WORLD_SIZE": "3"}
    assert (identify(environ | FLAGCX).launcher, identify(environ | FLAGCX).size) == ("flagcx", 6)


@pytest.mark.parametrize(
    "trace",
    ["PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "ALPS_APP_PE", "MPIRUN_RANK", "PMI_ID", "PMI_RANK"],
)
def test_a_launcher_of_which_there_is_a_trace_alone_is_refused(trace):
    with pytest.raises(BootstrapError, match=f"{trace}='0' is set"):
        identify({trace: "0", "PATH": "/bin"})


def test_a_task_of_slurm_that_is_not_told_how_many_there_are_is_refused():
    with pytest.raises(BootstrapError, match="SLURM_PROCID='1' is set, so srun started this process"):
        identify({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})


def test_without_a_launcher_a_rank_is_alone():
    me = identify({"PATH": "/bin"})
    assert (me.rank, me.size, me.local_rank, me.local_size, me.launcher) == (0, 1, 0, 1, "alone")


def test_jobs_of_one_launcher_are_told_apart():
    first, second = identify(OPENMPI), identify(OPENMPI | {"PMIX_NAMESPACE": "prterun-h-2@1"})
    assert first.job != second.job
    assert identify(TORCHRUN).job != identify(TORCHRUN | {"MASTER_PORT": "29501"}).job
    assert identify(SLURM).job != identify(SLURM | {"SLURM_STEP_ID": "1"}).job


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        *((launcher, FLAGCX | {"FLAGCX_RANK": "0"}) for launcher in ("torchrun", "openmpi", "pals", "slurm")),
        ("torchrun", SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
        ("torchrun", OPENMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),
        ("openmpi", SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
        ("mpich", SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_the_inner_launcher_counts_where_one_started_the_other(inner, outer):
    me = identify(outer | LAUNCHERS[inner][0])
    assert (me.launcher, me.rank, me.size) == (inner, 2, 6)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "8"},
        {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ],
    ids=["shell of an allocation", "batch script"],
)
def test_what_slurm_sets_outside_a_step_makes_no_rank(environ):
    assert identify(environ).launcher == "alone"


@pytest.mark.parametrize(
    ("environ", "knows"),
    [
        (SLURM, False),
        (SLURM | {"PMI_RANK": "2", "PMI_SIZE": "6"}, True),
        (SLURM | {"PMIX_RANK": "2"}, True),
        (OPENMPI, True),
        (TORCHRUN, False),
    ],
)
def test_whether_mpi_knows_the_ranks(environ, knows):
    assert launched_by_mpi(identify(environ), environ) is knows


def test_slurm_that_speaks_pmi_is_slurm():
    me = identify(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "6"})
    assert (me.launcher, me.local_size) == ("slurm", 3)


@pytest.mark.parametrize(
    ("text", "index", "expected"),
    [("3", "0", 3), ("4(x2),1", "0", 4), ("4(x2),1", "1", 4), ("4(x2),1", "2", 1)],
)
def test_slurm_lists_of_tasks(text, index, expected):
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": index, "SLURM_STEP_NUM_TASKS": "9"}
    assert identify(environ | {"SLURM_LOCALID": "0"}).local_size == expected


def test_local_names_may_be_missing_for_a_single_rank():
    me = identify({"RANK": "0", "WORLD_SIZE": "1"})
    assert (me.local_rank, me.local_size, me.launcher) == (0, 1, "torchrun")


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            without(OPENMPI, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_RANK='2' is set but OMPI_COMM_WORLD_SIZE is not",
        ),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE='6' is set but RANK is not"),
        (without(FLAGCX, "FLAGCX_SIZE"), "FLAGCX_RANK='2' is set but FLAGCX_SIZE is not"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "WORLD_SIZE=6 are set but LOCAL_WORLD_SIZE is not"),
        (without(MPICH, "MPI_LOCALRANKID"), "PMI_SIZE=6 are set but MPI_LOCALRANKID is not"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_STEP_NUM_TASKS=6 are set but SLURM_LOCALID is not"),
        (TORCHRUN | {"RANK": "two"}, "RANK='two' is not an integer"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE='' is not an integer"),
        (TORCHRUN | {"RANK": "6"}, "RANK=6 is no rank of WORLD_SIZE=6; expected 0 to 5"),
        (FLAGCX | {"FLAGCX_RANK": "-1"}, "FLAGCX_RANK=-1 is no rank of FLAGCX_SIZE=6"),
        (MPICH | {"PMI_SIZE": "0"}, "PMI_SIZE=0 is not a number of ranks"),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "OMPI_COMM_WORLD_LOCAL_RANK=3 contradicts"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "7"}, "LOCAL_WORLD_SIZE=7 contradicts WORLD_SIZE=6"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,x"}, "SLURM_STEP_TASKS_PER_NODE='2,x' cannot be read"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 is not in SLURM_STEP_TASKS_PER_NODE='2,3,1'"),
        (
            without(TORCHRUN, "TORCHELASTIC_RUN_ID") | OPENMPI | {"OMPI_COMM_WORLD_RANK": "3"},
            "RANK=2 and WORLD_SIZE=6 contradict OMPI_COMM_WORLD_RANK=3 and OMPI_COMM_WORLD_SIZE=6",
        ),
        (
            without(TORCHRUN, "TORCHELASTIC_RUN_ID") | MPICH | {"PMI_SIZE": "12"},
            "RANK=2 and WORLD_SIZE=6 contradict PMI_RANK=2 and PMI_SIZE=12",
        ),
        (without(MPICH, "FLAGCX_JOB"), "no hydra process is among its ancestors"),
        (without(MVAPICH, "MPIRUN_ID"), "mvapich started this rank, but no hydra process"),
        (
            FLUX | {"FLUX_JOB_SIZE": "5"},
            "FLUX_JOB_SIZE=5 ranks are spread unevenly over FLUX_JOB_NNODES=2 hosts",
        ),
        (without(FLUX, "FLUX_JOB_SIZE", "PMI_RANK", "PMI_SIZE"), "but FLUX_JOB_SIZE is not"),
    ],
)
def test_partial_and_contradictory_variables_are_named(environ, message):
    with pytest.raises(BootstrapError, match=re.escape(message)):
        identify(environ)


def test_variables_set_by_hand_that_agree_with_mpirun_are_fine():
    environ = OPENMPI | without(TORCHRUN, "TORCHELASTIC_RUN_ID")
    assert identify(environ).rank == 2
