"""Keyword arguments as configuration: ``key=value`` settings, and TOML for lists of tables."""

import json
import math
import numbers
import os
from collections.abc import Mapping

from frit._errors import refuse

#: What a plain value of an argument sets.
SHORT = {
    "loss": "loss.kind",
    "optimizer": "optimizer.kind",
    "precision": "precision.compute",
    "ranks": "sharding.ranks",
    "schedule": "schedule.kind",
    "strategy": "sharding.strategy",
    "accumulation": "run.accumulation",
    "seed": "run.seed",
    "device": "target.device",
}


def given(config):
    """The file and the options of the argument ``config``: a path, or a dict of options."""
    if config is None:
        return None, {}
    if isinstance(config, Mapping):
        return None, dict(config)
    if isinstance(config, (str, os.PathLike)):
        return os.fspath(config), {}
    message = f"config cannot be a {type(config).__name__}"
    raise refuse("E051", message, "give the path of a train.toml, or a dict of its sections or of `section.key`s")


def settings(options):
    """The settings and the tables of options: sections as dicts, ``{"section.key": value}``, or short names."""
    sets, tables = [], []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            for key, inner in value.items():
                _one(f"{name}.{key}", inner, sets, tables)
        else:
            _one(SHORT.get(name, name), value, sets, tables)
    return sets, "".join(tables)


def _one(key, value, sets, tables):
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
        for table in value:
            lines = [f"{json.dumps(str(k))} = {_toml(key, v)}" for k, v in table.items()]
            tables.append(f"[[{key}]]\n" + "\n".join(lines) + "\n")
    else:
        sets.append(f"{key}={_toml(key, value)}")


def numbers_of(options):
    """The settings of a run, which are numbers: pairs of key and value."""
    pairs = []
    for name, value in options.items():
        found = value.items() if isinstance(value, Mapping) else [(None, value)]
        for key, number in found:
            key = name if key is None else f"{name}.{key}"
            if not _is_number(number):
                message = f"`{key}` of a trainer cannot be {number!r}"
                raise refuse("E051", message, "only numbers can be changed; give the rest to frit.compile")
            pairs.append((key, float(number)))
    return pairs


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _toml(key, value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if _is_number(value):
        x = float(value)
        return repr(x) if math.isfinite(x) else ("nan" if math.isnan(x) else "inf" if x > 0 else "-inf")
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(key, v) for v in value) + "]"
    name = _dtype_name(value)
    if name is not None:
        return json.dumps(name)
    raise refuse("E051", f"`{key}` cannot be {value!r}", "give a text, a number, a boolean, or a list of these")


def _dtype_name(value):
    """The name of torch.bfloat16 and the like."""
    text = str(value)
    known = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    return known.get(text)
