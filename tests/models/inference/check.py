#!/usr/bin/env python3
"""check.py MODEL DATA OUTPUTS BATCH: checks that MODEL is valid ONNX, and that onnxruntime computes the logits of OUTPUTS
from the first BATCH examples of DATA, in one batch, one by one and with others, with its optimizations and without. Needs
onnx and onnxruntime."""
import json
import sys

import numpy as np
import onnx
import onnxruntime as ort

TYPES = {"F32": np.float32, "I64": np.int64, "I32": np.int32, "BOOL": np.bool_}


def read(file):
    raw = open(file, "rb").read()
    length = int.from_bytes(raw[:8], "little")
    tensors = {k: v for k, v in json.loads(raw[8:8 + length]).items() if k != "__metadata__"}
    data = raw[8 + length:]
    return {k: np.frombuffer(data[v["data_offsets"][0]:v["data_offsets"][1]], TYPES[v["dtype"]]).reshape(v["shape"])
            for k, v in tensors.items()}


model, data, outputs, batch = sys.argv[1:]
batch = int(batch)
onnx.checker.check_model(model, full_check=True)
data, expected = read(data), read(outputs)["logits"][:batch]
scale = max(1.0, float(np.abs(expected).max()))
for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]

    def run(first, last):
        return session.run(["logits"], {n: data[n][first:last] for n in names})[0]

    alone = np.concatenate([run(i, i + 1) for i in range(batch)])
    for what, found in (("together", run(0, batch)), ("alone", alone), ("beside others", run(0, 2 * batch)[:batch])):
        deviation = float(np.abs(found - expected).max()) / scale
        assert deviation < 1e-5, f"{level}, {what}: {deviation}"
