#!/usr/bin/env python3
"""Write operators/FAMILY.pt2, each a module that returns the results of many operators, and FAMILY.safetensors with its inputs
(`in.NAME`) and PyTorch's results (`out.NAME`). Run in this folder; needs torch and safetensors. The batch is dynamic."""
import pathlib
import warnings

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from make import save

POINTWISE = {
    **{n: (lambda f, g, i, b, n=n: getattr(torch, n)(f)) for n in (
        "abs ceil cos cosh erf erfc exp exp2 expm1 floor frac neg relu round sigmoid sign sin sinh tan tanh trunc atan square "
        "selu celu isnan isfinite logical_not asinh").split()},
    **{n: (lambda f, g, i, b, n=n: getattr(torch, n)(g)) for n in "log log10 log1p log2 reciprocal rsqrt sqrt".split()},
    **{n: (lambda f, g, i, b, n=n: getattr(F, n)(f)) for n in (
        "elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 silu softplus softshrink softsign "
        "tanhshrink").split()},
    **{n: (lambda f, g, i, b, n=n: getattr(torch, n)(f, g)) for n in (
        "add sub mul div maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor fmod remainder floor_divide").split()},
    "add_alpha": lambda f, g, i, b: torch.add(f, g, alpha=0.5), "rsub": lambda f, g, i, b: 3 - f, "add_int": lambda f, g, i, b: i + 2,
    "int_div": lambda f, g, i, b: i / 2, "int_floor": lambda f, g, i, b: (i - 2) // 2, "int_mod": lambda f, g, i, b: (i - 2) % 3,
    "int_float": lambda f, g, i, b: i * 1.5, "bool_int": lambda f, g, i, b: b + i, "bool_and": lambda f, g, i, b: b & ~b,
    "bool_mul": lambda f, g, i, b: b * b, "div_trunc": lambda f, g, i, b: torch.div(f, g, rounding_mode="trunc"),
    "div_floor": lambda f, g, i, b: torch.div(f, g, rounding_mode="floor"), "pow2": lambda f, g, i, b: f**2,
    "pow3": lambda f, g, i, b: f**3, "pow_half": lambda f, g, i, b: g**0.5, "pow_tensor": lambda f, g, i, b: g**f,
    "pow_base": lambda f, g, i, b: 2.0**f, "int_pow": lambda f, g, i, b: i**2, "clamp": lambda f, g, i, b: f.clamp(-0.5, 0.5),
    "clamp_min": lambda f, g, i, b: f.clamp(min=0.1), "clamp_tensor": lambda f, g, i, b: torch.clamp(f, max=g),
    "where": lambda f, g, i, b: torch.where(b, f, g), "where_number": lambda f, g, i, b: torch.where(b, f, 0.0),
    "masked_fill": lambda f, g, i, b: f.masked_fill(b, -1.0), "lerp": lambda f, g, i, b: torch.lerp(f, g, 0.3),
    "addcmul": lambda f, g, i, b: torch.addcmul(f, g, g, value=0.5), "addcdiv": lambda f, g, i, b: torch.addcdiv(f, f, g, value=2.0),
    "to_int": lambda f, g, i, b: f.to(torch.int64), "to_bool": lambda f, g, i, b: i.bool(), "type_as": lambda f, g, i, b: i.type_as(f),
    "bitwise": lambda f, g, i, b: (i & 3) | (i ^ 1), "prelu": lambda f, g, i, b: F.prelu(f, g[0, :, 0]),
    "threshold": lambda f, g, i, b: F.threshold(f, 0.1, 2.0), "softplus_beta": lambda f, g, i, b: F.softplus(f, beta=2.0),
    "xlogy": lambda f, g, i, b: torch.xlogy(f.relu(), g), "elu_alpha": lambda f, g, i, b: F.elu(f, 0.7),
    "gelu_tanh": lambda f, g, i, b: F.gelu(f, approximate="tanh"), "half": lambda f, g, i, b: (f.half() + g.half()).float(),
}
LAYOUT = {
    "view": lambda f, i, b: f.view(f.shape[0], -1), "reshape": lambda f, i, b: f.reshape(-1, 4), "permute": lambda f, i, b: f.permute(2, 0, 1),
    "transpose": lambda f, i, b: f.transpose(-1, 1), "expand": lambda f, i, b: f[:, :1].expand(-1, 3, -1), "flatten": lambda f, i, b: f.flatten(1),
    "unflatten": lambda f, i, b: f.unflatten(-1, (2, 2)), "squeeze": lambda f, i, b: f[:, :1].squeeze(1), "squeeze_all": lambda f, i, b: f[:, :1, :1].squeeze(),
    "unsqueeze": lambda f, i, b: f.unsqueeze(-1), "slice": lambda f, i, b: f[:, 1:, ::2], "slice_end": lambda f, i, b: f[..., :-1],
    "select": lambda f, i, b: f[:, -1], "narrow": lambda f, i, b: f.narrow(1, 1, 2), "cat": lambda f, i, b: torch.cat([f, f * 2], 1),
    "cat_promoted": lambda f, i, b: torch.cat([f, i], 1), "stack": lambda f, i, b: torch.stack([f, f + 1], -1), "split": lambda f, i, b: f.split(3, 2)[1],
    "split_sizes": lambda f, i, b: f.split([1, 3], 2)[1], "chunk": lambda f, i, b: f.chunk(2, 1)[1], "unbind": lambda f, i, b: f.unbind(1)[2],
    "flip": lambda f, i, b: f.flip(1, 2), "roll": lambda f, i, b: f.roll((1, -1), (1, 2)), "repeat": lambda f, i, b: f.repeat(1, 2, 1),
    "repeat_more": lambda f, i, b: f.repeat(2, 1, 1, 1), "repeat_interleave": lambda f, i, b: f.repeat_interleave(2, 1), "tile": lambda f, i, b: f.tile(2),
    "pad": lambda f, i, b: F.pad(f, (1, 2), value=0.5), "pad_two": lambda f, i, b: F.pad(f, (1, 0, 0, 1)), "pad_negative": lambda f, i, b: F.pad(f, (-1, 0)),
    "reflect": lambda f, i, b: F.pad(f, (2, 1), mode="reflect"), "replicate": lambda f, i, b: F.pad(f, (2, 1), mode="replicate"),
    "tril": lambda f, i, b: f.tril(), "triu": lambda f, i, b: f.triu(1), "tril_bool": lambda f, i, b: b.tril(-1), "movedim": lambda f, i, b: f.movedim(0, -1),
    "diff": lambda f, i, b: f.diff(dim=-1), "diff_prepend": lambda f, i, b: f.diff(dim=1, prepend=f[:, :1] - 1), "t": lambda f, i, b: f[0].t(),
    "meshgrid": lambda f, i, b: torch.meshgrid(f[0, :, 0], f[0, 0], indexing="xy")[1], "arange": lambda f, i, b: torch.arange(1, 9, 2) + i[:, 0],
    "arange_size": lambda f, i, b: torch.arange(f.shape[0] * 2), "full": lambda f, i, b: torch.full((f.shape[0], 2), 1.5), "zeros_like": lambda f, i, b: torch.zeros_like(i),
    "ones_like": lambda f, i, b: torch.ones_like(f, dtype=torch.float64), "new_full": lambda f, i, b: f.new_full((2, 2), 3.0), "eye": lambda f, i, b: torch.eye(3) + f[:, :, :3],
    "linspace": lambda f, i, b: torch.linspace(-1, 1, 4) + f, "view_as": lambda f, i, b: f.reshape(f.shape[0], 4, 3).view_as(f), "size_sum": lambda f, i, b: f * f.shape[0],
    "gather": lambda f, i, b: f.gather(2, i % 4), "index_select": lambda f, i, b: f.index_select(1, torch.tensor([2, 0])), "index": lambda f, i, b: f[:, torch.tensor([2, 0, -1])],
    "index_two": lambda f, i, b: f[:, torch.tensor([[0, 1]]), torch.tensor([[2], [3]])], "index_first": lambda f, i, b: f[i[:, 0] % 2, i[:, 1] % 3],
    "index_far": lambda f, i, b: f[torch.tensor([0, 1]), :, torch.tensor([3, 1])], "take_along": lambda f, i, b: f.take_along_dim(i % 4, 2),
    "scatter": lambda f, i, b: f.scatter(2, i % 4, f * 2), "scatter_value": lambda f, i, b: f.scatter(1, i[:, :1] % 3, 7.0), "scatter_add": lambda f, i, b: f.scatter_add(2, i % 4, f),
    "scatter_amax": lambda f, i, b: f.scatter_reduce(2, i % 4, f, "amax"), "one_hot": lambda f, i, b: F.one_hot(i, 9), "embedding": lambda f, i, b: F.embedding(i % 3, f[0]),
    "slice_scatter": lambda f, i, b: f.slice_scatter(f[:, :1], 1, 1, 2), "select_scatter": lambda f, i, b: f.select_scatter(f[:, 0], 1, -1),
    "index_put": lambda f, i, b: f.index_put((torch.tensor([0, 1]),), f[:1, 0]), "index_add": lambda f, i, b: f.index_put((torch.tensor([0, 0]), torch.tensor([1, 1])), f[0, :2], accumulate=True),
    "mask_put": lambda f, i, b: f.index_put((b,), torch.tensor(9.0)),
}
REDUCTION = {
    **{f"{n}_{k}": (lambda f, i, b, n=n, a=a: getattr(f, n)(**a)) for n in ("sum", "mean", "amax", "amin") for k, a in (("one", {"dim": 1}), ("two", {"dim": (0, -1), "keepdim": True}))},
    "sum_all": lambda f, i, b: f.sum(), "sum_int": lambda f, i, b: i.sum(1), "sum_bool": lambda f, i, b: b.sum(-1), "mean_all": lambda f, i, b: f.mean(),
    "prod": lambda f, i, b: f.prod(1), "max": lambda f, i, b: f.max(), "max_values": lambda f, i, b: f.max(1).values, "max_places": lambda f, i, b: f.max(1).indices,
    "min_places": lambda f, i, b: f.min(2, keepdim=True).indices, "max_other": lambda f, i, b: torch.max(f, f * 2), "argmax": lambda f, i, b: f.argmax(-1), "argmax_all": lambda f, i, b: f.argmax(),
    "argmin": lambda f, i, b: f.argmin(1, keepdim=True), "any": lambda f, i, b: b.any(1), "all": lambda f, i, b: b.all(), "var": lambda f, i, b: f.var(1), "var_biased": lambda f, i, b: f.var(-1, correction=0, keepdim=True),
    "std": lambda f, i, b: f.std((1, 2)), "var_mean": lambda f, i, b: torch.cat(torch.var_mean(f, -1)), "logsumexp": lambda f, i, b: f.logsumexp(1), "cumsum": lambda f, i, b: f.cumsum(1),
    "cumsum_bool": lambda f, i, b: b.cumsum(-1), "cumprod": lambda f, i, b: f.cumprod(-1), "norm": lambda f, i, b: torch.linalg.vector_norm(f, dim=-1), "norm1": lambda f, i, b: f.norm(1, dim=1),
    "softmax": lambda f, i, b: f.softmax(1), "log_softmax": lambda f, i, b: f.log_softmax(-1), "softmax_wide": lambda f, i, b: f.softmax(-1, dtype=torch.float64), "topk": lambda f, i, b: f.topk(2, 1).values,
    "sort": lambda f, i, b: f.sort(-1, descending=True).values, "argsort": lambda f, i, b: f.argsort(-1), "count_nonzero": lambda f, i, b: b.count_nonzero(1), "normalize": lambda f, i, b: F.normalize(f, dim=-1),
    "cosine": lambda f, i, b: F.cosine_similarity(f, f + 1, dim=-1),
    **{f"{n}_{r}": (lambda f, i, b, n=n, r=r: getattr(F, n)(f, f.roll(1, 1) * 0.7, reduction=r)) for n in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss") for r in ("mean", "sum", "none")},
    "cross_entropy": lambda f, i, b: F.cross_entropy(f, i[:, 0] % 3), "cross_entropy_ignored": lambda f, i, b: F.cross_entropy(f, (i[:, 0] % 3), ignore_index=1, reduction="sum"),
    "cross_entropy_smooth": lambda f, i, b: F.cross_entropy(f, i[:, 0] % 3, label_smoothing=0.2, ignore_index=0), "cross_entropy_weights": lambda f, i, b: F.cross_entropy(f, i[:, 0] % 3, weight=torch.tensor([1.0, 2.0, 0.5])),
    "cross_entropy_soft": lambda f, i, b: F.cross_entropy(f[:, :, 0], f[:, :, 1].softmax(-1)), "nll": lambda f, i, b: F.nll_loss(f.log_softmax(1), i[:, 0] % 3, reduction="none"),
    "bce": lambda f, i, b: F.binary_cross_entropy(f.sigmoid(), b.float()), "bce_logits": lambda f, i, b: F.binary_cross_entropy_with_logits(f, b.float(), pos_weight=torch.tensor(2.0), reduction="none"),
    "kl_div": lambda f, i, b: F.kl_div(f.log_softmax(-1), f.flip(-1).softmax(-1), reduction="batchmean"), "kl_div_log": lambda f, i, b: F.kl_div(f.log_softmax(-1), f.flip(-1).log_softmax(-1), log_target=True),
}
IMAGE = {
    "conv2d": lambda x, w, v: F.conv2d(x, w, stride=2, padding=1), "conv2d_bias": lambda x, w, v: F.conv2d(x, w, v[:6], dilation=2), "conv2d_same": lambda x, w, v: F.conv2d(x, w[:, :, :2], padding="same"),
    "conv2d_groups": lambda x, w, v: F.conv2d(x[:, :2], w[:, :1], groups=2), "conv1d": lambda x, w, v: F.conv1d(x[:, :, 0], w[:, :, 0], padding=1), "conv_single": lambda x, w, v: F.conv2d(x[0], w),
    "transposed": lambda x, w, v: F.conv_transpose2d(x, w[:3], stride=2, padding=1, output_padding=1), "transposed1d": lambda x, w, v: F.conv_transpose1d(x[:, :, 0], w[:3, :, 0]),
    "max_pool": lambda x, w, v: F.max_pool2d(x, 3, 2, 1), "max_pool_ceil": lambda x, w, v: F.max_pool2d(x, 3, 2, ceil_mode=True), "max_pool1d": lambda x, w, v: F.max_pool1d(x[:, :, 0], 2),
    "avg_pool": lambda x, w, v: F.avg_pool2d(x, 3, 2, 1), "avg_pool_inside": lambda x, w, v: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), "avg_pool1d": lambda x, w, v: F.avg_pool1d(x[:, :, 0], 2),
    "adaptive_one": lambda x, w, v: F.adaptive_avg_pool2d(x, 1), "adaptive": lambda x, w, v: F.adaptive_avg_pool2d(x, (4, 2)), "adaptive_uneven": lambda x, w, v: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive_1d": lambda x, w, v: F.adaptive_avg_pool1d(x[:, :, 0], 3), "adaptive_max": lambda x, w, v: F.adaptive_max_pool2d(x, 2), "nearest": lambda x, w, v: F.interpolate(x, scale_factor=2),
    "nearest_size": lambda x, w, v: F.interpolate(x, size=(12, 4)), "bilinear": lambda x, w, v: F.interpolate(x, size=(12, 16), mode="bilinear"), "bilinear_corners": lambda x, w, v: F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True),
    "bicubic": lambda x, w, v: F.interpolate(x, size=(16, 16), mode="bicubic"), "pixel_shuffle": lambda x, w, v: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "group_norm": lambda x, w, v: F.group_norm(x.repeat(1, 2, 1, 1), 2, v[:6], v[:6]), "group_norm_plain": lambda x, w, v: F.group_norm(x, 3), "instance_norm": lambda x, w, v: F.instance_norm(x),
    "layer_norm": lambda x, w, v: F.layer_norm(x, (8, 8)), "layer_norm_weight": lambda x, w, v: F.layer_norm(x, (8,), v, v, eps=1e-3), "rms_norm": lambda x, w, v: F.rms_norm(x, (8,), v, 1e-4), "rms_norm_plain": lambda x, w, v: F.rms_norm(x, (8,)),
    "batch_norm": lambda x, w, v: F.batch_norm(x, v[:3], v[:3] ** 2 + 1, v[:3], v[:3]), "batch_norm_batch": lambda x, w, v: F.batch_norm(x, None, None, v[:3], v[:3], training=True),
    "linear": lambda x, w, v: F.linear(x, w.reshape(-1)[:48].reshape(6, 8), v[:6]), "linear_two": lambda x, w, v: F.linear(x[:, 0, 0], w.reshape(-1)[:48].reshape(6, 8)), "matmul": lambda x, w, v: x @ x.transpose(-1, -2), "matmul_vector": lambda x, w, v: x @ v,
    "bmm": lambda x, w, v: torch.bmm(x[:, 0], x[:, 1]), "addmm": lambda x, w, v: torch.addmm(v, x[0, 0], x[0, 1], beta=0.5, alpha=2), "baddbmm": lambda x, w, v: torch.baddbmm(x[:, 2], x[:, 0], x[:, 1], beta=0, alpha=0.5),
    "einsum": lambda x, w, v: torch.einsum("bchw,bcvw->bhv", x, x), "outer": lambda x, w, v: torch.outer(v, v[:2]), "dot": lambda x, w, v: v.dot(v),
    "sdpa": lambda x, w, v: F.scaled_dot_product_attention(x, x * 0.5, x), "sdpa_causal": lambda x, w, v: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3), "sdpa_one": lambda x, w, v: F.scaled_dot_product_attention(x[:, 0], x[:, 1], x[:, 2], attn_mask=x[:, 0]),
    "sdpa_mask": lambda x, w, v: F.scaled_dot_product_attention(x, x, x, attn_mask=(x[:, :1] > 0.5)), "sdpa_grouped": lambda x, w, v: F.scaled_dot_product_attention(x[:, [0, 1]], x[:, :1], x[:, 1:2], enable_gqa=True),
}


class Many(nn.Module):
    def __init__(self, cases):
        super().__init__()
        self.cases = cases

    def forward(self, *args):
        # Half precision and 64 bits beside f32 are compared as they are.
        return {name: f(*args) for name, f in self.cases.items()}


def main():
    warnings.filterwarnings("ignore")
    g = torch.Generator().manual_seed(0)
    f = torch.randn(2, 3, 4, generator=g)
    i, b = torch.randint(0, 9, (2, 3, 4), generator=g), torch.rand(2, 3, 4, generator=g) > 0.5
    image, w = torch.randn(2, 3, 8, 8, generator=g), torch.randn(6, 3, 3, 3, generator=g) * 0.3
    v = torch.linspace(0.5, 1.5, 8)
    families = {
        "pointwise": (POINTWISE, {"f": f, "g": torch.rand(2, 3, 4, generator=g) + 0.3, "i": i, "b": b}),
        "layout": (LAYOUT, {"f": f, "i": i, "b": b}),
        "reduction": (REDUCTION, {"f": f, "i": i, "b": b}),
        "image": (IMAGE, {"x": image, "w": w, "v": v}),
    }
    d = pathlib.Path("operators")
    d.mkdir(exist_ok=True)
    for name, (cases, inputs) in families.items():
        net = Many(cases)
        own = [{0: torch.export.Dim.AUTO} if x.shape[0] == 2 else None for x in inputs.values()]
        program = torch.export.export(net, tuple(inputs.values()), dynamic_shapes=(tuple(own),))
        save(program, d / f"{name}.pt2")
        outputs = {f"out.{k}": x.contiguous().clone() for k, x in net(*inputs.values()).items()}
        names = [n.name for n in program.graph.nodes if n.op == "placeholder" and n.name.startswith("args")]
        save_file({**{f"in.{n}": x for n, x in zip(names, inputs.values())}, **outputs}, d / f"{name}.safetensors")
        print(name, len(cases), names)


if __name__ == "__main__":
    main()
