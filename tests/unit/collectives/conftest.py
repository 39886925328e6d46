"""Which tests there are on this system."""

import sys

collect_ignore = [] if sys.platform.startswith("linux") else ["test_kernel_counts.py"]  # it reads /proc
