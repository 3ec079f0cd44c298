"""`python -m regard`: the command line."""

import sys

from regard.cli import main
from regard.training.distributed.status import report_status

if __name__ == "__main__":
    with report_status():
        sys.exit(main())
