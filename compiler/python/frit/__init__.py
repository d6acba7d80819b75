"""Frit compiles models ahead of time into plans, which train in mixed precision and fully sharded.

>>> plan = frit.compile(module, example_inputs, loss="cross_entropy", precision="bf16", ranks=4)
>>> print(plan)
>>> with plan.trainer(optimizer={"lr": 3e-4}) as trainer:
...     for batch in loader:
...         metrics = trainer.step(batch)
"""

from frit._errors import FritError, FritWarning
from frit._frit import __version__
from frit._plan import Plan, compile, load
from frit._trainer import Trainer

__all__ = ["FritError", "FritWarning", "Plan", "Trainer", "__version__", "compile", "load"]
