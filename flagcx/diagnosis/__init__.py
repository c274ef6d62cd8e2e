"""Looks into a job: which rank is in which call, and which rank keeps the others waiting.

A rank that waits for five seconds (``FLAGCX_EXPLAIN_WAIT_S``) looks into it: ranks that called different
things on GPUs, or NumPy arrays here and arrays on GPUs there, get a ``MismatchError``; else a warning
(logger ``flagcx``) says which rank waits for which in which call of which communicator. A death is noticed
within two seconds; a rank that doesn't come within ``fc.init(timeout_s=...)`` is named. Between hosts each
message says which call it belongs to, and is checked before its data is used. Nothing stays behind in
/dev/shm: the shared memory has no name.

``flagcx status`` shows the running jobs of this user, ``flagcx status JOB`` the calls of the ranks of one.
A job that fails writes a flight record, which the error names: at a time-out, another error or SIGUSR2
(``FLAGCX_RECORD`` says where; the last 20 stay). ``flagcx doctor FILE.json`` reads it: stacks, last calls
and settings of the ranks. ``flagcx doctor`` removes what killed jobs of Open MPI left in /dev/shm. Over MPI
a lost rank keeps nobody in ``MPI_Finalize``. Through a GPU's peer memory the next call says that a peer is
lost, or ``comm.close()`` if there is none; a CUDA graph of the program's own that goes on being replayed
yields NaN (integers: all bits set).

====================  ==========================================================================
``processes.py``      what the system knows of a process: stopped, sleeping, computing
``jobs.py``           the jobs of this user on this host, found through /proc
``state.py``          where one rank is, from its page and its words in shared memory
``explain.py``        which rank waits for which, in words
``recorder.py``       in each rank: writes its last calls and stacks into the job's flight record
``flight_record.py``  that file: how ranks add to it, and how it is read
``account.py``        what a flight record says, in words
====================  ==========================================================================
"""
