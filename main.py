"""Entry of the command line: `python main.py`, the same as `python launcher_scripts/main.py`."""

import sys

from launcher_scripts.main import main

if __name__ == "__main__":
    sys.exit(main())
