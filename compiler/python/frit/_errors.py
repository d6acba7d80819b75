"""The exception and the warning of the package."""

import warnings


class FritError(Exception):
    """Something that must be changed, or a run that failed.

    The message is that of the program ``frit``. ``diagnostics`` has every problem that was found; the other attributes
    are those of the first one.
    """

    def __init__(self, message, diagnostics=()):
        super().__init__(message)
        first = diagnostics[0] if diagnostics else {}
        #: All problems, as dicts with the keys code, message, node, scope, remedy and notes.
        self.diagnostics = list(diagnostics)
        #: The stable code, such as "E031"; ``frit explain CODE`` says more.
        self.code = first.get("code")
        #: The node of the model, or None.
        self.node = first.get("node")
        #: The module that the node is in, or None.
        self.scope = first.get("scope")
        #: What to do, or None.
        self.remedy = first.get("remedy")
        #: Facts that help to understand it.
        self.notes = first.get("notes", [])

    def __str__(self):
        message = super().__str__()
        return f"[{self.code}] {message}" if self.code else message


class FritWarning(UserWarning):
    """Something that works, but probably not as meant."""


def refuse(code, message, remedy, node=None):
    """A FritError of the package itself."""
    one = {"code": code, "message": message, "node": node, "scope": None, "remedy": remedy, "notes": []}
    return FritError(f"{message}; {remedy}", [one])


def warn(text, stacklevel):
    """Warns the caller's caller, or further out."""
    warnings.warn(text, FritWarning, stacklevel=stacklevel + 1)
