"""`python -m regard`: the command line."""

import sys

from regard.cli import main
from regard.training.distributed.status import told_to_launcher

if __name__ == "__main__":
    with told_to_launcher():
        sys.exit(main())
