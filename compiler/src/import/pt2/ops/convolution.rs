//! Convolution and transposed convolution.

use super::super::call::{Call, Fault, Outcome, int, ints, unsupported};
use super::super::schema::Argument;
use super::super::translate::Tensor;
use super::{Convert, one};
use crate::import::onnx::messages::AttributeProto;

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("conv1d", |c| convolution(c, 1)),
    ("conv2d", |c| convolution(c, 2)),
    ("conv3d", |c| convolution(c, 3)),
    ("conv_transpose1d", |c| convolution(c, 1)),
    ("conv_transpose2d", |c| convolution(c, 2)),
    ("conv_transpose3d", |c| convolution(c, 3)),
    ("convolution", |c| {
        let x = c.tensor("input")?;
        convolution(c, x.dims.len().saturating_sub(2))
    }),
];

/// Over `n` spatial axes.
fn convolution(c: &mut Call<'_>, n: usize) -> Outcome {
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    let batched = x.dims.len() == n + 2;
    if n == 0 || !(batched || x.dims.len() == n + 1) || w.dims.len() != n + 2 {
        return Err(Fault::Damaged(format!(
            "an operand of rank {} and a weight of rank {}",
            x.dims.len(),
            w.dims.len()
        )));
    }
    let transposed = c.op.starts_with("conv_transpose") || c.bool("transposed", false)?;
    let dilations = c.per_axis("dilation", n, 1)?;
    let pads = pads(c, n, &w, &dilations)?;
    let mut attributes = vec![
        ints("strides", &c.per_axis("stride", n, 1)?),
        ints("dilations", &dilations),
        ints("pads", &pads),
        int("group", c.int("groups", 1)?),
    ];
    let mut name = "Conv";
    if transposed {
        name = "ConvTranspose";
        attributes.push(ints("output_padding", &c.per_axis("output_padding", n, 0)?));
    }
    let mut inputs = vec![if batched { x.name } else { c.unsqueeze(&x.name, &[0]) }, w.name];
    inputs.extend(c.optional("bias")?.map(|b| b.name));
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let y = c.with(name, &inputs, attributes);
    one(if batched { y } else { c.squeeze(&y, &[0]) })
}

/// The border at the beginning of each axis, then at the end of each.
fn pads(c: &Call<'_>, n: usize, w: &Tensor, dilations: &[i64]) -> Result<Vec<i64>, Fault> {
    if !matches!(c.argument("padding"), Some(Argument::AsString(_))) {
        let pads = c.per_axis("padding", n, 0)?;
        return Ok([&pads[..], &pads].concat());
    }
    match c.text("padding", "")?.as_str() {
        "valid" => Ok(vec![0; 2 * n]),
        "same" => {
            let taps: Option<Vec<i64>> = w.dims[2..].iter().copied().collect();
            let Some(taps) = taps else { return unsupported("a kernel of dynamic size") };
            let total = taps.iter().zip(dilations).map(|(k, d)| (k - 1).max(0).saturating_mul(*d));
            let total: Vec<i64> = total.collect();
            let low = total.iter().map(|t| t / 2);
            Ok(low.chain(total.iter().map(|t| t - t / 2)).collect())
        }
        other => unsupported(format!("padding \"{other}\"")),
    }
}

/// The strides of a window. Without any the windows lie side by side.
pub(super) fn strides(c: &Call<'_>, n: usize, kernel: &[i64]) -> Result<Vec<i64>, Fault> {
    match c.ints("stride")?.unwrap_or_default().is_empty() {
        true => Ok(kernel.to_vec()),
        false => c.per_axis("stride", n, 1),
    }
}

/// A window that slides over the last `n` axes.
pub(super) fn window(c: &Call<'_>, n: usize, dilates: bool) -> Result<Vec<AttributeProto>, Fault> {
    let kernel = c.per_axis("kernel_size", n, 1)?;
    let strides = strides(c, n, &kernel)?;
    let pads = c.per_axis("padding", n, 0)?;
    let mut attributes = vec![
        ints("kernel_shape", &kernel),
        ints("strides", &strides),
        ints("pads", &[&pads[..], &pads].concat()),
        int("ceil_mode", c.bool("ceil_mode", false)?.into()),
    ];
    if dilates {
        attributes.push(ints("dilations", &c.per_axis("dilation", n, 1)?));
    }
    Ok(attributes)
}
