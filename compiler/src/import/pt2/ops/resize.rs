//! Resizing and sampling of images.

use super::super::call::{Call, Fault, Outcome, float, int, text, unsupported};
use super::super::schema::Argument;
use super::super::translate::Int;
use super::{Convert, one};

pub(super) const OPERATORS: &[(&str, Convert)] = &[
    ("_upsample_bicubic2d_aa", |c| resize(c, "cubic")),
    ("_upsample_bilinear2d_aa", |c| resize(c, "linear")),
    ("_upsample_nearest_exact1d", |c| resize(c, "nearest")),
    ("_upsample_nearest_exact2d", |c| resize(c, "nearest")),
    ("_upsample_nearest_exact3d", |c| resize(c, "nearest")),
    ("grid_sampler", grid_sample),
    ("grid_sampler_2d", grid_sample),
    ("grid_sampler_3d", grid_sample),
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
    let (coordinates, rounding) = match mode {
        "nearest" if c.op.starts_with("_upsample_nearest_exact") => {
            ("half_pixel", "round_prefer_ceil")
        }
        "nearest" => ("asymmetric", "floor"),
        _ if c.bool("align_corners", false)? => ("align_corners", ""),
        _ => ("half_pixel", ""),
    };
    let mut attributes =
        vec![text("mode", mode), text("coordinate_transformation_mode", coordinates)];
    match mode {
        "nearest" => attributes.push(text("nearest_mode", rounding)),
        "cubic" if c.op.ends_with("_aa") => attributes.push(float("cubic_coeff_a", -0.5)),
        "cubic" => attributes.push(float("cubic_coeff_a", -0.75)),
        _ => {}
    }
    if c.op.ends_with("_aa") {
        attributes.extend([int("antialias", 1), int("exclude_outside", 1)]);
    }
    let mut wanted = c.sizes("output_size")?.unwrap_or_default();
    let factors: Vec<f64> = match c.argument("scale_factors") {
        Some(Argument::AsFloats(factors)) => factors.iter().map(|f| f.0).collect(),
        _ => scales(c, n)?,
    };
    let are_used = wanted.is_empty() || coordinates != "align_corners";
    if are_used && factors.len() == n && n > 0 {
        let scaled = |(size, factor): (&Option<i64>, &f64)| {
            size.map(|n| Int::Known((n as f64 * factor + 1e-9).floor() as i64))
        };
        let given: Option<Vec<Int>> = x.dims[2..].iter().zip(&factors).map(scaled).collect();
        if !wanted.is_empty() && given.is_none_or(|given| given != wanted) {
            return unsupported("a size that its factors do not give");
        }
        // Corners are aligned by sizes, which are whole, not by factors. Other results have the same elements by either,
        // if factors give whole sizes, which f32 may round down.
        let aligned = coordinates == "align_corners";
        let size = |(size, factor): (&Option<i64>, &f64)| {
            let scaled = (*size)? as f64 * factor;
            (aligned || (scaled - scaled.round()).abs() < 1e-9 * scaled)
                .then(|| Int::Known((scaled + 1e-9).floor() as i64))
        };
        let sizes: Option<Vec<Int>> = x.dims[2..].iter().zip(&factors).map(size).collect();
        match sizes {
            Some(sizes) => wanted = sizes,
            None if aligned => return unsupported("scaling an image of dynamic size"),
            None => {
                let all = [1.0, 1.0].into_iter().chain(factors.iter().map(|f| *f as f32)).collect();
                let scales = c.matrix([1, n as i64 + 2], all);
                let scales = c.reshape(&scales, &[Int::Known(-1)]);
                return one(c.with("Resize", &[&x.name, "", &scales], attributes));
            }
        }
    }
    if wanted.len() != n || n == 0 {
        return Err(Fault::Damaged(format!("{} sizes for {n} axes", wanted.len())));
    }
    let mut sizes = vec![c.size_of(&x, 0), c.size_of(&x, 1)];
    sizes.extend(wanted);
    let sizes = c.size_list(&sizes);
    one(c.with("Resize", &[&x.name, "", "", &sizes], attributes))
}

/// The factors that are given beside a size, for each of `n` axes or none.
fn scales(c: &Call<'_>, n: usize) -> Result<Vec<f64>, Fault> {
    let names = match n {
        1 => &["scales"][..],
        2 => &["scales_h", "scales_w"],
        _ => &["scales_d", "scales_h", "scales_w"],
    };
    let given: Result<Option<Vec<f64>>, Fault> =
        names.iter().map(|name| c.float_given(name)).collect();
    Ok(given?.unwrap_or_default())
}

/// An image at the places of a grid.
fn grid_sample(c: &mut Call<'_>) -> Outcome {
    let (x, grid) = (c.tensor("input")?, c.tensor("grid")?);
    let one_of = |n: i64, words: [&str; 3]| {
        words
            .get(n as usize)
            .map(|w| (*w).to_string())
            .ok_or_else(|| Fault::Damaged(format!("mode {n}")))
    };
    let mode = one_of(c.int("interpolation_mode", 0)?, ["linear", "nearest", "cubic"])?;
    let padding = one_of(c.int("padding_mode", 0)?, ["zeros", "border", "reflection"])?;
    let attributes = vec![
        text("mode", &mode),
        text("padding_mode", &padding),
        int("align_corners", c.bool("align_corners", false)?.into()),
    ];
    one(c.with("GridSample", &[&x.name, &grid.name], attributes))
}
