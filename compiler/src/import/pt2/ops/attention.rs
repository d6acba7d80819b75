//! Scaled dot product attention.

use super::super::call::{Call, Fault, Outcome, float, int, unsupported};
use super::super::dtype::BOOL;
use super::super::symbols::{self, Function};
use super::super::translate::{Int, Tensor};
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_scaled_dot_product_cudnn_attention", attention),
    ("_scaled_dot_product_efficient_attention", attention),
    ("_scaled_dot_product_flash_attention", attention),
    ("_scaled_dot_product_flash_attention_for_cpu", attention),
    ("_scaled_dot_product_fused_attention_overrideable", attention),
    ("scaled_dot_product_attention", attention),
];

/// What one call computes.
struct Attention {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Option<Tensor>,
    causal: bool,
    scale: Option<f64>,
}

fn attention(c: &mut Call<'_>) -> Outcome {
    let mask = match c.optional("attn_mask")? {
        Some(mask) => Some(mask),
        None => c.optional("attn_bias")?,
    };
    let of = Attention {
        q: c.tensor("query")?,
        k: c.tensor("key")?,
        v: c.tensor("value")?,
        mask,
        causal: c.bool("is_causal", false)?,
        scale: c.float_given("scale")?,
    };
    let ratio = c.float("dropout_p", 0.0)?;
    match of.q.dims.len() {
        3 | 4 if ratio == 0.0 => fused(c, &of),
        _ => written_out(c, &of, ratio),
    }
}

/// As ONNX's own operator: `[B, H, T, D]`, or one head without its axis.
fn fused(c: &mut Call<'_>, of: &Attention) -> Outcome {
    let mut attributes = Vec::new();
    if let Some(scale) = of.scale {
        attributes.push(float("scale", scale));
    }
    if of.causal {
        attributes.push(int("is_causal", 1));
    }
    let heads = of.q.dims.len() == 4;
    if !heads {
        attributes.extend([int("q_num_heads", 1), int("kv_num_heads", 1)]);
    }
    let mut inputs = vec![of.q.name.clone(), of.k.name.clone(), of.v.name.clone()];
    if let Some(mask) = &of.mask {
        // A mask of three axes has one for the batch, where there are no heads.
        let batched = !heads && mask.dims.len() == 3;
        inputs.push(if batched { c.unsqueeze(&mask.name, &[1]) } else { mask.name.clone() });
    }
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    one(c.with("Attention", &inputs, attributes))
}

/// As matmuls and a softmax, for what ONNX's operator has not.
fn written_out(c: &mut Call<'_>, of: &Attention, ratio: f64) -> Outcome {
    let rank = of.q.dims.len();
    let (Some(&Some(d)), true) = (of.q.dims.last(), rank >= 2) else {
        return unsupported("a head of dynamic size");
    };
    let dtype = of.q.dtype;
    let scale = of.scale.unwrap_or(1.0 / (d as f64).sqrt()).sqrt();
    let scale = c.number(dtype, scale);
    let q = c.add("Mul", &[&of.q.name, &scale]);
    let (mut k, mut v) = (of.k.name.clone(), of.v.name.clone());
    if c.bool("enable_gqa", false)? {
        (k, v) = (repeated(c, &of.q, &of.k)?, repeated(c, &of.q, &of.v)?);
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank - 1, rank - 2);
    let k = c.transpose(&k, &perm);
    let k = c.add("Mul", &[&k, &scale]);
    let mut scores = c.add("MatMul", &[&q, &k]);
    if of.causal {
        let (t, s) = (c.size_of(&of.q, rank - 2), c.size_of(&of.k, rank - 2));
        let (rows, columns) = (range(c, &t), range(c, &s));
        let rows = c.unsqueeze(&rows, &[1]);
        let sees = c.add("GreaterOrEqual", &[&rows, &columns]);
        scores = masked(c, &sees, &scores, dtype);
    }
    if let Some(mask) = &of.mask {
        scores = match mask.dtype {
            BOOL => masked(c, &mask.name, &scores, dtype),
            from => {
                let mask = c.cast(&mask.name, from, dtype);
                c.add("Add", &[&scores, &mask])
            }
        };
    }
    let p = c.with("Softmax", &[&scores], vec![int("axis", -1)]);
    let p = if ratio > 0.0 { super::random::dropped(c, &p, ratio).remove(0) } else { p };
    one(c.add("MatMul", &[&p, &v]))
}

fn range(c: &mut Call<'_>, n: &Int) -> String {
    let (zero, n, step) = (c.integer(0), c.size_scalar(n), c.integer(1));
    c.add("Range", &[&zero, &n, &step])
}

fn masked(c: &mut Call<'_>, sees: &str, scores: &str, dtype: i32) -> String {
    let never = c.number(dtype, f64::NEG_INFINITY);
    c.add("Where", &[sees, scores, &never])
}

/// Heads of keys or values, once for each head of queries that reads them.
fn repeated(c: &mut Call<'_>, q: &Tensor, x: &Tensor) -> Result<String, Fault> {
    if x.dims.len() != 4 {
        return unsupported(format!("grouped heads of rank {}", x.dims.len()));
    }
    let heads = c.size_of(q, 1);
    let sizes = c.shape(x);
    let n = symbols::of(c, Function::FloorDiv, &heads, &sizes[1])?;
    let wide = c.unsqueeze(&x.name, &[2]);
    let one_ = Int::Known(1);
    let shape = c.size_list(&[one_.clone(), one_.clone(), n, one_.clone(), one_]);
    let wide = c.add("Expand", &[&wide, &shape]);
    let merged = [sizes[0].clone(), heads, sizes[2].clone(), sizes[3].clone()];
    Ok(c.reshape(&wide, &merged))
}
