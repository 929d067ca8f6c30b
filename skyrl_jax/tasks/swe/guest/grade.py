"""Entry point: ``python3 -S -E /opt/swe/grade.py < request``."""

import sys

import swe_grade

sys.exit(swe_grade.main())
