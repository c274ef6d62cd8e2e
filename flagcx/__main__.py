"""``python -m flagcx`` is ``flagcx``."""

from flagcx.cli import main

main()
