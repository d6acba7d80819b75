#!/usr/bin/env python3
"""Collect ONNX's own node tests of some operators into one file per set: per test the model and its inputs and outputs.
Run in this folder, with the names of sets or none for all; needs onnx, numpy and safetensors."""
import sys

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from safetensors.numpy import save_file

SETS = {"cases": """Acosh ArgMax ArgMin Asinh Atanh Attention Celu Clip Compress CumSum Einsum Elu Erf Expand Gather GatherElements GatherND Gelu GRU
HardSigmoid HardSwish Hardmax IsInf IsNaN LSTM LayerNormalization LeakyRelu LpNormalization MeanVarianceNormalization Mish Mod
NegativeLogLikelihoodLoss OneHot PRelu Pad RMSNormalization RNN ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd ReduceSumSquare
RotaryEmbedding ScatterElements ScatterND Selu Shrink SoftmaxCrossEntropyLoss Softplus Softsign Swish ThresholdedRelu Tile TopK Trilu Where""",
        "images": """AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalMaxPool GroupNormalization
InstanceNormalization LRN LpPool MaxPool Resize SpaceToDepth Upsample""",
        "sampling": """Acos AffineGrid Asin Atan Cosh DFT GridSample MaxUnpool ReverseSequence Sinh Tan"""}
# Operators of which only the first operand depends on data.
ONE_INPUT = ["DFT", "MaxUnpool", "Resize", "Upsample"]
# What these state is rounded to four digits.
ROUNDED = ["test_averagepool_2d_ceil_last_window_starts_on_pad", "test_gridsample_bicubic"]
DTYPES = [np.float32, np.float64, np.int64, np.int32, np.bool_]


def array(value):
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def collect(cases, file, operators, largest):
    tensors = {}
    for case in cases:
        name = case.name
        if name in ROUNDED or "expanded" in name or case.model is None or case.model.graph.node[0].op_type not in operators:
            continue
        model, (inputs, outputs) = onnx.ModelProto.FromString(case.model.SerializeToString()), case.data_sets[0]
        inputs, outputs = [array(v) for v in inputs], [array(v) for v in outputs]
        known = all(isinstance(v, np.ndarray) and v.dtype.type in DTYPES for v in inputs + outputs)
        opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        size = sum(v.nbytes for v in inputs + outputs) if known else 0
        if not known or opset > 24 or len(model.graph.node) != 1 or size > largest:
            continue
        # Integers and flags are known at import, as exporters have them.
        left = []
        for i, (info, value) in enumerate(zip(list(model.graph.input), inputs)):
            fixed = i > 0 and model.graph.node[0].op_type in ONE_INPUT
            if not fixed and (value.dtype == np.float32 and value.ndim > 0 or value.dtype == np.float64):
                tensors[f"{name}/input/{info.name}"] = value
                left.append(info)
            else:
                model.graph.initializer.append(numpy_helper.from_array(value, info.name))
        if not left:
            continue
        del model.graph.input[:]
        model.graph.input.extend(left)
        for info, value in zip(model.graph.output, outputs):
            tensors[f"{name}/output/{info.name}"] = value
        model.doc_string = model.graph.doc_string = ""
        tensors[f"{name}/model"] = np.frombuffer(model.SerializeToString(), dtype=np.uint8)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, f"{file}.safetensors")
    print(len([k for k in tensors if k.endswith("/model")]), "cases in", file)


def main():
    # In one call: later ones find nothing new.
    cases = collect_testcases(None)
    for file, operators in SETS.items():
        if file in sys.argv[1:] or len(sys.argv) == 1:
            collect(cases, file, operators.split(), 8192 if file == "cases" else 65536)


main()
