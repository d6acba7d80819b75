//! Vectors of tiles against single tiles, and transforms of kernels against their definition.

use super::*;

/// Numbers in [-1, 1).
pub(in crate::routine::conv) fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

#[cfg(target_arch = "x86_64")]
fn bits(of: &[f32]) -> Vec<u32> {
    of.iter().map(|x| x.to_bits()).collect()
}

/// Vectors of tiles of every shape map them bit for bit as single tiles do, and write nothing else.
#[cfg(target_arch = "x86_64")]
#[test]
fn vectors_map_tiles_as_single_ones() {
    if !crate::simd::has_avx512() {
        eprintln!("skipped: no AVX-512");
        return;
    }
    for width in (1_usize..=19).chain([31, 32, 33, 47, 64]) {
        for (height, low) in [(1_usize, [1, 1]), (7, [1, 0]), (8, [0, 2]), (5, [2, 1])] {
            let tiles = Tiles { rows: height.div_ceil(2), cols: width.div_ceil(2) };
            // Planes of 2 channels in 3 images; what is read of the image may be larger or smaller than the positions.
            let size = [height + 2 - low[0], width + 2 - low[1]];
            let image = 2 * size[0] * size[1];
            let mut x = numbers(3 * image, 1);
            let images = Planes { at: x.as_mut_ptr(), image, size, low };
            let mut y = numbers(3 * 2 * height * width, 1);
            let of_positions = Planes {
                at: y.as_mut_ptr(),
                image: 2 * height * width,
                size: [height, width],
                low: [0; 2],
            };
            for rows in [0..3 * tiles.rows, 1..3 * tiles.rows - 1, 2..2 + tiles.rows] {
                let rows = rows.start.min(rows.end)..rows.end;
                let n = rows.len() * tiles.cols;
                let pitch = Matrices::new(1, n).row;
                let kept = |of: &[f32]| -> Vec<u32> {
                    of.chunks(pitch).flat_map(|row| bits(&row[..n])).collect()
                };
                let found = |map: &dyn Fn(Points)| {
                    let mut points = vec![0_f32; POINTS * pitch];
                    map(Points { at: points.as_mut_ptr(), pitch });
                    kept(&points)
                };
                // SAFETY: all buffers have these sizes.
                unsafe {
                    assert_eq!(
                        found(&|to| of_images(&images, tiles, rows.clone(), to)),
                        found(&|to| portable::of_images(&images, tiles, rows.clone(), to)),
                    );
                    assert_eq!(
                        found(&|to| of_gradients(&of_positions, tiles, rows.clone(), to)),
                        found(&|to| portable::of_gradients(&of_positions, tiles, rows.clone(), to)),
                    );
                    let mut m = numbers(POINTS * pitch, 1);
                    let from = Points { at: m.as_mut_ptr(), pitch };
                    let mut both = [y.clone(), y.clone()];
                    let [vectors, single] =
                        both.each_mut().map(|y| Planes { at: y.as_mut_ptr(), ..of_positions });
                    to_positions(&vectors, tiles, rows.clone(), from);
                    portable::to_positions(&single, tiles, rows.clone(), from);
                    assert_eq!(bits(&both[0]), bits(&both[1]), "{width} {height} {rows:?}");
                }
            }
        }
    }
}

/// Whole vectors of kernels and the others after them are transformed as by definition.
#[test]
fn kernels_are_transformed_and_restored() {
    const G: [[f32; 3]; 4] = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0.0, 0.0, 1.0]];
    let n = 37;
    let taps = numbers(9 * n, 1);
    let mut found = vec![0_f32; POINTS * n];
    // SAFETY: the points have room.
    unsafe { kernels::transform(&taps, found.as_mut_ptr(), n) };
    let sums: [&[f32]; POINTS] = std::array::from_fn(|point| &found[point * n..][..n]);
    let mut restored = vec![0_f32; 9 * n];
    kernels::restore(&sums, &mut restored);
    for i in 0..n {
        let mut transform = [[0_f32; 4]; 4];
        for (a, line) in transform.iter_mut().enumerate() {
            for (b, value) in line.iter_mut().enumerate() {
                for k in 0..9 {
                    *value += G[a][k / 3] * taps[9 * i + k] * G[b][k % 3];
                }
                assert!((*value - sums[4 * a + b][i]).abs() < 1e-6);
            }
        }
        for k in 0..9 {
            let mut sum = 0.0;
            for (a, line) in transform.iter().enumerate() {
                for (b, value) in line.iter().enumerate() {
                    sum += G[a][k / 3] * value * G[b][k % 3];
                }
            }
            assert!((sum - restored[9 * i + k]).abs() < 1e-5);
        }
    }
}
