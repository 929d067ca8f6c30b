"""A pytest plugin that tells the parent process what happened, beside pytest's own summary."""

import os

_FD = int(os.environ.pop("SWE_FACTS_FD", "-1"))


def pytest_runtest_logreport(report):
    """Send one fact per test: its call, or the set-up or tear-down that broke."""
    if report.when == "call" or report.failed:
        event = "P" if report.passed else "E" if report.when != "call" else "F"
        if report.skipped:
            return
        data = (event + "\t" + report.nodeid.replace("\n", " ") + "\n").encode("utf-8", "replace")
        while _FD >= 0 and data:
            data = data[os.write(_FD, data) :]
