"""Files that are laid into the sandbox under /opt/swe. Standard library only, no re, no json.

They run as ``python3 -S -E``: a start costs about 8 ms of CPU, and ``json`` or ``re`` would double
that, so they use built-in modules alone.
"""
