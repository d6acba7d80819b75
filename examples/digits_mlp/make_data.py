#!/usr/bin/env python3
"""Write the UCI digits as data.safetensors (1536 examples) and validation.safetensors (the other 261).

    python make_data.py

`x` is f32 [n, 64], the 8 x 8 pixels of a handwritten digit scaled to 0..1; `labels` is i64 [n]. The order is shuffled
with a fixed seed. Needs scikit-learn, which ships the data set, and safetensors.
"""
import pathlib
import numpy as np
from safetensors.numpy import save_file
from sklearn.datasets import load_digits

N_TRAIN = 1536


def main():
    here = pathlib.Path(__file__).parent
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    x = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int64)
    for name, part in (("data", slice(0, N_TRAIN)), ("validation", slice(N_TRAIN, None))):
        tensors = {"x": np.ascontiguousarray(x[part]), "labels": np.ascontiguousarray(labels[part])}
        save_file(tensors, here / f"{name}.safetensors")
        print(name, {k: v.shape for k, v in tensors.items()})


if __name__ == "__main__":
    main()
