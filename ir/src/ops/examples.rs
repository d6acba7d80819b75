//! One example of every operation, for tests that cover all of them.

use super::Op;

fn example(name: &str, attributes: serde_json::Value) -> Op {
    let attributes = attributes.as_object().cloned().unwrap_or_default();
    Op::from_parts(name, attributes).unwrap_or_else(|e| panic!("invariant: {name}: {e}"))
}

/// One of each operation but `fusion` that has attributes, or no function family.
pub fn examples() -> Vec<Op> {
    use serde_json::json;
    let leaf = json!({"dtype": "f32", "shape": [2]});
    let (ones, zeros) = ([1, 1], [0, 0]);
    let window = json!({"strides": ones, "dilations": ones, "low": zeros, "high": zeros});
    [
        ("adafactor", json!({"part": "sums", "shape": [4, 3], "share": 0.5})),
        ("all_gather", json!({"unit": 1})),
        ("all_reduce", json!({"reduce": "mean", "unit": 2})),
        ("arg_reduce", json!({"axis": 0, "largest": false, "last": true})),
        ("attention", json!({"scale": 0.125, "causal": true})),
        ("attention_grad", json!({"scale": 0.125, "causal": false})),
        ("batch_norm", json!({"eps": 1e-5})),
        ("batch_norm_grad", json!({"eps": 1e-5})),
        ("by_param_group", json!({"len": 4})),
        ("cast", json!({"to": "bf16"})),
        ("clip", json!({"min": "-inf", "max": 3.5})),
        ("concat", json!({"axis": 1})),
        ("constant", json!({"ty": leaf, "values": [1.5, "nan"]})),
        ("conv", json!({"window": window, "groups": 1})),
        ("conv_grad_input", json!({"window": window, "groups": 1, "size": [4, 4]})),
        ("conv_grad_weight", json!({"window": window, "groups": 1, "taps": [2, 2]})),
        ("cross_entropy", json!({"ignore_index": -100})),
        ("cross_entropy_grad", json!({"ignore_index": 0})),
        ("cum_sum", json!({"axis": 0, "exclusive": true, "reverse": false})),
        ("ema_step", json!({})),
        ("embedding", json!({})),
        ("embedding_grad", json!({"rows": 7, "dtype": "f32"})),
        ("expand", json!({"shape": [2, 3]})),
        ("gather", json!({"axis": 0})),
        ("gather_elements", json!({"axis": 0})),
        ("gather_nd", json!({"batch_dims": 1})),
        ("grad_stats", json!({})),
        ("hyper", json!({"name": "optimizer.lr", "default": 0.1})),
        ("input", json!({"name": "x", "ty": leaf})),
        ("layer_norm", json!({"axis": 2, "eps": 1e-5})),
        ("layer_norm_grad_affine", json!({"axis": 2})),
        ("layer_norm_grad_input", json!({"axis": 2})),
        ("learning_rate", json!({"kind": "cosine"})),
        ("log_softmax", json!({"axis": 1})),
        ("log_softmax_grad", json!({"axis": 1})),
        ("loss_scale", json!({"factor": 0.1})),
        ("matmul", json!({"trans_a": false, "trans_b": true, "out": "f32"})),
        ("max_pool", json!({"window": window, "taps": [2, 2]})),
        ("max_pool_grad", json!({"window": window, "taps": [2, 2]})),
        ("optimizer_step", json!({"kind": "adamw"})),
        ("pad", json!({"low": [1], "high": [0], "value": "-inf"})),
        (
            "param",
            json!({"name": "w", "ty": leaf, "kind": "trainable", "reason": "reaches the loss",
            "init": {"normal": {"std": 0.02}}, "unit": 3, "sharded": true}),
        ),
        ("quantize", json!({"to": "f8e4m3", "index": 1})),
        ("random", json!({"f": "normal", "shape": [2, 3], "offset": 0.5, "scale": 2.0, "id": 1})),
        ("random_mask", json!({"shape": [2, 3], "keep": 0.9, "id": 4})),
        ("reduce", json!({"f": "mean", "axes": [0], "keep_dims": true})),
        ("reduce_scatter", json!({"unit": 1, "dtype": "bf16"})),
        ("reshape", json!({"shape": []})),
        ("rms_norm", json!({"axis": 1, "eps": 1e-6})),
        ("rms_norm_grad_input", json!({"axis": 1})),
        ("rms_norm_grad_scale", json!({"axis": 1})),
        ("scaled_cast", json!({"to": "f16", "factor": 0.25})),
        ("scatter_elements", json!({"axis": 0, "f": "add"})),
        ("scatter_nd", json!({"batch_dims": 1, "f": "replace"})),
        ("select", json!({})),
        ("slice", json!({"start": [3], "size": [2], "step": [-1]})),
        ("softmax", json!({"axis": 1})),
        ("softmax_grad", json!({"axis": 1})),
        ("split", json!({"axis": 0, "sizes": [1, 1]})),
        ("state", json!({"name": "adam_m", "of": "w", "ty": leaf, "init": "inf"})),
        ("sum_pool", json!({"window": window, "taps": [2, 2]})),
        ("sum_pool_grad", json!({"window": window, "taps": [2, 2], "size": [4, 4]})),
        ("sum_to", json!({"shape": [1], "dtype": "f64"})),
        ("top_k", json!({"axis": 1, "k": 2, "largest": true})),
        ("transpose", json!({"perm": [1, 0]})),
        ("unscale", json!({"capacity": 32.0})),
        ("update_loss_scale", json!({})),
        ("update_step", json!({})),
    ]
    .into_iter()
    .map(|(name, attributes)| example(name, attributes))
    .collect()
}
