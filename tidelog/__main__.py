"""`python -m tidelog`: the same command line as `tidelog`."""

from __future__ import annotations

import sys

from tidelog.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
