"""``python -m frit`` is the program ``frit``."""

from frit._programs import frit

frit()
