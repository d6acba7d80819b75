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

SPECIAL = {
    **{n: (lambda f, g, i, b, n=n: getattr(torch, n)(f, g)) for n in "atan2 hypot copysign fmax fmin logaddexp logaddexp2 ldexp isclose heaviside".split()},
    **{n: (lambda f, g, i, b, n=n: getattr(torch, n)(f)) for n in "signbit sinc deg2rad rad2deg isposinf isneginf nan_to_num".split()},
    "atan2_axes": lambda f, g, i, b: torch.atan2(f.sign() * (i % 3 - 1), i % 3 - 1.0), "atan2_none": lambda f, g, i, b: torch.atan2(f.relu(), -f * 0 + f.relu()), "logaddexp_none": lambda f, g, i, b: torch.logaddexp(torch.where(b, f, -float("inf")), torch.where(b, g, -float("inf"))), "norm_negative": lambda f, g, i, b: torch.linalg.vector_norm(f.relu(), -1, 1), "isin_one": lambda f, g, i, b: torch.isin(i, 3), "std_none": lambda f, g, i, b: (f * 0).std(1), "nan_some": lambda f, g, i, b: (f / (i - 3.0)).nan_to_num(posinf=7.0),
    "fmax_nan": lambda f, g, i, b: torch.fmax(torch.where(b, f, float("nan")), g), "logit": lambda f, g, i, b: torch.logit(f.sigmoid(), 0.2),
    "xlog1py": lambda f, g, i, b: torch.special.xlog1py(f.relu(), g), "ndtr": lambda f, g, i, b: torch.special.ndtr(f),
    "softplus_low": lambda f, g, i, b: F.softplus(f, 2.0, 0.5), "round_two": lambda f, g, i, b: f.round(decimals=2), "round_ten": lambda f, g, i, b: (f * 30).round(decimals=-1),
    "amin_max": lambda f, g, i, b: torch.stack(torch.aminmax(f)), "nansum": lambda f, g, i, b: torch.where(b, f, float("nan")).nansum(1), "nanmean": lambda f, g, i, b: torch.where(b | (f > 0), f, float("nan")).nanmean((1, 2)),
    **{f"norm_{p}": (lambda f, g, i, b, p=p: torch.linalg.vector_norm(f, p, 1)) for p in (0, 0.5, 3, float("inf"), -float("inf"))},
    **{f"matrix_{p}": (lambda f, g, i, b, p=p: torch.linalg.matrix_norm(f, p)) for p in ("fro", 1, -1, float("inf"), -float("inf"))},
    "linalg_norm": lambda f, g, i, b: torch.linalg.norm(f, dim=-1), "cummax": lambda f, g, i, b: f.cummax(1).values, "cummin_places": lambda f, g, i, b: f.cummin(-1).indices,
    "kthvalue": lambda f, g, i, b: f.kthvalue(2, -1).values, "median": lambda f, g, i, b: f.median(1).values, "median_place": lambda f, g, i, b: f.median(-1, keepdim=True).indices, "msort": lambda f, g, i, b: f.msort(),
    "argmax_scalar": lambda f, g, i, b: f.sum().argmax(), "max_scalar": lambda f, g, i, b: f.sum().max(0).values, "topk_scalar": lambda f, g, i, b: f.sum().topk(1).values, "sum_scalar": lambda f, g, i, b: f.sum().sum(0),
    "inner": lambda f, g, i, b: torch.inner(f, g[0]), "tensordot": lambda f, g, i, b: torch.tensordot(f, g, ([2], [2])), "vecdot": lambda f, g, i, b: torch.linalg.vecdot(f, g), "cross": lambda f, g, i, b: torch.linalg.cross(f, g, dim=1),
    "multi_dot": lambda f, g, i, b: torch.linalg.multi_dot([f[0], g[0].t(), f[0]]), "matrix_power": lambda f, g, i, b: torch.linalg.matrix_power(f[:, :, :3], 3), "addr": lambda f, g, i, b: torch.addr(f[0], g[0, :, 0], g[0, 0], beta=0.5, alpha=2),
    "bilinear": lambda f, g, i, b: F.bilinear(f[..., :2], g, g[0, :, :, None].expand(3, 4, 2).transpose(1, 2), f[0, :, 0]), "kron": lambda f, g, i, b: torch.kron(f[0], g[0, :2]),
    **{f"cdist_{p}": (lambda f, g, i, b, p=p: torch.cdist(f, g, p)) for p in (1.0, 2.0, 3.0)}, "pairwise": lambda f, g, i, b: F.pairwise_distance(f, g), "dist": lambda f, g, i, b: torch.dist(f, g, 1),
    **{f"{n}_{r}": (lambda f, g, i, b, n=n, r=r: getattr(F, n)(f[:, 0, 0], g[:, 0, 0], b[:, 0, 0] * 2 - 1, margin=0.1, reduction=r)) for n in ("margin_ranking_loss",) for r in ("mean", "none")},
    "cosine_wide": lambda f, g, i, b: F.cosine_similarity(f[:1], g[:, :1], dim=1), "hinge": lambda f, g, i, b: F.hinge_embedding_loss(f, b * 2 - 1.0), "cosine_loss": lambda f, g, i, b: F.cosine_embedding_loss(f[0], g[0], b[0, :, 0] * 2 - 1, margin=0.2), "triplet": lambda f, g, i, b: F.triplet_margin_loss(f, g, g * 0.5, swap=True),
    "poisson": lambda f, g, i, b: F.poisson_nll_loss(f, i.float(), full=True), "poisson_rate": lambda f, g, i, b: F.poisson_nll_loss(g, i.float(), log_input=False, reduction="sum"), "soft_margin": lambda f, g, i, b: F.soft_margin_loss(f, b * 2 - 1.0),
}
PARTS = {
    "mT": lambda f, i, b: f.mT, "adjoint": lambda f, i, b: f.adjoint(), "H": lambda f, i, b: f[0].H, "T": lambda f, i, b: f[0].T, "ravel": lambda f, i, b: f[0].ravel(), "moveaxis": lambda f, i, b: f.moveaxis(-1, 1),
    "fliplr": lambda f, i, b: f.fliplr(), "flipud": lambda f, i, b: f.flipud(), **{f"rot90_{k}": (lambda f, i, b, k=k: f.rot90(k, (1, 2))) for k in (-1, 1, 2, 4)}, "atleast": lambda f, i, b: torch.atleast_3d(f[0]) + torch.atleast_2d(f[0, 0])[..., None],
    "roll_all": lambda f, i, b: f[0].roll(5), "fftshift": lambda f, i, b: torch.fft.fftshift(f, (1, 2)), "ifftshift": lambda f, i, b: torch.fft.ifftshift(f[0]), "reshape_as": lambda f, i, b: f[0].reshape_as(f[0].t()), "sum_to_size": lambda f, i, b: f[0].sum_to_size(1, 4),
    "tensor_split": lambda f, i, b: torch.cat(f.tensor_split(3, 2)[::2], 2), "tensor_split_at": lambda f, i, b: f.tensor_split((1, -1), 2)[1], "hsplit": lambda f, i, b: f.hsplit(3)[1], "vsplit": lambda f, i, b: f[0].vsplit((1,))[1], "dsplit": lambda f, i, b: f.dsplit(2)[1],
    "diagonal": lambda f, i, b: f.diagonal(1, 1, 2), "diagonal_below": lambda f, i, b: f.diagonal(-1, -1, -2), "diagonal_scatter": lambda f, i, b: f.diagonal_scatter(f[:, :2, 0] * 2, 2, 1, 2), "diagonal_far": lambda f, i, b: f[0].diagonal_scatter(f[1, :2, 3], -1), "diag": lambda f, i, b: f[0].diag(1), "diag_of": lambda f, i, b: f[0, 0].diag(-2), "diag_embed": lambda f, i, b: f.diag_embed(1, 0, -1), "diagflat": lambda f, i, b: f[0, :2].diagflat(),
    "trace": lambda f, i, b: f[0].trace(), "vstack": lambda f, i, b: torch.vstack([f[0], f[0, 0], i[0]]), "dstack": lambda f, i, b: torch.dstack([f[0], f[0]]), "column_stack": lambda f, i, b: torch.column_stack([f[0, :, 0], f[0]]), "hstack": lambda f, i, b: torch.hstack([f[0], f[0]]),
    "block_diag": lambda f, i, b: torch.block_diag(f[0], f[0, 0], f[0, :2]), "cartesian_prod": lambda f, i, b: torch.cartesian_prod(f[0, 0], f[0, :, 0]), "unfold": lambda f, i, b: f.unfold(2, 2, 1), "unfold_first": lambda f, i, b: f.unfold(1, 2, 1), "argwhere": lambda f, i, b: f + torch.arange(24).reshape(2, 3, 4).argwhere().sum(),
    "pixel_unshuffle": lambda f, i, b: F.pixel_unshuffle(f.reshape(-1, 1, 2, 6), 2), "channel_shuffle": lambda f, i, b: F.channel_shuffle(f.reshape(-1, 6, 2), 3), "im2col": lambda f, i, b: F.unfold(f.reshape(-1, 1, 3, 4), (2, 3), dilation=(1, 1), padding=(0, 1), stride=(1, 2)),
    "index_add": lambda f, i, b: f.index_add(2, torch.tensor([3, 0, 3]), f[..., :3], alpha=0.5), "index_copy": lambda f, i, b: f.index_copy(1, torch.tensor([2, 0]), f[:, 1:] * 2), "index_fill": lambda f, i, b: f.index_fill(2, torch.tensor([1]), 7.0), "take": lambda f, i, b: f.take(torch.tensor([[0, 5], [7, 2]])),
    "masked_scatter": lambda f, i, b: f.masked_scatter(torch.tensor([True, False, False, True]), f * 2), "masked_scatter_rows": lambda f, i, b: f.masked_scatter(b[:, :, :1], f - 5), "take_along_wide": lambda f, i, b: f.take_along_dim(torch.tensor([[[3, 0]]]), 2), "take_along_all": lambda f, i, b: f.take_along_dim(i % 12),
    "scatter_larger": lambda f, i, b: f.scatter_add(2, i[:, :2, :3] % 4, f), **{f"scatter_{r}": (lambda f, i, b, r=r: f.scatter_reduce(2, i % 4, f * 2, r, include_self=False)) for r in ("sum", "mean", "amin", "prod")}, "scatter_mean": lambda f, i, b: f.scatter_reduce(2, i % 4, f * 2, "mean"),
    "put_last": lambda f, i, b: torch.ops.aten.index_put(f, [None, None, torch.tensor([3, 0])], torch.tensor([5.0, 6.0])), "put_middle": lambda f, i, b: torch.ops.aten.index_put(f, [None, torch.tensor([[2], [0]]), torch.tensor([[1, 3]])], f[:, :2, :2]), "put_far": lambda f, i, b: torch.ops.aten.index_put(f, [torch.tensor([1, 0, 1]), None, torch.tensor([2, 2, 2])], f[:1, :, 0], True), "isin": lambda f, i, b: torch.isin(i, torch.tensor([1, 3, 7])), "bucketize_short": lambda f, i, b: torch.bucketize(f, torch.tensor([-1.0, 0.5]), out_int32=True, right=True), "bucketize": lambda f, i, b: torch.bucketize(f, torch.tensor([-1.0, 0.0, 0.5])), "searchsorted": lambda f, i, b: torch.searchsorted(f.detach().sort(-1).values, f, right=True), "arange_float": lambda f, i, b: torch.arange(0.1, -7.9, -4.0) + f[0, 0, :2], "linspace_of": lambda f, i, b: torch.linspace(f[0, 0, 0], 4.0, 5),
}
PICTURES = {
    **{f"avg_pool_over_{c}": (lambda x, w, v, c=c: F.avg_pool2d(x, 3, 2, 1, ceil_mode=c, divisor_override=2)) for c in (False, True)}, "avg_pool_one": lambda x, w, v: F.avg_pool2d(x[0], 3, divisor_override=-4), "max_pool_places": lambda x, w, v: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1], "max_pool_single": lambda x, w, v: F.max_pool2d(x[0], 2, return_indices=True)[1],
    "corners": lambda x, w, v: F.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=True), "whole": lambda x, w, v: F.interpolate(x[:, :, :5], scale_factor=(2.4, 1.5), mode="nearest"), "nearest_exact": lambda x, w, v: F.interpolate(x, size=(5, 12), mode="nearest-exact"), "smooth": lambda x, w, v: F.interpolate(x, size=(5, 3), mode="bilinear", antialias=True),
    "smooth_cubic": lambda x, w, v: F.interpolate(x, size=(6, 5), mode="bicubic", antialias=True), **{f"grid_{m}_{p}": (lambda x, w, v, m=m, p=p: F.grid_sample(x, x[:, :2, :, :4].permute(0, 2, 3, 1), m, p, align_corners=m == "bilinear")) for m, p in (("bilinear", "zeros"), ("nearest", "border"), ("bicubic", "reflection"))},
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
        "special": (SPECIAL, {"f": f, "g": torch.rand(2, 3, 4, generator=g) + 0.3, "i": i, "b": b}),
        "parts": (PARTS, {"f": f, "i": i, "b": b}),
        "pictures": (PICTURES, {"x": image, "w": w, "v": v}),
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
