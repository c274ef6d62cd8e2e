"""Looks into a job: which rank is in which call, and which rank keeps the others waiting.

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
