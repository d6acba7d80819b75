#!/usr/bin/env python3
"""Collect ONNX's own node tests of some operators into cases.safetensors: per test the model and its inputs and outputs.
Run in this folder; needs onnx, numpy and safetensors."""
import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from safetensors.numpy import save_file

OPERATORS = """Acosh ArgMax ArgMin Asinh Atanh Attention Celu Clip Compress CumSum Einsum Elu Erf Expand Gather GatherElements GatherND Gelu GRU
HardSigmoid HardSwish Hardmax IsInf IsNaN LSTM LayerNormalization LeakyRelu LpNormalization MeanVarianceNormalization Mish Mod
NegativeLogLikelihoodLoss OneHot PRelu Pad RMSNormalization RNN ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd ReduceSumSquare
RotaryEmbedding ScatterElements ScatterND Selu Shrink SoftmaxCrossEntropyLoss Softplus Softsign Swish ThresholdedRelu Tile TopK Trilu Where""".split()
DTYPES = [np.float32, np.float64, np.int64, np.int32, np.bool_]


def array(value):
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def main():
    tensors = {}
    # In one call: later ones find nothing new.
    for case in collect_testcases(None):
        name = case.name
        if "expanded" in name or case.model is None or case.model.graph.node[0].op_type not in OPERATORS:
            continue
        model, (inputs, outputs) = onnx.ModelProto.FromString(case.model.SerializeToString()), case.data_sets[0]
        inputs, outputs = [array(v) for v in inputs], [array(v) for v in outputs]
        known = all(isinstance(v, np.ndarray) and v.dtype.type in DTYPES for v in inputs + outputs)
        opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        size = sum(v.nbytes for v in inputs + outputs) if known else 0
        if not known or opset > 24 or len(model.graph.node) != 1 or size > 8192:
            continue
        # Integers and flags are known at import, as exporters have them.
        left = []
        for info, value in zip(list(model.graph.input), inputs):
            if value.dtype == np.float32 and value.ndim > 0 or value.dtype == np.float64:
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
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, "cases.safetensors")
    print(len([k for k in tensors if k.endswith("/model")]), "cases")


main()
