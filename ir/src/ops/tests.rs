//! Names, serialization and refusals of operations.

use super::{Attention, Inferred, Op};
use crate::{DType, TensorType};

/// The operation of this text, `name {json}`.
fn op(name: &str, attributes: serde_json::Value) -> Op {
    let attributes = attributes.as_object().cloned().unwrap_or_default();
    Op::from_parts(name, attributes).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn ty(text: &str) -> TensorType {
    let (dtype, dims) = text.split_once('[').expect("a type such as f32[2,3]");
    let dims = dims.trim_end_matches(']').split(',').filter(|d| !d.is_empty());
    let dims: Vec<usize> = dims.map(|d| d.trim().parse().expect("a size")).collect();
    TensorType::new(dtype.parse::<DType>().expect("a dtype"), dims)
}

fn infer(op: &Op, operands: &[&str]) -> Inferred {
    let types: Vec<TensorType> = operands.iter().map(|t| ty(t)).collect();
    op.infer(&types.iter().collect::<Vec<_>>())
}

#[test]
fn every_name_is_an_operation_and_every_operation_has_its_name() {
    let mut names: Vec<&str> = Op::examples().iter().map(Op::name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names, Op::names());
}

#[test]
fn parts_make_the_operation_again() {
    for op in Op::examples() {
        let (name, attributes) = op.to_parts();
        assert_eq!(Op::from_parts(name, attributes).as_ref(), Ok(&op), "{name}");
    }
}

#[test]
fn floats_that_json_lacks_are_written_and_read() {
    let mut found = 0;
    for op in Op::examples() {
        let (name, attributes) = op.to_parts();
        for (key, _) in attributes.iter().filter(|(_, value)| value.is_f64()) {
            for special in ["inf", "-inf", "nan"] {
                let mut changed = attributes.clone();
                changed.insert(key.clone(), special.into());
                let op = Op::from_parts(name, changed.clone()).unwrap_or_else(|e| panic!("{e}"));
                assert_eq!(op.to_parts().1, changed, "{name}");
                found += 1;
            }
        }
    }
    assert!(found > 30, "{found}");
}

#[test]
fn unknown_names_and_attributes_are_refused() {
    use serde_json::json;
    for (name, attributes, message) in [
        ("frobnicate", json!({}), "unknown operation `frobnicate`"),
        ("unary", json!({}), "unknown operation `unary`"),
        ("softmax", json!({}), "missing field `axis`"),
        ("softmax", json!({"axis": 1, "speed": 2}), "unknown field `speed`"),
        ("softmax", json!({"axis": -1}), "invalid value"),
        ("pad", json!({"low": [], "high": [], "value": "large"}), "expected a number"),
        ("neg", json!({"axis": 1}), "neg"),
    ] {
        let attributes = attributes.as_object().cloned().expect("an object");
        let error = Op::from_parts(name, attributes).expect_err(name).to_string();
        assert!(error.contains(message), "{name}: {error}");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    use serde_json::json;
    let cases: &[(&str, serde_json::Value, &[&str])] = &[
        ("exp", json!({}), &["i64[2]"]),
        ("neg", json!({}), &["bool[2]"]),
        ("not", json!({}), &["f32[2]"]),
        ("exp", json!({}), &[]),
        ("is_nan", json!({}), &["i32[]"]),
        ("clip", json!({"min": 0.0}), &["bool[]"]),
        ("add", json!({}), &["f32[2]", "f16[2]"]),
        ("add", json!({}), &["f32[2]", "f32[3]"]),
        ("add", json!({}), &["bool[2]", "bool[2]"]),
        ("gelu_grad", json!({}), &["i64[2]", "i64[2]"]),
        ("eq", json!({}), &["f32[2]", "i64[2]"]),
        ("and", json!({}), &["f32[2]", "f32[2]"]),
        ("select", json!({}), &["f32[2]", "f32[2]", "f32[2]"]),
        ("select", json!({}), &["bool[2]", "f32[2]", "f32[3]"]),
        ("reshape", json!({"shape": [5]}), &["f32[2,3]"]),
        ("transpose", json!({"perm": [0, 0]}), &["f32[2,3]"]),
        ("transpose", json!({"perm": [0]}), &["f32[2,3]"]),
        ("expand", json!({"shape": [2]}), &["f32[2,3]"]),
        ("expand", json!({"shape": [3, 2]}), &["f32[3]"]),
        ("slice", json!({"start": [1], "size": [3], "step": [1]}), &["f32[3]"]),
        ("slice", json!({"start": [0], "size": [2], "step": [-1]}), &["f32[3]"]),
        ("slice", json!({"start": [0], "size": [1], "step": [0]}), &["f32[3]"]),
        ("slice", json!({"start": [0], "size": [1], "step": [1]}), &["f32[3,3]"]),
        ("concat", json!({"axis": 0}), &[]),
        ("concat", json!({"axis": 0}), &["f32[2,3]", "f32[2,4]"]),
        ("concat", json!({"axis": 0}), &["f32[2]", "i64[2]"]),
        ("concat", json!({"axis": 1}), &["f32[2]"]),
        ("split", json!({"axis": 0, "sizes": [1, 3]}), &["f32[3]"]),
        ("split", json!({"axis": 0, "sizes": []}), &["f32[0]"]),
        ("pad", json!({"low": [1], "high": [1], "value": 0.0}), &["f32[2,2]"]),
        ("embedding", json!({}), &["f32[5,4]", "f32[2]"]),
        ("embedding", json!({}), &["f32[5]", "i64[2]"]),
        ("embedding_grad", json!({"rows": 5, "dtype": "f32"}), &["f32[3,4]", "i64[2]"]),
        ("gather", json!({"axis": 2}), &["f32[5,4]", "i64[2]"]),
        ("gather_elements", json!({"axis": 0}), &["f32[2,2]", "i64[1,3]"]),
        ("gather_nd", json!({"batch_dims": 0}), &["f32[2,2]", "i64[1,3]"]),
        ("gather_nd", json!({"batch_dims": 0}), &["f32[2,2]", "i64[]"]),
        ("cum_sum", json!({"axis": 0, "exclusive": false, "reverse": false}), &["bool[2]"]),
        ("reduce", json!({"f": "sum", "axes": [1, 0]}), &["f32[2,2]"]),
        ("reduce", json!({"f": "sum", "axes": [2]}), &["f32[2,2]"]),
        ("reduce", json!({"f": "max", "axes": [0]}), &["bool[2]"]),
        ("sum_to", json!({"shape": [3]}), &["f32[2]"]),
        ("matmul", json!({}), &["f32[2,3]", "f32[2,3]"]),
        ("matmul", json!({}), &["f32[3]", "f32[3,2]"]),
        ("matmul", json!({}), &["f32[2,3]", "f16[3,2]"]),
        ("matmul", json!({}), &["f32[2,1,3]", "f32[3,3,1]"]),
        ("softmax", json!({"axis": 1}), &["f32[2]"]),
        ("softmax_grad", json!({"axis": 0}), &["f32[2]", "f32[3]"]),
        ("layer_norm", json!({"axis": 1, "eps": 0.1}), &["f32[2,3]", "f32[2]"]),
        ("layer_norm", json!({"axis": 2, "eps": 0.1}), &["f32[2,3]", "f32[]"]),
        (
            "layer_norm_grad_affine",
            json!({"axis": 1}),
            &["f32[2,3]", "f32[2,3]", "f32[3]", "f32[2]"],
        ),
        ("rms_norm", json!({"axis": 0, "eps": 0.1}), &["i64[2]", "f32[2]"]),
        ("attention", json!({"scale": 1.0}), &["f32[1,3,2,4]", "f32[1,2,2,4]", "f32[1,2,2,4]"]),
        ("attention", json!({"scale": 1.0}), &["f32[2,4]", "f32[2,4]", "f32[2,4]"]),
        (
            "attention",
            json!({"scale": 1.0}),
            &["f32[1,1,2,4]", "f32[1,1,2,4]", "f32[1,1,2,4]", "i64[2,2]"],
        ),
        ("cross_entropy", json!({"ignore_index": 0}), &["f32[2,5]", "i64[5]"]),
        ("cross_entropy", json!({"ignore_index": 0}), &["f32[2,5]", "f32[2]"]),
        ("all_gather", json!({"unit": 0}), &[]),
        ("loss_scale", json!({"factor": 1.0}), &["f64[]"]),
        ("grad_stats", json!({}), &["i64[2]"]),
        ("unscale", json!({"capacity": 1.0}), &["f32[3]", "f32[]", "f32[]"]),
        ("optimizer_step", json!({"kind": "sgd"}), &["f32[2]", "f32[2]"]),
        (
            "optimizer_step",
            json!({"kind": "sgd"}),
            &["f32[2]", "f32[3]", "f32[]", "f32[]", "f32[]", "f32[]", "f32[]"],
        ),
        ("update_step", json!({}), &["f32[]", "f32[1]"]),
        ("learning_rate", json!({"kind": "linear"}), &["f32[]"]),
    ];
    for (name, attributes, operands) in cases {
        let result = infer(&op(name, attributes.clone()), operands);
        assert!(result.is_err(), "{name} {attributes} of {operands:?} gives {result:?}");
    }
}

#[test]
fn results_have_the_types_of_their_families() {
    use serde_json::json;
    let cases: &[(&str, serde_json::Value, &[&str], &[&str])] = &[
        ("lt", json!({}), &["f32[2,1]", "f32[3]"], &["bool[2,3]"]),
        ("matmul", json!({"trans_b": true}), &["bf16[5,1,2,3]", "bf16[4,7,3]"], &["bf16[5,4,2,7]"]),
        ("gather", json!({"axis": 1}), &["f32[2,3,4]", "i64[5,6]"], &["f32[2,5,6,4]"]),
        (
            "reduce",
            json!({"f": "sum", "axes": [0, 2], "keep_dims": true}),
            &["i64[2,3,4]"],
            &["i64[1,3,1]"],
        ),
        (
            "layer_norm",
            json!({"axis": 1, "eps": 0.1}),
            &["f16[2,3]", "f32[3]"],
            &["f16[2,3]", "f32[2]", "f32[2]"],
        ),
        (
            "attention",
            json!({"scale": 1.0}),
            &["bf16[2,4,3,8]", "bf16[2,2,5,8]", "bf16[2,2,5,6]", "bool[5]"],
            &["bf16[2,4,3,6]", "f32[2,4,3]"],
        ),
        (
            "cross_entropy",
            json!({"ignore_index": 0}),
            &["f16[2,3,5]", "i32[2,3]"],
            &["f32[2,3]", "f32[2,3]"],
        ),
        (
            "split",
            json!({"axis": 1, "sizes": [1, 0, 2]}),
            &["u8[2,3]"],
            &["u8[2,1]", "u8[2,0]", "u8[2,2]"],
        ),
    ];
    for (name, attributes, operands, results) in cases {
        let expected: Vec<TensorType> = results.iter().map(|t| ty(t)).collect();
        assert_eq!(infer(&op(name, attributes.clone()), operands), Ok(expected), "{name}");
    }
}

#[test]
fn results_that_no_tensor_holds_are_refused() {
    use serde_json::json;
    let huge = 1_u64 << 62;
    let cases: &[(&str, serde_json::Value, &[&str])] = &[
        ("pad", json!({"low": [huge, huge], "high": [huge, huge], "value": 0.0}), &["f32[2,2]"]),
        ("expand", json!({"shape": [huge, huge, 2]}), &["f32[2]"]),
        ("random_mask", json!({"shape": [huge, 16], "keep": 0.5, "id": 0}), &["i64[3]"]),
        ("reshape", json!({"shape": [0, huge, huge]}), &["f32[0]"]),
        ("split", json!({"axis": 0, "sizes": [huge, huge, huge, huge, 2]}), &["f32[2]"]),
        (
            "max_pool",
            json!({
                "window": {"strides": [1], "dilations": [huge], "low": [0], "high": [huge]},
                "taps": [huge],
            }),
            &["f32[1,1,4]"],
        ),
        ("matmul", json!({}), &["f32[1048576,1]", "f32[1,2097152]"]),
        ("gather_nd", json!({"batch_dims": 0}), &["f32[2]", "i64[1,9223372036854775807]"]),
    ];
    for (name, attributes, operands) in cases {
        let result = infer(&op(name, attributes.clone()), operands);
        assert!(result.is_err(), "{name} {attributes} of {operands:?} gives {result:?}");
    }
    let axes = vec!["1"; 65].join(",");
    assert!(infer(&op("neg", json!({})), &[&format!("f32[{axes}]")]).is_err());
}

#[test]
fn every_window_of_a_pool_holds_an_element() {
    use serde_json::json;
    let pool = |dilation: usize, low: usize, high: usize, taps: usize, size: usize| {
        let window = json!({"strides": [1], "dilations": [dilation], "low": [low], "high": [high]});
        let op = op("max_pool", json!({"window": window, "taps": [taps]}));
        infer(&op, &[&format!("f32[1,1,{size}]")]).is_ok()
    };
    for (dilation, low, high, taps, size) in (0..3 * 3 * 3 * 3 * 4)
        .map(|i| (1 + i % 3, i / 3 % 3, i / 9 % 3, 1 + i / 27 % 3, 1 + i / 81))
    {
        let extent = dilation * (taps - 1) + 1;
        let padded = low + size + high;
        let inside = |p: usize| (0..taps).any(|t| (low..low + size).contains(&(p + t * dilation)));
        let whole = padded >= extent && (0..=padded - extent).all(inside);
        let accepted = pool(dilation, low, high, taps, size);
        assert!(!accepted || whole, "{dilation} {low} {high} {taps} {size}");
        // Without padding nothing is refused.
        assert!(accepted || !whole || low + high > 0, "{dilation} {low} {high} {taps} {size}");
    }
}

#[test]
fn attention_counts_the_pairs_that_its_mask_leaves() {
    use super::attention::Sight;
    let ty = |dims: [usize; 4]| TensorType::new(DType::F32, dims);
    for (t, s) in [(1, 1), (3, 7), (7, 3), (8, 8)] {
        for window in [1, 2, 4, 9] {
            for causal in [false, true] {
                let sight = Sight { causal, window: Some(window) };
                let op = Op::Attention(Attention {
                    scale: 1.0,
                    causal,
                    window: Some(window),
                    keep: None,
                });
                let (q, k) = (ty([2, 3, t, 5]), ty([2, 3, s, 5]));
                let used = sight.of(t, s);
                let pairs: usize = match used.window {
                    Some(_) => (0..t).map(|i| used.keys(i, s).len()).sum(),
                    None => t * s,
                };
                let full = 2 * 6 * pairs as u64 * 10;
                let halved = if causal && used.window.is_none() { full / 2 } else { full };
                assert_eq!(op.flops(&[&q, &k, &k], &[]), halved, "{t} {s} {sight:?}");
            }
        }
    }
}
