"""`python -m engine.cli`: what launched ranks run."""

import sys

from engine.cli.main import main

sys.exit(main())
