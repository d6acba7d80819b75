#!/usr/bin/env python3
"""Write outputs.safetensors of the test models: onnxruntime's outputs for the first three examples, for the test that
`frit eval` agrees (tests/suite/eval.rs). Batch normalization uses its running statistics. Run in this folder;
needs numpy, onnx, onnxruntime and safetensors."""
import numpy as np
import onnx
import onnxruntime
from safetensors.numpy import load_file, save_file

MODELS = ["mlp", "gpt2", "llama", "bert", "t5", "vit", "resnet", "unet"]
EXAMPLES = 3


def inference(model):
    """The model with batch normalization as in inference."""
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[1:]
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
    return model


for name in MODELS:
    model = inference(onnx.load(f"{name}/model.onnx"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    data = load_file(f"{name}/data.safetensors")
    feeds = {i.name: data[i.name][:EXAMPLES] for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feeds)))
    save_file({k: np.ascontiguousarray(v) for k, v in outputs.items()}, f"{name}/outputs.safetensors")
    print(name, {k: v.shape for k, v in outputs.items()})
