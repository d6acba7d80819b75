//! Sums over, and normalization of, the elements of a channel of an image, which are read and written in their own type.

use crate::simd::vectorized;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Partial sums, so that additions need not wait for each other; the same on every CPU.
pub(super) const LANES: usize = 32;
/// Elements that are converted at a time, whole [`RUN`]s.
const BLOCK: usize = 1024;
/// Elements that are summed in f32, as few as round no more than the elements themselves, before they are added in f64.
const RUN: usize = 8 * LANES;

/// An element type of batch normalization.
pub(super) trait Element: Copy {
    /// Adds elements to partial sums.
    fn add_elements(row: &[Self], sums: &mut [f64; LANES]);

    /// Adds squares of distances from the mean.
    fn add_squares(row: &[Self], mean: f64, sums: &mut [f64; LANES]);

    /// Adds elements of `dy`, and their products with normalized ones of `x`, of mean and reciprocal deviation `of_x`.
    fn add_products(
        dy: &[Self],
        x: &[Self],
        of_x: [f32; 2],
        sums: &mut [f64; LANES],
        products: &mut [f64; LANES],
    );

    /// `y` of `x`, to which the other elements may be added, by mean, factor and bias; its ReLU if so said.
    fn normalize(x: (&[Self], Option<&[Self]>), by: [f32; 3], relu: bool, y: &mut [Self]);

    /// The elements of `dy`, to which the other elements may be added, where those of the ReLU `y` are positive, else 0.
    fn pass(dy: (&[Self], Option<&[Self]>), y: &[Self], to: &mut [Self]);

    /// `dx`, by factor, mean of `dy`, mean and reciprocal deviation of `x`, and mean product.
    fn differentiate(dy: &[Self], x: &[Self], by: [f32; 5], dx: &mut [Self]);

    /// The same, of a `dy` that is overwritten by `dx`.
    fn differentiate_in_place(dy: &mut [Self], x: &[Self], by: [f32; 5]);
}

/// Implements [`Element`] for a type from how it is widened to f32 and narrowed.
macro_rules! element {
    ($ty:ty, $wide:expr, $narrow:expr) => {
        impl Element for $ty {
            fn add_elements(row: &[Self], sums: &mut [f64; LANES]) {
                vectorized! {
                    fn run(row: &[$ty], sums: &mut [f64; LANES]) {
                        add_terms(row, |x| $wide(x), sums);
                    }
                }
                run(row, sums);
            }

            fn add_squares(row: &[Self], mean: f64, sums: &mut [f64; LANES]) {
                vectorized! {
                    fn run(row: &[$ty], mean: f32, sums: &mut [f64; LANES]) {
                        let distance = |x: $ty| $wide(x) - mean;
                        add_terms(row, |x| distance(x) * distance(x), sums);
                    }
                }
                run(row, mean as f32, sums);
            }

            fn add_products(
                dy: &[Self],
                x: &[Self],
                of_x: [f32; 2],
                sums: &mut [f64; LANES],
                products: &mut [f64; LANES],
            ) {
                vectorized! {
                    fn run(dy: &[$ty], x: &[$ty], of_x: [f32; 2], sums: &mut [f64; LANES], products: &mut [f64; LANES]) {
                        let [mean, rstd] = of_x;
                        let normal = |x: $ty| ($wide(x) - mean) * rstd;
                        for (dy, x) in dy.chunks(RUN).zip(x.chunks(RUN)) {
                            let (mut sum, mut product) = ([0f32; LANES], [0f32; LANES]);
                            let ((dys, dy_rest), (xs, x_rest)) = (dy.as_chunks::<LANES>(), x.as_chunks::<LANES>());
                            for (dy, x) in dys.iter().zip(xs) {
                                for i in 0..LANES {
                                    sum[i] += $wide(dy[i]);
                                    product[i] += $wide(dy[i]) * normal(x[i]);
                                }
                            }
                            for (i, (dy, x)) in dy_rest.iter().zip(x_rest).enumerate() {
                                sum[i] += $wide(*dy);
                                product[i] += $wide(*dy) * normal(*x);
                            }
                            add(&sum, sums);
                            add(&product, products);
                        }
                    }
                }
                run(dy, x, of_x, sums, products);
            }

            fn normalize(
                (x, added): (&[Self], Option<&[Self]>),
                by: [f32; 3],
                relu: bool,
                y: &mut [Self],
            ) {
                vectorized! {
                    fn run(x: &[$ty], added: Option<&[$ty]>, by: [f32; 3], relu: bool, y: &mut [$ty]) {
                        let [mean, factor, bias] = by;
                        // A NaN stays one.
                        let last = |y: f32| if relu && y <= 0.0 { 0.0 } else { y };
                        let normal = |x: $ty| ($wide(x) - mean) * factor + bias;
                        match added {
                            None => {
                                for (y, x) in y.iter_mut().zip(x) {
                                    *y = $narrow(last(normal(*x)));
                                }
                            }
                            Some(added) => {
                                for ((y, x), added) in y.iter_mut().zip(x).zip(added) {
                                    *y = $narrow(last(normal(*x) + $wide(*added)));
                                }
                            }
                        }
                    }
                }
                run(x, added, by, relu, y);
            }

            fn pass((dy, added): (&[Self], Option<&[Self]>), y: &[Self], to: &mut [Self]) {
                vectorized! {
                    fn run(dy: &[$ty], added: Option<&[$ty]>, y: &[$ty], to: &mut [$ty]) {
                        let gated = |dy: f32, y: $ty| $narrow(if $wide(y) > 0.0 { dy } else { 0.0 });
                        match added {
                            None => {
                                for ((to, dy), y) in to.iter_mut().zip(dy).zip(y) {
                                    *to = gated($wide(*dy), *y);
                                }
                            }
                            Some(added) => {
                                for (((to, dy), added), y) in to.iter_mut().zip(dy).zip(added).zip(y) {
                                    *to = gated($wide(*dy) + $wide(*added), *y);
                                }
                            }
                        }
                    }
                }
                run(dy, added, y, to);
            }

            fn differentiate(dy: &[Self], x: &[Self], by: [f32; 5], dx: &mut [Self]) {
                vectorized! {
                    fn run(dy: &[$ty], x: &[$ty], by: [f32; 5], dx: &mut [$ty]) {
                        let [factor, mean_dy, mean, rstd, mean_product] = by;
                        for ((dx, dy), x) in dx.iter_mut().zip(dy).zip(x) {
                            let normal = ($wide(*x) - mean) * rstd;
                            *dx = $narrow(factor * ($wide(*dy) - mean_dy - normal * mean_product));
                        }
                    }
                }
                run(dy, x, by, dx);
            }

            fn differentiate_in_place(dy: &mut [Self], x: &[Self], by: [f32; 5]) {
                vectorized! {
                    fn run(dy: &mut [$ty], x: &[$ty], by: [f32; 5]) {
                        let [factor, mean_dy, mean, rstd, mean_product] = by;
                        for (dy, x) in dy.iter_mut().zip(x) {
                            let normal = ($wide(*x) - mean) * rstd;
                            *dy = $narrow(factor * ($wide(*dy) - mean_dy - normal * mean_product));
                        }
                    }
                }
                run(dy, x, by);
            }
        }
    };
}

element!(f32, |x: f32| x, |x: f32| x);
element!(bf16, wide, crate::routine::convert::to_bf16);

/// Adds a term of each element, run by run.
#[inline(always)]
fn add_terms<T: Copy>(row: &[T], term: impl Fn(T) -> f32, sums: &mut [f64; LANES]) {
    for run in row.chunks(RUN) {
        let mut part = [0f32; LANES];
        let (chunks, rest) = run.as_chunks::<LANES>();
        for chunk in chunks {
            for (part, x) in part.iter_mut().zip(chunk) {
                *part += term(*x);
            }
        }
        for (part, x) in part.iter_mut().zip(rest) {
            *part += term(*x);
        }
        add(&part, sums);
    }
}

/// Adds sums of a run.
#[inline(always)]
fn add(part: &[f32; LANES], sums: &mut [f64; LANES]) {
    for (sum, part) in sums.iter_mut().zip(part) {
        *sum += f64::from(*part);
    }
}

#[inline(always)]
fn wide(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// By way of f32, a block at a time.
impl Element for f16 {
    fn add_elements(row: &[Self], sums: &mut [f64; LANES]) {
        for row in row.chunks(BLOCK) {
            f32::add_elements(Block::of(row).get(), sums);
        }
    }

    fn add_squares(row: &[Self], mean: f64, sums: &mut [f64; LANES]) {
        for row in row.chunks(BLOCK) {
            f32::add_squares(Block::of(row).get(), mean, sums);
        }
    }

    fn add_products(
        dy: &[Self],
        x: &[Self],
        of_x: [f32; 2],
        sums: &mut [f64; LANES],
        products: &mut [f64; LANES],
    ) {
        for (dy, x) in dy.chunks(BLOCK).zip(x.chunks(BLOCK)) {
            f32::add_products(Block::of(dy).get(), Block::of(x).get(), of_x, sums, products);
        }
    }

    fn normalize((x, added): (&[Self], Option<&[Self]>), by: [f32; 3], relu: bool, y: &mut [Self]) {
        for (i, (x, y)) in x.chunks(BLOCK).zip(y.chunks_mut(BLOCK)).enumerate() {
            let added = block_of(added, i);
            let mut found = [0.0; BLOCK];
            let operands = (Block::of(x), added.map(Block::of));
            let added = operands.1.as_ref().map(Block::get);
            f32::normalize((operands.0.get(), added), by, relu, &mut found[..y.len()]);
            y.convert_from_f32_slice(&found[..y.len()]);
        }
    }

    fn pass((dy, added): (&[Self], Option<&[Self]>), y: &[Self], to: &mut [Self]) {
        for (i, (dy, y)) in dy.chunks(BLOCK).zip(y.chunks(BLOCK)).enumerate() {
            let to = &mut to[i * BLOCK..][..y.len()];
            let added = block_of(added, i);
            let mut found = [0.0; BLOCK];
            let operands = (Block::of(dy), added.map(Block::of));
            let added = operands.1.as_ref().map(Block::get);
            f32::pass((operands.0.get(), added), Block::of(y).get(), &mut found[..y.len()]);
            to.convert_from_f32_slice(&found[..y.len()]);
        }
    }

    fn differentiate(dy: &[Self], x: &[Self], by: [f32; 5], dx: &mut [Self]) {
        for ((dy, x), dx) in dy.chunks(BLOCK).zip(x.chunks(BLOCK)).zip(dx.chunks_mut(BLOCK)) {
            let mut found = [0.0; BLOCK];
            f32::differentiate(Block::of(dy).get(), Block::of(x).get(), by, &mut found[..dx.len()]);
            dx.convert_from_f32_slice(&found[..dx.len()]);
        }
    }

    fn differentiate_in_place(dy: &mut [Self], x: &[Self], by: [f32; 5]) {
        for (dy, x) in dy.chunks_mut(BLOCK).zip(x.chunks(BLOCK)) {
            let mut found = [0.0; BLOCK];
            f32::differentiate(Block::of(dy).get(), Block::of(x).get(), by, &mut found[..dy.len()]);
            dy.convert_from_f32_slice(&found[..dy.len()]);
        }
    }
}

/// A block of a row, if there is one.
fn block_of(row: Option<&[f16]>, number: usize) -> Option<&[f16]> {
    row.and_then(|row| row.chunks(BLOCK).nth(number))
}

/// Up to [`BLOCK`] elements in f32.
struct Block {
    len: usize,
    wide: [f32; BLOCK],
}

impl Block {
    fn of(row: &[f16]) -> Block {
        let mut wide = [0.0; BLOCK];
        row.convert_to_f32_slice(&mut wide[..row.len()]);
        Block { len: row.len(), wide }
    }

    fn get(&self) -> &[f32] {
        &self.wide[..self.len]
    }
}
