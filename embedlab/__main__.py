"""``python -m embedlab`` (and ``torchrun -m embedlab``) is the console command."""

import sys

from embedlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
