"""Tensors of any library as arrays that the extension module reads, without copies where the layout allows it."""

from collections.abc import Mapping, Sequence

import numpy as np

from frit._errors import refuse

#: NumPy's types by kind and size, with the names of Frit.
NAMES = {
    "f8": "f64", "f4": "f32", "f2": "f16", "i8": "i64", "i4": "i32", "i2": "i16", "i1": "i8",
    "u8": "u64", "u4": "u32", "u2": "u16", "u1": "u8", "b1": "bool",
}  # fmt: skip


def arrays(batch, inputs, given=()):
    """A batch as the extension module takes it: by name, an array with its type, or words on what is not read.

    ``inputs`` are the inputs of the plan, which a sequence gives in their order; or it gives all that the module was
    ``given``, also what it does not use, and then the labels.
    """
    names = [i["name"] for i in inputs]
    if not isinstance(batch, Mapping):
        batch = _named(batch, names, given)
    dtypes = {i["name"]: i["dtype"] for i in inputs}
    # A name that is no input is not converted: it may be anything.
    return {
        str(name): pair(value, name, dtypes[name]) if name in dtypes else "which no input reads"
        for name, value in batch.items()
    }


def _named(batch, names, given):
    is_sequence = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    unused = [name for name in given if name not in names]
    every = [*given, *(name for name in names if name not in given)]
    for own in (names, every):
        if is_sequence and len(batch) == len(own):
            return dict(zip(own, batch))
    what = f"{len(batch)} values" if is_sequence else f"a {type(batch).__name__}"
    message = f"the batch is {what}, and the plan reads {', '.join(names)}"
    if unused:
        message += f"; the module does not use {', '.join(unused)}"
    raise refuse("E100", message, "give a dict with these names, or one value for each in this order")


def pair(value, name, dtype=None):
    """A C-contiguous little-endian array, and the name of its type. ``dtype`` decides for values that have none."""
    kind = None
    if _is_torch(value):
        value, kind = _of_torch(value, name)
    elif not isinstance(value, np.ndarray):
        value = _as_array(value, name, dtype)
    if value.dtype.byteorder == ">" or (value.dtype.byteorder == "=" and np.little_endian is False):
        value = value.astype(value.dtype.newbyteorder("<"))
    if not value.flags.c_contiguous:
        value = value.copy(order="C")
    kind = kind or NAMES.get(f"{value.dtype.kind}{value.dtype.itemsize}")
    if kind is None and value.dtype.name == "bfloat16":
        value, kind = value.view(np.uint16), "bf16"
    if kind is None:
        raise refuse("E100", f"`{name}` is of {value.dtype}, which no input has", "convert it to a number type")
    return value, kind


def real(value):
    """A complex array or tensor as the pairs of real numbers that a plan has of it; others as they are."""
    if _is_torch(value) and value.is_complex():
        import torch

        return torch.view_as_real(value.detach().resolve_conj())
    if isinstance(value, np.ndarray) and value.dtype.kind == "c":
        return np.stack([value.real, value.imag], axis=-1)
    return value


def _is_torch(value):
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _of_torch(value, name):
    if str(value.layout) != "torch.strided":
        raise refuse("E100", f"`{name}` is sparse", "give it as `.to_dense()`")
    if value.device.type == "meta":
        raise refuse("E100", f"`{name}` has no elements, as it is on the device `meta`", "give it values")
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    value = value.contiguous()
    if str(value.dtype) == "torch.bfloat16":
        import torch

        return value.view(torch.int16).numpy(), "bf16"
    return value.numpy(), None


def _as_array(value, name, dtype):
    """An array of whatever is no tensor of NumPy or torch: DLPack, a buffer, or numbers."""
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__"):
        if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] != 1:
            raise refuse("E100", f"`{name}` is not in the memory of the CPU", "copy it there first")
        return np.from_dlpack(value)
    has_type = hasattr(value, "dtype") or hasattr(value, "__array_interface__") or _is_buffer(value)
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise refuse("E100", f"`{name}` is no tensor: {error}", "pad its rows to one length") from None
    if found.dtype == np.float64 and not has_type and str(dtype).startswith(("f", "bf")):
        # Python's floats have no type of their own.
        found = found.astype(np.float64 if dtype == "f64" else np.float32)
    return found


def _is_buffer(value):
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def restored(kind, shape, memory, framework):
    """A tensor of NumPy or torch on memory that the extension module gave away."""
    if framework == "torch":
        import torch

        types = {
            "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
            "i64": torch.int64, "i32": torch.int32, "u8": torch.uint8, "bool": torch.bool,
        }  # fmt: skip
        if not len(memory):
            return torch.empty(shape, dtype=types[kind])
        return torch.frombuffer(memory, dtype=types[kind]).reshape(shape)
    if kind == "bf16":
        # NumPy has no such type; every value is exact in float32.
        wide = np.frombuffer(memory, dtype="<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    codes = {name: code for code, name in NAMES.items()}
    return np.frombuffer(memory, dtype=np.dtype(codes[kind].replace("b1", "?"))).reshape(shape)
