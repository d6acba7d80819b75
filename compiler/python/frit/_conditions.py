"""Conditions of `forward` on values, which no file has: what one depends on, and what to do about it."""

import contextlib
import os
import re
import sys
import traceback
from unittest.mock import patch

from frit._errors import refuse

#: Functions of torch that draw numbers; in place, their names end in an underscore.
DRAWING = re.compile(
    r"(rand|randn|randint|rand_like|randn_like|randint_like|randperm|bernoulli|normal|poisson|binomial|multinomial|_standard_gamma"
    r"|_sample_dirichlet|(alpha_|feature_)?dropout[123]?d?|uniform_|normal_|random_|bernoulli_|exponential_|geometric_|cauchy_|log_normal_)"
)
#: What torch says where a size is a tensor, of which a trace does not know the number.
SIZES = re.compile(r"must be tuple of (Sym)?[Ii]nts?, ?(but got|not) \w*Tensor")
LEAVE_OUT = "take the check out of `forward`: a plan has no conditions on values"
CHOOSE = (
    "choose by torch.where; or leave the condition out, such as `if mask.any()`: where a mask selects nothing, nothing is written"
)


class _Value:
    """Where a value comes from: a tensor that no function made, or the function that made it and its operands."""

    __slots__ = ("function", "is_size", "operands", "tensor")

    def __init__(self, tensor=None, function="", operands=(), is_size=False):
        self.tensor, self.function, self.operands, self.is_size = tensor, function, operands, is_size


class Origins:
    """What the values in a trace of a module are computed from."""

    def __init__(self, torch, module):
        from torch.fx.experimental import symbolic_shapes
        from torch.utils.weak import WeakTensorKeyDictionary

        self._torch, self._module = torch, module
        self._unknown = symbolic_shapes.GuardOnDataDependentSymNode
        self._tensors, self._symbols = WeakTensorKeyDictionary(), {}
        # Tensors of the module have others in their place while it is traced: their names are found in that time.
        self._names = {}

    @contextlib.contextmanager
    def followed(self, func, args, kwargs):
        """Notes what a call is computed from; it gives the results to the list that this yields."""
        results = []
        value = _Value(None, getattr(func, "__name__", ""), [self._value(x) for x in _parts([args, kwargs], self._torch)])
        try:
            yield results
        except self._unknown as error:
            for symbol in getattr(error.cond, "free_symbols", ()):
                self._symbols.setdefault(symbol, value)
            raise
        name = value.function
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__")
        for result in _parts([results, args[:1] if is_in_place else ()], self._torch):
            if isinstance(result, self._torch.Tensor):
                self._tensors[result] = value
                sizes = [size for size in result.shape if isinstance(size, self._torch.SymInt)]
            else:
                sizes = [result]
            made = _Value(None, value.function, value.operands, is_size=isinstance(result, self._torch.Tensor))
            for symbol in (s for size in sizes for s in size.node.expr.free_symbols):
                self._symbols.setdefault(symbol, made)

    def _value(self, part):
        if not isinstance(part, self._torch.Tensor):
            return _Value(operands=[self._symbols[s] for s in part.node.expr.free_symbols if s in self._symbols])
        found = self._tensors.get(part)
        if found is None:
            found = self._tensors[part] = _Value(part)
            if not self._names:
                self._names = dict(self._named())
        return found

    def _named(self):
        """What the tensors of the module are called, by identity."""
        for prefix, part in self._module.named_modules():
            path = f"{prefix}." if prefix else ""
            for kind, tensors in [("constant", vars(part)), ("buffer", part._buffers), ("parameter", part._parameters)]:
                for name, tensor in tensors.items():
                    if isinstance(tensor, self._torch.Tensor):
                        yield id(tensor), f"the {kind} `{path}{name}`"

    def refused(self, expression, place):
        """The error for a condition on an expression of symbols."""
        made = [self._symbols[s] for s in getattr(expression, "free_symbols", ()) if s in self._symbols]
        if any(value.is_size for value in made):
            message = f"a condition depends on how many elements a mask selects{place}"
            remedy = "leave it out where it guards writes or sums, which are nothing of nothing, or choose by torch.where"
            return refuse("E010", message, remedy)
        reached, open_ = set(), list(made)
        named, functions, is_input = [], set(), not made
        while open_:
            value = open_.pop()
            if id(value) in reached:
                continue
            reached.add(id(value))
            functions.add(value.function)
            open_ += value.operands
            if value.tensor is not None:
                # What a trace is given has no values; what it finds elsewhere has.
                unnamed = "a constant" if type(value.tensor) is self._torch.Tensor else None
                name = self._names.get(id(value.tensor), unnamed)
                is_input = is_input or name is None
                named.append(name)
        if is_input:
            message = f"torch cannot export the module: a condition or a size in Python depends on data{place}"
            return refuse("E010", message, CHOOSE)
        if any(DRAWING.fullmatch(name) for name in functions):
            remedy = "set its probability, such as layerdrop, to 0, or choose by torch.where"
            return refuse("E010", f"a condition depends on a random number{place}", remedy)
        what = " and ".join(sorted(set(named), key=lambda n: (n == "a constant", n))[:2]) or "a constant"
        return refuse("E010", f"a condition depends on the values of {what}{place}", LEAVE_OUT)

    def explained(self, error):
        """The error for a condition that torch cannot decide; None for another error."""
        if not isinstance(error, self._unknown):
            return None
        return self.refused(error.cond, place_of(self._torch, error))

    @contextlib.contextmanager
    def no_conditions_on_sizes(self):
        """Refuses conditions of the module on how much a mask selects, which would be decided as if it were always more than one. In
        libraries, such as of two operands of a loss, two such numbers are the same."""
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        torch = self._torch
        own = torch.SymBool.__bool__
        libraries = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))

        def decided(condition):
            caller, expression = sys._getframe(1), condition.node.expr
            place = caller.f_code.co_filename
            if not torch.compiler.is_exporting() or not expression.free_symbols:
                return own(condition)
            if place.startswith(libraries):
                if expression.is_Equality and all(a in free_unbacked_symbols(expression) for a in expression.args):
                    torch._check(condition)
                    return True
            elif os.path.isfile(place):
                raise self.refused(expression, f" ({place}:{caller.f_lineno})")
            return own(condition)

        with patch.object(torch.SymBool, "__bool__", decided):
            yield


def _parts(value, torch):
    """The tensors and numbers of a trace in a structure of lists, tuples and dicts."""
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _parts(part, torch)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _parts(part, torch)


def place_of(torch, error):
    """Where in the user's files an exception was raised, in parentheses, or nothing."""
    ours = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    frames = [f for f in frames if os.path.isfile(f.filename)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
