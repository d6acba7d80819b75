#!/usr/bin/env python3
"""Writes the JSON models of this folder: GPT-2 in three published sizes, BERT-large, ResNet-50, and for checks of
kernels one model with attention of many head sizes and one with the operations that no given model has.

Their weights are made from the seed when a plan is run, so that neither model nor plan holds any. `--tiny DIR` writes
models of the same kinds that train on a CPU in no time, for tests of check.sh. `--tokens FILE VOCAB` writes tokens that
are as frequent as words of a language: few of them often, most seldom.

Usage: make_models.py [--tiny DIR | --tokens FILE VOCAB]
"""

import array
import itertools
import json
import pathlib
import random
import sys

# Sizes by model; what peer.py builds for PyTorch is made from the same.
MODELS = {
    "gpt2_124m": {"kind": "gpt2", "layers": 12, "width": 768, "heads": 12, "seq": 1024, "vocab": 50257},
    "gpt2_774m": {"kind": "gpt2", "layers": 36, "width": 1280, "heads": 20, "seq": 1024, "vocab": 50257},
    "gpt2_1558m": {"kind": "gpt2", "layers": 48, "width": 1600, "heads": 25, "seq": 1024, "vocab": 50257},
    "bert_large": {"kind": "bert", "layers": 24, "width": 1024, "heads": 16, "seq": 512, "vocab": 30522},
    "resnet50": {"kind": "resnet", "blocks": [3, 4, 6, 3], "width": 64, "image": 224, "classes": 1000},
    "attention_heads": {"kind": "attention", "head_sizes": [16, 32, 64, 80, 96, 128, 192, 256], "seq": 200, "vocab": 257},
    "operations": {"kind": "operations", "seq": 37, "vocab": 257},
}
TINY = {
    "gpt2_tiny": {"kind": "gpt2", "layers": 2, "width": 48, "heads": 3, "seq": 32, "vocab": 257},
    "bert_tiny": {"kind": "bert", "layers": 2, "width": 32, "heads": 2, "seq": 24, "vocab": 131},
    "resnet_tiny": {"kind": "resnet", "blocks": [1, 1, 1, 1], "width": 8, "image": 32, "classes": 10},
}


def normal(std):
    return {"normal": {"std": round(std, 6)}}


def param(name, *shape, init=None):
    return {"name": name, "shape": list(shape)} | ({"init": init} if init else {})


def node(op, inputs, outputs, scope=None, **attrs):
    entry = {"op": op, "inputs": inputs, "outputs": outputs}
    return entry | ({"scope": scope} if scope else {}) | ({"attrs": attrs} if attrs else {})


def linear(scope, x, name, out):
    return [
        node("matmul", [x, f"{name}.weight"], [f"{out}_product"], scope),
        node("add", [f"{out}_product", f"{name}.bias"], [out], scope),
    ]


def norm(scope, x, name, out, eps=1e-5):
    return node("layer_norm", [x, f"{name}.weight", f"{name}.bias"], [out, "_", "_"], scope, axis=2, eps=eps)


def weight(name, rows, columns, std=0.02):
    return [param(f"{name}.weight", rows, columns, init=normal(std)), param(f"{name}.bias", columns)]


def norm_params(name):
    return [param(f"{name}.weight", "width", init="ones"), param(f"{name}.bias", "width")]


def heads(scope, pairs):
    """[batch, seq, width] to [batch, heads, seq, width/heads]."""
    nodes = []
    for x, out in pairs:
        shape = ["batch", "seq", "heads", "width/heads"]
        nodes.append(node("reshape", [x], [f"{out}4"], scope, shape=shape))
        nodes.append(node("transpose", [f"{out}4"], [out], scope, perm=[0, 2, 1, 3]))
    return nodes


def attention(scope, width, n_heads, **attrs):
    """q, k, v to y: [batch, seq, width]."""
    return [
        node("attention", ["q", "k", "v"], ["y4", "_"], scope, scale=(width // n_heads) ** -0.5, **attrs),
        node("transpose", ["y4"], ["y_heads"], scope, perm=[0, 2, 1, 3]),
        node("reshape", ["y_heads"], ["y"], scope, shape=["batch", "seq", "width"]),
    ]


def model(name, dims, inputs, params, nodes):
    return {
        "frit_model": 1, "name": name, "dims": dims, "inputs": inputs, "params": params, "nodes": nodes,
        "outputs": ["logits"],
    }


TOKENS = [{"name": "input_ids", "dtype": "i64", "shape": ["batch", "seq"]}]


def gpt2(name, layers, width, n_heads, seq, vocab):
    residual = 0.02 / (2 * layers) ** 0.5
    block = {
        "repeat": "layers",
        "scope": "transformer.h.{i}",
        "carry": ["h"],
        "params": [
            *norm_params("ln_1"),
            *weight("attn.c_attn", "width", "3*width"),
            *weight("attn.c_proj", "width", "width", residual),
            *norm_params("ln_2"),
            *weight("mlp.c_fc", "width", "4*width"),
            *weight("mlp.c_proj", "4*width", "width", residual),
        ],
        "nodes": [
            norm("ln_1", "h", "ln_1", "n1"),
            *linear("attn", "n1", "attn.c_attn", "qkv"),
            node("split", ["qkv"], ["q3", "k3", "v3"], "attn", axis=2, sizes=["width"] * 3),
            *heads("attn", [("q3", "q"), ("k3", "k"), ("v3", "v")]),
            *attention("attn", width, n_heads, causal=True),
            *linear("attn", "y", "attn.c_proj", "attn_out"),
            node("add", ["h", "attn_out"], ["middle"]),
            norm("ln_2", "middle", "ln_2", "n2"),
            *linear("mlp", "n2", "mlp.c_fc", "fc"),
            node("gelu_tanh", ["fc"], ["act"], "mlp"),
            *linear("mlp", "act", "mlp.c_proj", "mlp_out"),
            node("add", ["middle", "mlp_out"], ["h"]),
        ],
    }
    params = [
        param("transformer.wte.weight", "vocab", "width", init=normal(0.02)),
        param("transformer.wpe.weight", "seq", "width", init=normal(0.02)),
        *norm_params("transformer.ln_f"),
    ]
    nodes = [
        node("embedding", ["transformer.wte.weight", "input_ids"], ["tokens"], "transformer.wte"),
        node("add", ["tokens", "transformer.wpe.weight"], ["h"], "transformer.wpe"),
        block,
        norm("transformer.ln_f", "h", "transformer.ln_f", "n"),
        node("matmul", ["n", "transformer.wte.weight"], ["logits"], "lm_head", trans_b=True),
    ]
    dims = {"batch": None, "seq": seq, "layers": layers, "width": width, "heads": n_heads, "vocab": vocab}
    return model(name, dims, TOKENS, params, nodes)


def bert(name, layers, width, n_heads, seq, vocab):
    """The encoder with the head that predicts masked tokens, without padding and with one kind of segment."""
    def dense(scope, x, out):
        return linear(scope, x, scope, out)

    block = {
        "repeat": layers,
        "scope": "bert.encoder.layer.{i}",
        "carry": ["h"],
        "params": [
            *(p for x in ("query", "key", "value") for p in weight(f"attention.self.{x}", "width", "width")),
            *weight("attention.output.dense", "width", "width"),
            *norm_params("attention.output.LayerNorm"),
            *weight("intermediate.dense", "width", "4*width"),
            *weight("output.dense", "4*width", "width"),
            *norm_params("output.LayerNorm"),
        ],
        "nodes": [
            *(n for x in ("query", "key", "value") for n in dense(f"attention.self.{x}", "h", f"{x}3")),
            *heads("attention.self", [("query3", "q"), ("key3", "k"), ("value3", "v")]),
            *attention("attention.self", width, n_heads),
            *dense("attention.output.dense", "y", "attended"),
            node("add", ["h", "attended"], ["sum1"], "attention.output"),
            norm("attention.output.LayerNorm", "sum1", "attention.output.LayerNorm", "n1", 1e-12),
            *dense("intermediate.dense", "n1", "wide"),
            node("gelu", ["wide"], ["act"], "intermediate"),
            *dense("output.dense", "act", "narrow"),
            node("add", ["n1", "narrow"], ["sum2"], "output"),
            norm("output.LayerNorm", "sum2", "output.LayerNorm", "h", 1e-12),
        ],
    }
    words, places = "bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"
    embedded, head = "bert.embeddings.LayerNorm", "cls.predictions.transform"
    params = [
        param(f"{words}.weight", "vocab", "width", init=normal(0.02)),
        param(f"{places}.weight", "seq", "width", init=normal(0.02)),
        *norm_params(embedded),
        *weight(f"{head}.dense", "width", "width"),
        *norm_params(f"{head}.LayerNorm"),
        param("cls.predictions.bias", "vocab"),
    ]
    nodes = [
        node("embedding", [f"{words}.weight", "input_ids"], ["words"], words),
        node("add", ["words", f"{places}.weight"], ["placed"], places),
        norm(embedded, "placed", embedded, "h", 1e-12),
        block,
        *linear(f"{head}.dense", "h", f"{head}.dense", "t"),
        node("gelu", ["t"], ["ta"], head),
        norm(f"{head}.LayerNorm", "ta", f"{head}.LayerNorm", "tn", 1e-12),
        node("matmul", ["tn", f"{words}.weight"], ["scores"], "cls.predictions", trans_b=True),
        node("add", ["scores", "cls.predictions.bias"], ["logits"], "cls.predictions"),
    ]
    dims = {"batch": None, "seq": seq, "width": width, "heads": n_heads, "vocab": vocab}
    return model(name, dims, TOKENS, params, nodes)


def resnet(name, blocks, width, image, classes):
    """Bottleneck blocks whose 3x3 convolution has the stride, batch norm with the statistics of the batch."""
    params, nodes, made = [], [], 0

    def convolve(x, scope, bn, channels_in, channels, taps, stride, relu=True):
        nonlocal made
        made += 1
        y, half = f"c{made}", taps // 2
        params.append(param(f"{scope}.weight", channels, channels_in, taps, taps,
                            init=normal((2 / (channels * taps * taps)) ** 0.5)))
        params.extend([param(f"{bn}.weight", channels, init="ones"), param(f"{bn}.bias", channels)])
        window = {"strides": [stride] * 2, "dilations": [1, 1], "low": [half] * 2, "high": [half] * 2}
        nodes.append(node("conv", [x, f"{scope}.weight"], [y], scope, window=window, groups=1))
        nodes.append(node("batch_norm", [y, f"{bn}.weight", f"{bn}.bias"], [f"{y}n", "_", "_"], bn, eps=1e-5))
        if relu:
            nodes.append(node("relu", [f"{y}n"], [f"{y}r"], bn))
        return f"{y}r" if relu else f"{y}n"

    x = convolve("image", "conv1", "bn1", 3, width, 7, 2)
    window = {"strides": [2, 2], "dilations": [1, 1], "low": [1, 1], "high": [1, 1]}
    nodes.append(node("max_pool", [x], ["pooled"], "maxpool", window=window, taps=[3, 3]))
    x, channels = "pooled", width
    for stage, n in enumerate(blocks):
        inner, outer = width * 2 ** stage, 4 * width * 2 ** stage
        for i in range(n):
            scope, stride = f"layer{stage + 1}.{i}", 2 if stage and i == 0 else 1
            y = convolve(x, f"{scope}.conv1", f"{scope}.bn1", channels, inner, 1, 1)
            y = convolve(y, f"{scope}.conv2", f"{scope}.bn2", inner, inner, 3, stride)
            y = convolve(y, f"{scope}.conv3", f"{scope}.bn3", inner, outer, 1, 1, relu=False)
            if i == 0:
                down = f"{scope}.downsample"
                x = convolve(x, f"{down}.0", f"{down}.1", channels, outer, 1, stride, relu=False)
            out = f"{stage + 1}_{i}"
            nodes.append(node("add", [y, x], [f"s{out}"], scope))
            nodes.append(node("relu", [f"s{out}"], [f"o{out}"], scope))
            x, channels = f"o{out}", outer
    params.append(param("fc.weight", channels, classes, init=normal(0.01)))
    params.append(param("fc.bias", classes))
    nodes.append(node("reduce", [x], ["features"], "avgpool", f="mean", axes=[2, 3]))
    nodes.extend(linear("fc", "features", "fc", "logits"))
    inputs = [{"name": "image", "dtype": "f32", "shape": ["batch", 3, image, image]}]
    return model(name, {"batch": None}, inputs, params, nodes)


def attention_heads(name, head_sizes, seq, vocab):
    """A layer of attention per head size, in turn causal and not, and of one and of two query heads per key head.

    The length fills no tile of any kernel. What a layer reads is normalized: otherwise the stream would grow from layer to
    layer until the softmax is all but one-hot, and gradients would be differences of equal numbers.
    """
    params = [param("wte.weight", "vocab", "width", init=normal(0.3))]
    nodes = [node("embedding", ["wte.weight", "input_ids"], ["h0"], "wte")]
    for i, size in enumerate(head_sizes):
        scope, groups = f"attention_{size}", 1 + i // 2 % 2
        params += norm_params(f"{scope}.norm")
        nodes.append(norm(scope, f"h{i}", f"{scope}.norm", f"n{i}"))
        for x, n in (("q", 2), ("k", groups), ("v", groups)):
            params.append(param(f"{scope}.{x}.weight", "width", n * size, init=normal(0.15)))
            nodes.append(node("matmul", [f"n{i}", f"{scope}.{x}.weight"], [f"{x}{i}_wide"], scope))
            nodes.append(node("reshape", [f"{x}{i}_wide"], [f"{x}{i}_rows"], scope, shape=["batch", "seq", n, size]))
            nodes.append(node("transpose", [f"{x}{i}_rows"], [f"{x}{i}"], scope, perm=[0, 2, 1, 3]))
        operands = [f"{x}{i}" for x in "qkv"]
        nodes.append(node("attention", operands, [f"y{i}", "_"], scope, scale=round(size ** -0.5, 6), causal=i % 2 == 0))
        nodes.append(node("transpose", [f"y{i}"], [f"y{i}_rows"], scope, perm=[0, 2, 1, 3]))
        nodes.append(node("reshape", [f"y{i}_rows"], [f"y{i}_wide"], scope, shape=["batch", "seq", 2 * size]))
        params.append(param(f"{scope}.out.weight", 2 * size, "width", init=normal(0.1)))
        nodes.append(node("matmul", [f"y{i}_wide", f"{scope}.out.weight"], [f"o{i}"], scope))
        nodes.append(node("add", [f"h{i}", f"o{i}"], [f"h{i + 1}"], scope))
    params += norm_params("norm")
    nodes.append(norm("norm", f"h{len(head_sizes)}", "norm", "last"))
    nodes.append(node("matmul", ["last", "wte.weight"], ["logits"], "lm_head", trans_b=True))
    return model(name, {"batch": None, "seq": seq, "width": 48, "vocab": vocab}, TOKENS, params, nodes)


# Frozen scalars of the model of operations.
CONSTANTS = {"zero": 0.0, "tenth": 0.1, "nine_tenths": 0.9, "one": 1.0, "three": 3.0, "columns": 24.0}


def operations(name, seq, vocab):
    """Each operation on its own, of elements for which it is defined; the means of their rows make the logits."""
    params = [
        param("wte.weight", "vocab", "width", init=normal(1.0)),
        param("other.weight", "width", init=normal(1.0)),
        *[param(constant, init={"constant": x}) | {"trainable": False} for constant, x in CONSTANTS.items()],
    ]
    nodes = [
        node("embedding", ["wte.weight", "input_ids"], ["x"], "wte"),
        node("add", ["other.weight", "zero"], ["y"]),
        # Of magnitude below 1; above 0; above 1.
        node("tanh", ["x"], ["bounded"]),
        node("mul", ["bounded", "nine_tenths"], ["small"]),
        node("softplus", ["x"], ["smooth"]),
        node("add", ["smooth", "tenth"], ["positive"]),
        node("add", ["smooth", "one"], ["large"]),
        node("gt", ["x", "y"], ["above"]),
        node("gt", ["x", "zero"], ["over"]),
        node("div", ["x", "zero"], ["endless"]),
        node("cast", ["three"], ["three_whole"], to="i64"),
        node("cast", ["columns"], ["columns_whole"], to="i64"),
        node("slice", ["input_ids"], ["first_ids"], start=[0, 0], size=[1, 3], step=[1, 1]),
        node("reshape", ["first_ids"], ["ids"], shape=[3]),
        node("mod", ["ids", "columns_whole"], ["places"]),
    ]
    means = []

    def use(op, *operands, number=True, axes=(2,), **attrs):
        scope, out = f"{op}_{len(means)}", f"mean_{len(means)}"
        nodes.append(node(op, list(operands), [f"{out}_of"], scope, **attrs))
        if not number:
            nodes.append(node("cast", [f"{out}_of"], [f"{out}_as"], scope, to="f32"))
        of = f"{out}_of" if number else f"{out}_as"
        nodes.append(node("reduce", [of], [f"{out}_row"], scope, f="mean", axes=list(axes), keep_dims=True))
        row = f"{out}_row"
        if not number:
            # Integers are large.
            nodes.append(node("tanh", [row], [f"{out}_small"], scope))
            row = f"{out}_small"
        nodes.append(node("expand", [row], [out], scope, shape=["batch", "seq", 1]))
        means.append(out)

    anywhere = "abs neg sign floor ceil round exp expm1 sin cos atan sinh cosh asinh erf relu sigmoid silu gelu"
    for op in f"{anywhere} gelu_tanh softplus tanh detach".split():
        use(op, "x")
    for op in "asin acos atanh tan".split():
        use(op, "small")
    for op in "log log1p sqrt rsqrt reciprocal".split():
        use(op, "positive")
    use("acosh", "large")
    use("clip", "x", min=-0.5, max=1.0)
    for op in "add sub mul max min".split():
        use(op, "x", "y")
    for op in "div mod fmod".split():
        use(op, "x", "positive")
    use("pow", "positive", "x")
    use("select", "above", "x", "y")
    for op in "eq ne lt le gt ge".split():
        use(op, "x", "y", number=False)
    for op in "and or xor".split():
        use(op, "above", "over", number=False)
    use("not", "above", number=False)
    use("is_nan", "endless", number=False)
    use("is_inf", "endless", number=False)
    for op in "add sub mul div mod fmod max min".split():
        use(op, "ids", "three_whole", number=False, axes=[0])
    use("pow", "places", "three_whole", number=False, axes=[0])
    use("arg_reduce", "x", number=False, axes=[1], axis=2, largest=True, last=False)
    use("gather", "x", "places", axis=2)
    for axis in (1, 2):
        use("softmax", "x", axis=axis)
        use("log_softmax", "x", axis=axis)
    for op in "sum_pool max_pool".split():
        use(op, "x", window={"strides": [1], "dilations": [2], "low": [2], "high": [1]}, taps=[3])
    nodes.append(node("concat", means, ["features"], axis=2))
    params.append(param("head.weight", len(means), "vocab", init=normal(0.3)))
    nodes.append(node("matmul", ["features", "head.weight"], ["logits"], "head"))
    return model(name, {"batch": None, "seq": seq, "width": 24, "vocab": vocab}, TOKENS, params, nodes)


def build(name, kind, **sizes):
    if kind == "resnet":
        return resnet(name, **sizes)
    if kind == "attention":
        return attention_heads(name, **sizes)
    if kind == "operations":
        return operations(name, **sizes)
    builder = {"gpt2": gpt2, "bert": bert}[kind]
    return builder(name, sizes["layers"], sizes["width"], sizes["heads"], sizes["seq"], sizes["vocab"])


def write_tokens(path, vocab, n=1 << 20):
    """Tokens as u16, the k-th most frequent as often as 1/k."""
    draw = random.Random(0)
    ids = list(range(vocab))
    draw.shuffle(ids)
    weights = list(itertools.accumulate(1 / k for k in range(1, vocab + 1)))
    tokens = array.array("H", draw.choices(ids, cum_weights=weights, k=n))
    if sys.byteorder == "big":
        tokens.byteswap()
    pathlib.Path(path).write_bytes(tokens.tobytes())


def main(option=None, *rest):
    if option == "--tokens":
        path, vocab = rest
        return write_tokens(path, int(vocab))
    folder = pathlib.Path(rest[0] if option == "--tiny" else __file__)
    folder = folder if option == "--tiny" else folder.parent
    for name, sizes in (TINY if option == "--tiny" else MODELS).items():
        (folder / f"{name}.json").write_text(json.dumps(build(name, **sizes), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
