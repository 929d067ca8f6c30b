"""Entry point: ``python3 -S -E /opt/swe/edit.py COMMAND ARGUMENTS``."""

import sys

import swe_edit

sys.exit(swe_edit.main(sys.argv[1:]))
