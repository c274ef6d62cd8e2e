"""Which algorithm runs, and why.

Without a table of ``flagcx tune`` the choice is a rule by size on hosts. On GPUs it is the fastest by a
model of peer memory and of NCCL, and where neither serves, by the model of the machine's links. All ranks
choose alike: rank 0's table decides. What a job learns by rare trials is written back to the table at its
end, by a factor of 2 at most. ``FLAGCX_DETERMINISTIC=1`` leaves the choice to the rule alone. Two
algorithms may share one operation: ``algorithm="ring|double_binary_tree"``, or ``"ring 3/4|two_shot"``;
``"ring|ring"`` goes round both ways. ``comm.explain`` and ``flagcx explain`` say what would run: for each
candidate steps, bytes sent, busiest link, predicted and measured time, or why it is not possible.
"""
