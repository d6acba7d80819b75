//! Resizing of images.

use super::super::call::{Call, Fault, Outcome, float, text};
use super::super::schema::Argument;
use super::super::translate::Int;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("upsample_bicubic2d", |c| resize(c, "cubic")),
    ("upsample_bilinear2d", |c| resize(c, "linear")),
    ("upsample_linear1d", |c| resize(c, "linear")),
    ("upsample_nearest1d", |c| resize(c, "nearest")),
    ("upsample_nearest2d", |c| resize(c, "nearest")),
    ("upsample_nearest3d", |c| resize(c, "nearest")),
    ("upsample_trilinear3d", |c| resize(c, "linear")),
];

fn resize(c: &mut Call<'_>, mode: &str) -> Outcome {
    let name = if c.argument("input").is_some() { "input" } else { "self" };
    let x = c.tensor(name)?;
    let n = x.dims.len().saturating_sub(2);
    let coordinates = match mode {
        "nearest" => "asymmetric",
        _ if c.bool("align_corners", false)? => "align_corners",
        _ => "half_pixel",
    };
    let mut attributes =
        vec![text("mode", mode), text("coordinate_transformation_mode", coordinates)];
    match mode {
        "nearest" => attributes.push(text("nearest_mode", "floor")),
        "cubic" => attributes.push(float("cubic_coeff_a", -0.75)),
        _ => {}
    }
    let factors: Vec<f32> = match c.argument("scale_factors") {
        Some(Argument::AsFloats(factors)) => factors.iter().map(|f| f.0 as f32).collect(),
        _ => Vec::new(),
    };
    if factors.len() == n && n > 0 {
        let all: Vec<f32> = [1.0, 1.0].into_iter().chain(factors).collect();
        let scales = c.matrix([1, n as i64 + 2], all);
        let scales = c.reshape(&scales, &[Int::Known(-1)]);
        return one(c.with("Resize", &[&x.name, "", &scales], attributes));
    }
    let wanted = c.sizes("output_size")?.unwrap_or_default();
    if wanted.len() != n || n == 0 {
        return Err(Fault::Damaged(format!("{} sizes for {n} axes", wanted.len())));
    }
    let mut sizes = vec![c.size_of(&x, 0), c.size_of(&x, 1)];
    sizes.extend(wanted);
    let sizes = c.size_list(&sizes);
    one(c.with("Resize", &[&x.name, "", "", &sizes], attributes))
}
