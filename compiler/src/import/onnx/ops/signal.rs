//! Windows, and the mel scale.

use super::super::context::{Fault, NodeContext, Outcome, misfit};
use super::{Operator, one, op};
use frit_ir::Tensor;
use std::f64::consts::TAU;

pub(super) const OPERATORS: &[Operator] = &[
    op("BlackmanWindow", &["output_datatype", "periodic"], |cx| window(cx, &[0.42, -0.5, 0.08])),
    op("HammingWindow", &["output_datatype", "periodic"], |cx| {
        window(cx, &[25.0 / 46.0, -21.0 / 46.0])
    }),
    op("HannWindow", &["output_datatype", "periodic"], |cx| window(cx, &[0.5, -0.5])),
    op("MelWeightMatrix", &["output_datatype"], mel_weights),
];

/// `Σ terms[k] · cos(2πki / period)`.
fn window(cx: &mut NodeContext<'_>, terms: &[f64]) -> Outcome {
    let Some(size) = cx.known_scalar(0, "the size")? else { return misfit("the size is missing") };
    let n = cx.sizes(&[size as i64], "the size")?[0];
    let period = if cx.int("periodic", 1) != 0 { n as f64 } else { n as f64 - 1.0 };
    let value = |i: usize| {
        let angle = |k: usize| TAU * (k * i) as f64 / period.max(1.0);
        terms.iter().enumerate().map(|(k, a)| a * angle(k).cos()).sum()
    };
    let dtype = cx.dtype_attribute("output_datatype", cx.int("output_datatype", 1))?;
    if !dtype.is_float() {
        return Err(Fault::Attribute(format!("output_datatype = {dtype}")));
    }
    one(cx.floats(dtype, &[n], value)?)
}

/// Triangles on the mel scale, `[bins of the spectrum, mel bins]`. Source: ONNX MelWeightMatrix-17.
fn mel_weights(cx: &mut NodeContext<'_>) -> Outcome {
    let mut numbers = [0.0; 5];
    for (i, number) in numbers.iter_mut().enumerate() {
        let Some(value) = cx.known_scalar(i, "a setting of the mel scale")? else {
            return misfit(format!("input {i} is missing"));
        };
        *number = value;
    }
    let [mel_bins, dft_length, rate, lower, upper] = numbers;
    let sizes = cx.sizes(&[mel_bins as i64, dft_length as i64], "the sizes")?;
    let (mel_bins, bins) = (sizes[0], sizes[1] / 2 + 1);
    cx.room(&[bins, mel_bins])?;
    cx.room(&[mel_bins])?;
    let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
    let hertz = |mel: f64| 700.0 * (10f64.powf(mel / 2595.0) - 1.0);
    let (low, high) = (mel(lower), mel(upper));
    let width = (high - low) / (mel_bins + 2) as f64;
    let place = |i: usize| {
        let frequency = hertz(low + i as f64 * width);
        ((sizes[1] as f64 + 1.0) * frequency / rate).floor() as i64
    };
    let distance = |to: i64, from: i64| to as f64 - from as f64;
    let edges: Vec<i64> = (0..mel_bins + 2).map(place).collect();
    let mut matrix = vec![0.0; bins * mel_bins];
    for i in 0..mel_bins {
        let (first, center, last) = (edges[i], edges[i + 1], edges[i + 2]);
        for (row, weights) in matrix.chunks_exact_mut(mel_bins.max(1)).enumerate() {
            let row = row as i64;
            if row == center && first == center {
                weights[i] = 1.0;
            } else if (first..=center).contains(&row) {
                weights[i] = distance(row, first) / distance(center, first);
            } else if (center..last).contains(&row) {
                weights[i] = distance(last, row) / distance(last, center);
            }
        }
    }
    let dtype = cx.dtype_attribute("output_datatype", cx.int("output_datatype", 1))?;
    if !dtype.is_float() {
        return Err(Fault::Attribute(format!("output_datatype = {dtype}")));
    }
    one(cx.constant(Tensor::floats(dtype, [bins, mel_bins], matrix))?)
}
