"""Entry point: ``python3 -S -E /opt/swe/runner.py tests/test_x.py``."""

import sys

import swe_runner

sys.exit(swe_runner.main(sys.argv[1:]))
