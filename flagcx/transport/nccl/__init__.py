"""GPU arrays over NCCL.

=============  ========================================================================
``transport``  ``NcclTransport``, one communicator's transport
``plans``      compiled calls, and their CUDA graphs
``steps``      a schedule's program in elements of device memory
``native``     which calls NCCL's own collectives carry
``binding``    one NCCL communicator; the only module that calls ``cupy.cuda.nccl``
=============  ========================================================================
"""
