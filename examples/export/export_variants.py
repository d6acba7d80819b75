#!/usr/bin/env python3
"""Export one model through several ONNX exporters, to see that an importer does not depend on one of them.

    python export_variants.py OUT_DIR

The weights are those of OUT_DIR/{gpt2,mlp}/model.onnx (seed 0), so the data, gradients and reference losses beside
them hold for every variant. Written are

    gpt2/model_torchscript.onnx   TorchScript exporter, opset 17, eager attention (matmul, mask, softmax, matmul)
    gpt2/model_sdpa.onnx          TorchScript exporter, opset 17, scaled_dot_product_attention
    gpt2/model_optimized.onnx     dynamo exporter with its graph optimizer, opset 18: the same function, but not the same
                                  parameters (equal initial values are merged, zero biases dropped, positions folded)
    gpt2/model_opset21.onnx       dynamo exporter, opset 21
    mlp/model_dynamo.onnx         dynamo exporter, opset 18

Each file is run by onnxruntime and compared with PyTorch before it is kept. Needs torch, transformers, onnx,
onnxscript, onnxruntime.
"""
import collections, pathlib, sys
import numpy as np, onnx, onnxruntime, torch
import transformers as hf
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 256), nn.Linear(256, 253), nn.Linear(253, 10)

    def forward(self, x):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Logits(nn.Module):
    """Token ids in, logits out, around a transformers model.

    `mask` passes an attention mask of ones. Without one, transformers looks for packed sequences with `torch.diff`,
    which the TorchScript exporter has no translation for.
    """

    def __init__(self, net, mask):
        super().__init__()
        self.net, self.mask = net, mask

    def forward(self, input_ids):
        mask = torch.ones_like(input_ids) if self.mask else None
        return self.net(input_ids=input_ids, attention_mask=mask).logits


def gpt2(attention, mask=False):
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=257, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
                           attn_pdrop=0, use_cache=False, attn_implementation=attention)
    return Logits(hf.GPT2LMHeadModel(config), mask).train(), ("input_ids", torch.arange(8 * 32).reshape(8, 32) % 257)


def mlp():
    torch.manual_seed(0)
    return Mlp().train(), ("x", torch.linspace(-2, 2, 16 * 784).reshape(16, 784))


def strip_traces(path):
    """Remove the exporter's Python stack traces: they hold paths of this machine, and are most of a small file."""
    model = onnx.load(path)
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key != "pkg.torch.onnx.stack_trace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
        node.doc_string = ""
    onnx.save(model, path)


def torchscript(path, net, name, x, opset):
    torch.onnx.export(net, (x,), path, dynamo=False, opset_version=opset, do_constant_folding=False,
                      training=torch.onnx.TrainingMode.PRESERVE, input_names=[name], output_names=["logits"],
                      dynamic_axes={name: {0: "batch"}, "logits": {0: "batch"}})


def dynamo(path, net, name, x, opset, optimize):
    torch.onnx.export(net, (x,), path, dynamo=True, opset_version=opset, optimize=optimize, external_data=False,
                      input_names=[name], output_names=["logits"], dynamic_shapes=({0: "batch"},))


def check(path, net, name, x):
    """Fail unless the file computes what the module computes, at the traced batch size and another one."""
    onnx.checker.check_model(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for part in (x, x[:3]):
        got = session.run(["logits"], {name: part.numpy()})[0]
        np.testing.assert_allclose(got, net(part).detach().numpy(), rtol=1e-4, atol=1e-5)
    model = onnx.load(path)
    ops = collections.Counter(n.op_type for n in model.graph.node)
    opsets = {o.domain or "ai.onnx": o.version for o in model.opset_import}
    print(path, opsets, f"{sum(ops.values())} nodes", dict(sorted(ops.items())), flush=True)


def main(out):
    out = pathlib.Path(out)
    variants = [
        ("gpt2/model_torchscript.onnx", gpt2("eager", mask=True), lambda *a: torchscript(*a, 17)),
        ("gpt2/model_sdpa.onnx", gpt2("sdpa", mask=True), lambda *a: torchscript(*a, 17)),
        ("gpt2/model_optimized.onnx", gpt2("sdpa"), lambda *a: dynamo(*a, 18, True)),
        ("gpt2/model_opset21.onnx", gpt2("sdpa"), lambda *a: dynamo(*a, 21, False)),
        ("mlp/model_dynamo.onnx", mlp(), lambda *a: dynamo(*a, 18, False)),
    ]
    failed = []
    for path, (net, (name, x)), write in variants:
        path = out / path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(str(path), net, name, x)
            strip_traces(str(path))
            check(str(path), net, name, x)
        except Exception as e:
            path.unlink(missing_ok=True)
            failed.append(path.name)
            print(f"{path}: {type(e).__name__}: {str(e)[:600]}", file=sys.stderr)
    return f"failed: {', '.join(failed)}" if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
