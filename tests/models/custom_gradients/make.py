#!/usr/bin/env python3
"""Write model.onnx, a network of functions that name their gradients; data.safetensors; and reference.json, the losses of 20 AdamW
steps in fp64 of the same network of torch.autograd.Function. Run in this folder; needs torch, onnx, onnxscript, safetensors."""
import json

import onnx
import onnxscript
import torch
from onnx import helper, numpy_helper
from onnxscript import opset18 as op
from safetensors.torch import save_file
from torch import nn
from torch.autograd import Function

STEPS, BATCH, PIXELS, WIDTH, CLASSES = 20, 6, 12, 16, 5
LIMIT = 1e-3
mine = onnxscript.values.Opset("mine", 1)


@onnxscript.script(mine)
def round_to(x, scale: float):
    return op.Round(x * op.Constant(value_float=scale)) / op.Constant(value_float=scale)


@onnxscript.script(mine)
def round_to_grad(x, y, dy, scale: float):
    """Straight through."""
    return op.Identity(dy)


@onnxscript.script(mine)
def reverse(x, factor: float = 1.0):
    return op.Identity(x)


@onnxscript.script(mine)
def reverse_grad(x, y, dy, factor: float = 1.0):
    return op.Neg(dy * op.Constant(value_float=factor))


@onnxscript.script(mine)
def log1pexp(x):
    return op.Log(op.Constant(value_float=1.0) + op.Exp(x))


@onnxscript.script(mine)
def log1pexp_grad(x, y, dy):
    """Finite where eˣ is not."""
    return dy * op.Sigmoid(x)


@onnxscript.script(mine)
def clip_gradient(x, limit: float):
    return op.Identity(x)


@onnxscript.script(mine)
def clip_gradient_grad(x, y, dy, limit: float):
    bound = op.Constant(value_float=limit)
    return op.Clip(dy, op.Neg(bound), bound)


@onnxscript.script(mine)
def linear(x, weight, bias):
    """Two results; the gradient of the weight is halved."""
    y = op.MatMul(x, weight) + bias
    return y, mine.reverse(y, factor=0.25)


@onnxscript.script(mine)
def linear_grad(x, weight, bias, y, z, dy, dz):
    total = dy - dz
    dx = op.MatMul(total, op.Transpose(weight, perm=[1, 0]))
    dweight = op.Constant(value_float=0.5) * op.MatMul(op.Transpose(x, perm=[1, 0]), total)
    dbias = op.ReduceSum(total, op.Constant(value_ints=[0]), keepdims=0)
    return dx, dweight, dbias


def functions():
    made = []
    pairs = [(round_to, round_to_grad), (reverse, reverse_grad), (log1pexp, log1pexp_grad),
             (clip_gradient, clip_gradient_grad), (linear, linear_grad)]
    for function, gradient in pairs:
        of, by = function.to_function_proto(), gradient.to_function_proto()
        of.metadata_props.add(key="frit.gradient", value=f"mine::{by.name}")
        if function is log1pexp:
            of.metadata_props.add(key="frit.precision", value="f32")
        made += [of, by]
    return made


class RoundTo(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return -ctx.factor * dy, None


class Log1pExp(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.log(1 + torch.exp(x))

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.sigmoid(ctx.saved_tensors[0])


class ClipGradient(Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-ctx.limit, ctx.limit), None


class Linear(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        y = x @ weight + bias
        return y, y.clone()

    @staticmethod
    def backward(ctx, dy, dz):
        x, weight = ctx.saved_tensors
        total = dy - dz
        return total @ weight.T, 0.5 * x.T @ total, total.sum(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {"fc1": (PIXELS, WIDTH), "fc2": (WIDTH, WIDTH), "fc3": (WIDTH, CLASSES), "fc4": (WIDTH, CLASSES)}
        for name, shape in shapes.items():
            module = nn.Module()
            module.weight = nn.Parameter(0.5 * torch.randn(shape))
            module.bias = nn.Parameter(0.1 * torch.randn(shape[1]))
            self.add_module(name, module)

    def forward(self, x):
        h = Log1pExp.apply(RoundTo.apply(x @ self.fc1.weight + self.fc1.bias, 8.0))
        h = ClipGradient.apply(h, LIMIT)
        y, z = Linear.apply(h, self.fc2.weight, self.fc2.bias)
        h = torch.tanh(y + 0.5 * z)
        # What trains against the rest, and twice as much.
        other = Reverse.apply(h, 2.0) @ self.fc4.weight + self.fc4.bias
        return RoundTo.apply(Reverse.apply(h, -1.0) @ self.fc3.weight + self.fc3.bias, 64.0) + 0.1 * other


def model(net):
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "fc1.weight"], ["a1"], name="/fc1/MatMul"),
        node("Add", ["a1", "fc1.bias"], ["b1"], name="/fc1/Add"),
        node("round_to", ["b1"], ["r1"], domain="mine", scale=8.0, name="/round/round_to"),
        node("log1pexp", ["r1"], ["s1"], domain="mine", name="/act/log1pexp"),
        node("clip_gradient", ["s1"], ["h1"], domain="mine", limit=LIMIT, name="/clip/clip_gradient"),
        node("linear", ["h1", "fc2.weight", "fc2.bias"], ["y2", "z2"], domain="mine", name="/fc2/linear"),
        node("Mul", ["half", "z2"], ["hz"]),
        node("Add", ["y2", "hz"], ["t2"]),
        node("Tanh", ["t2"], ["h2"]),
        node("reverse", ["h2"], ["p"], domain="mine", factor=2.0, name="/other/reverse"),
        node("MatMul", ["p", "fc4.weight"], ["a4"], name="/fc4/MatMul"),
        node("Add", ["a4", "fc4.bias"], ["b4"], name="/fc4/Add"),
        node("reverse", ["h2"], ["q"], domain="mine", factor=-1.0, name="/own/reverse"),
        node("MatMul", ["q", "fc3.weight"], ["a3"], name="/fc3/MatMul"),
        node("Add", ["a3", "fc3.bias"], ["b3"], name="/fc3/Add"),
        node("round_to", ["b3"], ["r3"], domain="mine", scale=64.0, name="/out/round_to"),
        node("Mul", ["tenth", "b4"], ["c4"]),
        node("Add", ["r3", "c4"], ["logits"]),
    ]
    stored = [numpy_helper.from_array(p.detach().numpy(), name) for name, p in net.named_parameters()]
    stored += [helper.make_tensor(name, 1, [], [value]) for name, value in [("half", 0.5), ("tenth", 0.1)]]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "custom_gradients", [value("x", 1, ["batch", PIXELS])],
                              [value("logits", 1, ["batch", CLASSES])], stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    made = helper.make_model(graph, functions=functions(), opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(made)
    return made


torch.manual_seed(0)
net = Net()
onnx.save(model(net), "model.onnx")
inputs, labels = torch.randn(STEPS * BATCH, PIXELS), torch.randint(0, CLASSES, (STEPS * BATCH,))
save_file({"x": inputs, "labels": labels}, "data.safetensors")
net.double()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.01)
losses = []
for at in range(0, STEPS * BATCH, BATCH):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(inputs[at : at + BATCH].double()), labels[at : at + BATCH])
    loss.backward()
    if at == 0:
        save_file({name: p.grad.float().contiguous() for name, p in net.named_parameters()}, "grads.safetensors")
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(float(loss.detach()))
open("reference.json", "w").write(json.dumps({"fp64": {"loss": losses}}, indent=1))
