#!/usr/bin/env python3
"""Writes GPT-2 as JSON models of the published sizes: examples/gpu/gpt2_{124m,774m,1558m}.json.

The weights are made from the seed when a plan is run, so that neither model nor plan holds any. Usage: make_models.py
"""

import json
import pathlib

SIZES = {"124m": (12, 768, 12), "774m": (36, 1280, 20), "1558m": (48, 1600, 25)}
CONTEXT, VOCABULARY = 1024, 50257


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


def norm(scope, x, name, out):
    return node("layer_norm", [x, f"{name}.weight", f"{name}.bias"], [out, "_", "_"], scope, axis=2, eps=1e-5)


def block(layers, width, heads):
    residual = normal(0.02 / (2 * layers) ** 0.5)
    params = [
        param("ln_1.weight", "width", init="ones"),
        param("ln_1.bias", "width"),
        param("attn.c_attn.weight", "width", "3*width", init=normal(0.02)),
        param("attn.c_attn.bias", "3*width"),
        param("attn.c_proj.weight", "width", "width", init=residual),
        param("attn.c_proj.bias", "width"),
        param("ln_2.weight", "width", init="ones"),
        param("ln_2.bias", "width"),
        param("mlp.c_fc.weight", "width", "4*width", init=normal(0.02)),
        param("mlp.c_fc.bias", "4*width"),
        param("mlp.c_proj.weight", "4*width", "width", init=residual),
        param("mlp.c_proj.bias", "width"),
    ]
    nodes = [norm("ln_1", "h", "ln_1", "n1"), *linear("attn", "n1", "attn.c_attn", "qkv")]
    nodes.append(node("split", ["qkv"], ["q3", "k3", "v3"], "attn", axis=2, sizes=["width"] * 3))
    for x in "qkv":
        shape = ["batch", "seq", "heads", "width/heads"]
        nodes.append(node("reshape", [f"{x}3"], [f"{x}4"], "attn", shape=shape))
        nodes.append(node("transpose", [f"{x}4"], [x], "attn", perm=[0, 2, 1, 3]))
    scale = (width // heads) ** -0.5
    nodes += [
        node("attention", ["q", "k", "v"], ["y4", "_"], "attn", scale=scale, causal=True),
        node("transpose", ["y4"], ["y_heads"], "attn", perm=[0, 2, 1, 3]),
        node("reshape", ["y_heads"], ["y"], "attn", shape=["batch", "seq", "width"]),
        *linear("attn", "y", "attn.c_proj", "attn_out"),
        node("add", ["h", "attn_out"], ["middle"]),
        norm("ln_2", "middle", "ln_2", "n2"),
        *linear("mlp", "n2", "mlp.c_fc", "fc"),
        node("gelu_tanh", ["fc"], ["act"], "mlp"),
        *linear("mlp", "act", "mlp.c_proj", "mlp_out"),
        node("add", ["middle", "mlp_out"], ["h"]),
    ]
    return {"repeat": layers, "scope": "transformer.h.{i}", "carry": ["h"], "params": params, "nodes": nodes}


def gpt2(name, layers, width, heads):
    dims = {"batch": None, "seq": CONTEXT, "width": width, "heads": heads, "vocab": VOCABULARY}
    params = [
        param("transformer.wte.weight", "vocab", "width", init=normal(0.02)),
        param("transformer.wpe.weight", "seq", "width", init=normal(0.02)),
        param("transformer.ln_f.weight", "width", init="ones"),
        param("transformer.ln_f.bias", "width"),
    ]
    nodes = [
        node("embedding", ["transformer.wte.weight", "input_ids"], ["tokens"], "transformer.wte"),
        node("add", ["tokens", "transformer.wpe.weight"], ["h"], "transformer.wpe"),
        block(layers, width, heads),
        norm("transformer.ln_f", "h", "transformer.ln_f", "n"),
        node("matmul", ["n", "transformer.wte.weight"], ["logits"], "lm_head", trans_b=True),
    ]
    inputs = [{"name": "input_ids", "dtype": "i64", "shape": ["batch", "seq"]}]
    model = {"frit_model": 1, "name": name, "dims": dims, "inputs": inputs, "params": params, "nodes": nodes}
    return model | {"outputs": ["logits"]}


if __name__ == "__main__":
    folder = pathlib.Path(__file__).parent
    for size, (layers, width, heads) in SIZES.items():
        model = gpt2(f"gpt2_{size}", layers, width, heads)
        (folder / f"gpt2_{size}.json").write_text(json.dumps(model, indent=1) + "\n")
