"""What ranks run in the test of test hosts: each prints which one it is, and where."""

import socket

from flagcx.bootstrap.environment import identify
from flagcx.config import environment

me = identify(environment())
print(f"{me.rank} of {me.size} on {socket.gethostname()}")
