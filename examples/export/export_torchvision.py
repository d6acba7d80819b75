#!/usr/bin/env python3
"""Export torchvision models with both exporters, with PyTorch's reference numbers.

    python export_torchvision.py OUT_DIR [NAME ...]

For each architecture OUT_DIR/NAME/ receives
    torchscript.onnx, dynamo.onnx
                         the forward graph in training mode, no dropout. The dynamo exporter drops training-mode
                         BatchNormalization, so models that have it come from the TorchScript exporter only
    data.safetensors     x [12, 3, 64, 64] and labels [12]
    grads.safetensors    fp64 gradients of the first batch of 4 by parameter name
    reference.json       losses of 3 AdamW steps in fp32, bf16 autocast and fp64
The training setup is that of `frit run` with its default optimizer and schedule. Needs torch, torchvision, onnx,
onnxscript and safetensors.
"""
import copy
import json
import pathlib
import sys
import warnings

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

STEPS, BATCH, SIZE = 3, 4, 64
SWIN = dict(patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10,
            stochastic_depth_prob=0.0)

ARCHITECTURES = {
    "alexnet": lambda: models.alexnet(num_classes=10),
    "convnext": lambda: ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], num_classes=10,
                                 stochastic_depth_prob=0.0),
    "densenet": lambda: models.DenseNet(8, (2, 2, 2), 16, num_classes=10),
    "efficientnet": lambda: models.efficientnet_b0(num_classes=10, stochastic_depth_prob=0.0),
    "googlenet": lambda: models.googlenet(num_classes=10, aux_logits=False, init_weights=True),
    "mnasnet": lambda: models.mnasnet0_5(num_classes=10),
    "mobilenet_v2": lambda: models.mobilenet_v2(num_classes=10, width_mult=0.35),
    "mobilenet_v3": lambda: models.mobilenet_v3_small(num_classes=10),
    "regnet": lambda: models.regnet_y_400mf(num_classes=10),
    "resnet18": lambda: models.resnet18(num_classes=10),
    "resnext": lambda: models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=4),
    "shufflenet": lambda: models.shufflenet_v2_x0_5(num_classes=10),
    "squeezenet": lambda: models.squeezenet1_1(num_classes=10),
    "swin": lambda: SwinTransformer(**SWIN),
    "swin_v2": lambda: SwinTransformer(**SWIN, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2),
    "vgg": lambda: models.vgg11(num_classes=10),
}


def train(net, x, labels, mode):
    net = copy.deepcopy(net).train()
    if mode == "fp64":
        net, x = net.double(), x.double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    losses, first = [], None
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16"):
            out = net(x[part])
            loss = F.cross_entropy(out if mode == "fp64" else out.float(), labels[part])
        loss.backward()
        if step == 0:
            first = {n: p.grad.float().clone() for n, p in net.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def one(out, name):
    torch.manual_seed(0)
    net = ARCHITECTURES[name]().train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, 3, SIZE, SIZE, generator=generator)
    labels = torch.randint(0, 10, (BATCH * STEPS,), generator=generator)
    folder = pathlib.Path(out) / name
    folder.mkdir(parents=True, exist_ok=True)
    reference = {}
    for mode in ("fp32", "bf16", "fp64"):
        losses, first = train(net, x, labels, mode)
        reference[mode] = {"loss": losses}
        if mode == "fp64":
            save_file({k: v.contiguous() for k, v in first.items()}, folder / "grads.safetensors")
    (folder / "reference.json").write_text(json.dumps(reference, indent=1))
    save_file({"x": x, "labels": labels}, folder / "data.safetensors")
    common = dict(input_names=["x"], output_names=["logits"])
    try:
        torch.onnx.export(copy.deepcopy(net), (x[:BATCH],), folder / "torchscript.onnx", dynamo=False, opset_version=17,
                          do_constant_folding=False, training=torch.onnx.TrainingMode.TRAINING,
                          dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}}, **common)
    except torch.onnx.errors.OnnxExporterError as error:
        print(name, "torchscript:", str(error).splitlines()[0])
    if not any(isinstance(module, nn.BatchNorm2d) for module in net.modules()):
        torch.onnx.export(net, (x[:BATCH],), folder / "dynamo.onnx", dynamo=True, optimize=False, external_data=False,
                          dynamic_shapes=({0: "batch"},), **common)
    print(name, "losses", reference["fp64"]["loss"], flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    for name in sys.argv[2:] or ARCHITECTURES:
        one(sys.argv[1], name)
