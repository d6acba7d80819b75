//! Maps of tiles for every processor: eight tiles side by side at a time, in loops that compilers turn into vector instructions.

use super::{POINTS, Planes, Points, Tiles};
use crate::simd::vectorized;
use std::ops::Range;

/// Tiles that are mapped at a time.
const TILES: usize = 8;

/// A number of each tile.
type Vector = [f32; TILES];
/// Elements of an image that tiles have side by side: two of each, and two that are the next tile's.
type Line = [f32; 2 * TILES + 2];
/// Positions that tiles have side by side.
type Positions = [f32; 2 * TILES];

#[inline(always)]
fn add(a: Vector, b: Vector) -> Vector {
    std::array::from_fn(|t| a[t] + b[t])
}

#[inline(always)]
fn sub(a: Vector, b: Vector) -> Vector {
    std::array::from_fn(|t| a[t] - b[t])
}

/// `Bᵀ` times a column.
#[inline(always)]
fn of_image([a, b, c, d]: [Vector; 4]) -> [Vector; 4] {
    [sub(a, c), add(b, c), sub(c, b), sub(b, d)]
}

/// `A` times a column.
#[inline(always)]
fn of_gradient([a, b]: [Vector; 2]) -> [Vector; 4] {
    [a, add(a, b), sub(a, b), b.map(|b| -b)]
}

/// `Aᵀ` times a column.
#[inline(always)]
fn to_position([a, b, c, d]: [Vector; 4]) -> [Vector; 2] {
    [add(add(a, b), c), sub(sub(b, c), d)]
}

vectorized! {
    /// `Bᵀ d B` of tiles of four lines.
    fn transform_image(lines: [&Line; 4], to: &mut [Vector; POINTS]) {
        let lines = lines.map(|line| {
            of_image([0, 1, 2, 3].map(|first| std::array::from_fn(|t| line[2 * t + first])))
        });
        for j in 0..4 {
            for (i, values) in of_image(lines.map(|line| line[j])).into_iter().enumerate() {
                to[4 * i + j] = values;
            }
        }
    }
}

vectorized! {
    /// `A dy Aᵀ` of tiles of two lines.
    fn transform_gradient(lines: [&Positions; 2], to: &mut [Vector; POINTS]) {
        let lines = lines.map(|line| {
            of_gradient([0, 1].map(|first| std::array::from_fn(|t| line[2 * t + first])))
        });
        for j in 0..4 {
            for (i, values) in of_gradient(lines.map(|line| line[j])).into_iter().enumerate() {
                to[4 * i + j] = values;
            }
        }
    }
}

vectorized! {
    /// The two lines of `Aᵀ m A`.
    fn restore(points: &[Vector; POINTS], to: &mut [Positions; 2]) {
        let columns =
            [0, 1, 2, 3].map(|j| to_position([0, 1, 2, 3].map(|i| points[4 * i + j])));
        for (i, to) in to.iter_mut().enumerate() {
            let [even, odd] = to_position(columns.map(|column| column[i]));
            for t in 0..TILES {
                to[2 * t] = even[t];
                to[2 * t + 1] = odd[t];
            }
        }
    }
}

/// Calls `map` for the tiles from each eighth column of each row of tiles on: with their image, their first row and column, and where they
/// lie at the first point.
fn each_vector(
    tiles: Tiles,
    rows: Range<usize>,
    points: Points,
    mut map: impl FnMut(usize, [usize; 2], *mut f32),
) {
    for (k, row) in rows.enumerate() {
        for col in (0..tiles.cols).step_by(TILES) {
            let first = [row % tiles.rows * 2, col * 2];
            map(row / tiles.rows, first, points.at.wrapping_add(k * tiles.cols + col));
        }
    }
}

/// `N` elements of a row of an image from a column on, with zeros outside of the image; copied to `own`, if there are any.
///
/// # Safety
/// The planes must be readable.
#[inline]
unsafe fn line<'a, const N: usize>(
    planes: &Planes,
    image: usize,
    [row, column]: [isize; 2],
    own: &'a mut [f32; N],
) -> &'a [f32; N] {
    let [height, width] = planes.size.map(|n| n as isize);
    let (from, end) = (column.max(0), (column + N as isize).min(width));
    if !(0..height).contains(&row) || from >= end {
        *own = [0.0; N];
        return own;
    }
    let at = planes.line(image, row as usize).wrapping_offset(from);
    // SAFETY: elements from `from` to `end` lie inside the row.
    unsafe {
        if end - from == N as isize {
            return &*at.cast::<[f32; N]>();
        }
        *own = [0.0; N];
        let to = own[(from - column) as usize..].as_mut_ptr();
        at.copy_to_nonoverlapping(to, (end - from) as usize);
    }
    own
}

/// Writes transformed tiles. Those behind the last of a row are overwritten by the next.
unsafe fn write(vectors: &[Vector; POINTS], place: *mut f32, pitch: usize) {
    for (point, vector) in vectors.iter().enumerate() {
        // SAFETY: the caller vouches for a vector at each point.
        unsafe { place.add(point * pitch).cast::<Vector>().write(*vector) };
    }
}

pub(super) unsafe fn of_images(planes: &Planes, tiles: Tiles, rows: Range<usize>, to: Points) {
    let [top, left] = planes.low.map(|low| low as isize);
    let mut vectors = [[0.0; TILES]; POINTS];
    each_vector(tiles, rows, to, |image, [row, column], place| {
        let mut own = [[0.0; 2 * TILES + 2]; 4];
        let [a, b, c, d] = &mut own;
        // SAFETY: the caller vouches for planes and points.
        unsafe {
            let get = |i, own| {
                let first = [row as isize - top + i, column as isize - left];
                line(planes, image, first, own)
            };
            transform_image([get(0, a), get(1, b), get(2, c), get(3, d)], &mut vectors);
            write(&vectors, place, to.pitch);
        }
    });
}

pub(super) unsafe fn of_gradients(planes: &Planes, tiles: Tiles, rows: Range<usize>, to: Points) {
    let mut vectors = [[0.0; TILES]; POINTS];
    each_vector(tiles, rows, to, |image, [row, column], place| {
        let mut own = [[0.0; 2 * TILES]; 2];
        let [a, b] = &mut own;
        // SAFETY: the caller vouches for planes and points.
        unsafe {
            let get = |i, own| line(planes, image, [row as isize + i, column as isize], own);
            transform_gradient([get(0, a), get(1, b)], &mut vectors);
            write(&vectors, place, to.pitch);
        }
    });
}

pub(super) unsafe fn to_positions(planes: &Planes, tiles: Tiles, rows: Range<usize>, from: Points) {
    let mut positions = [[0.0; 2 * TILES]; 2];
    each_vector(tiles, rows, from, |image, [row, column], place| {
        // SAFETY: the caller vouches for planes and points.
        unsafe {
            let get = |point| place.add(point * from.pitch).cast::<Vector>().read();
            restore(&std::array::from_fn(get), &mut positions);
            let width = (planes.size[1] - column).min(2 * TILES);
            for (i, values) in positions.iter().enumerate().take(planes.size[0] - row) {
                let line = planes.line(image, row + i).add(column);
                if width == 2 * TILES {
                    line.cast::<Positions>().write(*values);
                } else {
                    line.copy_from_nonoverlapping(values.as_ptr(), width);
                }
            }
        }
    });
}
