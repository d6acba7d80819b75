"""Compares losses, and gradients tensor by tensor, with what the CPU made of the same plan. Needs the standard library only.

As a program it clears the lowest BITS of every number of a file of gradients, so that it compresses well:
tensors.py FILE.safetensors BITS
"""

import array
import json
import math
import sys


def read_f32(path):
    """The tensors of a safetensors file in f32: name to shape and values."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header, body = json.loads(file.read(size)), file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: `{name}` is {entry['dtype']}, not F32")
        begin, end = entry["data_offsets"]
        tensors[name] = (entry["shape"], array.array("f", body[begin:end]))
    return tensors


def position(index, shape):
    """The indices along each axis."""
    found = []
    for size in reversed(shape):
        found.append(index % size)
        index //= size
    return found[::-1]


def compare(found, expected):
    """Norm of the difference of all tensors over the norm of what is expected, and the worst tensor: its largest error over
    its largest magnitude, and where that is."""
    found, expected = read_f32(found), read_f32(expected)
    if found.keys() != expected.keys():
        missing = sorted(found.keys() ^ expected.keys())
        return math.inf, {"name": missing[0], "error": math.inf, "at": [], "found": None, "expected": None}
    squares, norm, worst = 0.0, 0.0, None
    for name, (shape, b) in expected.items():
        a = found[name][1]
        differences = [abs(x - y) for x, y in zip(a, b)]
        squares += math.fsum(d * d for d in differences)
        norm += math.fsum(y * y for y in b)
        # A NaN is larger than any number.
        at = max(range(len(b)), key=lambda i: math.inf if differences[i] != differences[i] else differences[i], default=None)
        if at is None:
            continue
        largest = max(map(abs, b)) or 1.0
        error = math.inf if differences[at] != differences[at] else differences[at] / largest
        if worst is None or error > worst["error"]:
            worst = {"name": name, "error": error, "at": position(at, shape), "found": a[at], "expected": b[at]}
    deviation = math.sqrt(squares / norm) if norm else math.inf
    return (math.inf if math.isnan(deviation) else deviation), worst


def losses(lines):
    """Those of the steps, and where there are any those of validation."""
    return [line["loss"] if "loss" in line else line["validation_loss"] for line in lines]


def largest_deviation(found, expected):
    """Over the size of what is expected, and of which step; infinite if anything is missing or no number."""
    if len(found) != len(expected) or not found:
        return math.inf, min(len(found), len(expected))
    deviations = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected)]
    deviations = [math.inf if math.isnan(d) else d for d in deviations]
    step = max(range(len(deviations)), key=deviations.__getitem__)
    return deviations[step], step


def mean_deviation(found, expected):
    if len(found) != len(expected) or not found:
        return math.inf
    return sum(abs(a - b) / abs(b) for a, b in zip(found, expected)) / len(found)


def clear(path, bits):
    """Sets the lowest bits of every f32 to zero, which changes it by less than 2^(bits - 23) of itself."""
    with open(path, "rb") as file:
        head = file.read(8)
        head += file.read(int.from_bytes(head, "little"))
        words = array.array("I", file.read())
    mask = -1 << bits & 0xFFFFFFFF
    cleared = array.array("I", (word & mask for word in words))
    with open(path, "wb") as file:
        file.write(head + cleared.tobytes())


if __name__ == "__main__":
    clear(sys.argv[1], int(sys.argv[2]))
