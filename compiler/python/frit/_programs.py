"""The programs ``frit`` and ``frit-run`` of the package."""

import signal
import sys

from frit import _frit


def _run(name):
    # The program handles signals by itself; Python's handler would wait until it has ended.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_frit.program(name, [name, *sys.argv[1:]]))


def frit():
    """The program ``frit``."""
    _run("frit")


def frit_run():
    """The program ``frit-run``."""
    _run("frit-run")
