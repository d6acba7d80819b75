#!/usr/bin/env python3
"""Write first values for the weights of a T5 graph, as transformers draws them.

    python3 weights.py MODEL.onnx [--seed 0]

The graph names its weights in a file beside it, which this writes: normal values whose deviation depends on the layer, and
ones for the norms. To fine-tune trained weights instead, leave this out and give them to `frit run --weights`.
Needs numpy and onnx.
"""
import argparse
import math
import pathlib

import numpy as np
import onnx
from onnx.external_data_helper import ExternalDataInfo


def deviation(name, shapes):
    """The standard deviation of a weight; those of projections are `[out, in]`."""
    out, width = shapes[name]
    layer = name.split(".")[-2]
    if layer in ("shared", "embed_tokens", "lm_head"):
        return 1.0
    if layer == "relative_attention_bias":
        model = next(shape[-1] for name, shape in shapes.items() if name.endswith(".q.weight"))
        return model**-0.5
    if layer == "q":
        # T5 does not divide its scores by the root of the head size; its queries begin smaller instead.
        heads = next(shape[1] for name, shape in shapes.items() if name.endswith("relative_attention_bias.weight"))
        return (width * (out // heads))**-0.5
    return width**-0.5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tensors = [t for t in onnx.load(args.model, load_external_data=False).graph.initializer if t.external_data]
    shapes = {t.name: tuple(t.dims) for t in tensors}
    random = np.random.default_rng(args.seed)
    for tensor in tensors:
        shape = shapes[tensor.name]
        values = random.standard_normal(shape, np.float32) * deviation(tensor.name, shapes) if len(shape) == 2 else np.ones(shape)
        place = ExternalDataInfo(tensor)
        path = args.model.with_name(place.location)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(place.offset or 0)
            file.write(values.astype("<f4").tobytes())
    print(f"{sum(map(math.prod, shapes.values()))} weights of {len(shapes)} tensors in {path}")


if __name__ == "__main__":
    main()
