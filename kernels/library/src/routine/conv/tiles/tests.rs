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

fn bits(of: &[f32]) -> Vec<u32> {
    of.iter().map(|x| x.to_bits()).collect()
}

/// A map of tiles.
type Map = unsafe fn(&Planes, Tiles, Range<usize>, Points);

/// Vectors of tiles of every shape map them bit for bit as by definition, and write nothing else: as this processor maps them, and as those
/// without AVX-512.
#[test]
fn vectors_map_tiles_as_single_ones() {
    check([of_images, of_gradients, to_positions]);
    check([lanes::of_images, lanes::of_gradients, lanes::to_positions]);
}

fn check([of_images, of_gradients, to_positions]: [Map; 3]) {
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
                        found(&|to| single::of_images(&images, tiles, rows.clone(), to)),
                    );
                    assert_eq!(
                        found(&|to| of_gradients(&of_positions, tiles, rows.clone(), to)),
                        found(&|to| single::of_gradients(&of_positions, tiles, rows.clone(), to)),
                    );
                    let mut m = numbers(POINTS * pitch, 1);
                    let from = Points { at: m.as_mut_ptr(), pitch };
                    let mut both = [y.clone(), y.clone()];
                    let [vectors, single] =
                        both.each_mut().map(|y| Planes { at: y.as_mut_ptr(), ..of_positions });
                    to_positions(&vectors, tiles, rows.clone(), from);
                    single::to_positions(&single, tiles, rows.clone(), from);
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

/// The maps by their definition, one tile at a time.
mod single {
    use super::*;

    /// An element, 0 in the padding.
    unsafe fn get_element(planes: &Planes, image: usize, row: isize, column: isize) -> f32 {
        let is_inside = (0..planes.size[0] as isize).contains(&row)
            && (0..planes.size[1] as isize).contains(&column);
        // SAFETY: the element lies inside the image.
        if is_inside { unsafe { *planes.line(image, row as usize).offset(column) } } else { 0.0 }
    }

    /// `Bᵀ` times a column.
    fn of_image([a, b, c, d]: [f32; 4]) -> [f32; 4] {
        [a - c, b + c, c - b, b - d]
    }

    /// `A` times a column.
    fn of_gradient([a, b]: [f32; 2]) -> [f32; 4] {
        [a, a + b, a - b, -b]
    }

    /// `Aᵀ` times a column.
    fn to_position([a, b, c, d]: [f32; 4]) -> [f32; 2] {
        [a + b + c, b - c - d]
    }

    /// Calls `map` for each tile with its image, its first row and column, and where it lies at the first point.
    fn each_tile(
        tiles: Tiles,
        rows: Range<usize>,
        points: Points,
        mut map: impl FnMut(usize, [isize; 2], *mut f32),
    ) {
        for (k, row) in rows.enumerate() {
            for col in 0..tiles.cols {
                let first = [row % tiles.rows, col].map(|n| 2 * n as isize);
                map(row / tiles.rows, first, points.at.wrapping_add(k * tiles.cols + col));
            }
        }
    }

    pub(super) unsafe fn of_images(planes: &Planes, tiles: Tiles, rows: Range<usize>, to: Points) {
        each_tile(tiles, rows, to, |image, [row, column], place| {
            let [top, left] = planes.low.map(|low| low as isize);
            // SAFETY: the caller vouches for planes and points.
            unsafe {
                let get = |i, j| get_element(planes, image, row - top + i, column - left + j);
                let lines = [0, 1, 2, 3].map(|i| of_image([0, 1, 2, 3].map(|j| get(i, j))));
                write(place, to.pitch, |j| of_image(lines.map(|line| line[j])));
            }
        });
    }

    pub(super) unsafe fn of_gradients(
        planes: &Planes,
        tiles: Tiles,
        rows: Range<usize>,
        to: Points,
    ) {
        each_tile(tiles, rows, to, |image, [row, column], place| {
            // SAFETY: the caller vouches for planes and points.
            unsafe {
                let get = |i, j| get_element(planes, image, row + i, column + j);
                let lines = [0, 1].map(|i| of_gradient([0, 1].map(|j| get(i, j))));
                write(place, to.pitch, |j| of_gradient(lines.map(|line| line[j])));
            }
        });
    }

    /// Writes the columns of a transformed tile.
    unsafe fn write(place: *mut f32, pitch: usize, column: impl Fn(usize) -> [f32; 4]) {
        for j in 0..4 {
            for (i, value) in column(j).into_iter().enumerate() {
                // SAFETY: the caller vouches for all points.
                unsafe { *place.add((4 * i + j) * pitch) = value };
            }
        }
    }

    pub(super) unsafe fn to_positions(
        planes: &Planes,
        tiles: Tiles,
        rows: Range<usize>,
        from: Points,
    ) {
        each_tile(tiles, rows, from, |image, [row, column], place| {
            // SAFETY: the caller vouches for planes and points.
            unsafe {
                let get = |i: usize, j: usize| *place.add((4 * i + j) * from.pitch);
                let columns = [0, 1, 2, 3].map(|j| to_position([0, 1, 2, 3].map(|i| get(i, j))));
                for i in 0..2.min(planes.size[0] - row as usize) {
                    let line = planes.line(image, row as usize + i).offset(column);
                    let values = to_position(columns.map(|column| column[i]));
                    let width = 2.min(planes.size[1] - column as usize);
                    line.copy_from_nonoverlapping(values.as_ptr(), width);
                }
            }
        });
    }
}
