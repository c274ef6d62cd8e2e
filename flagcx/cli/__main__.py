"""``python -m flagcx.cli`` is ``flagcx``."""

from flagcx.cli import main

main()
