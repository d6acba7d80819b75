//! Maps of tiles with AVX-512. A vector holds `ROWS` rows of tiles, so that narrow images fill it, too: 1 of up to 16 tiles (and the next
//! vector those behind), 2 of up to 8, or 4 of up to 4.

use super::{LANES, Planes, Points, Tiles};
use std::arch::x86_64::*;
use std::ops::Range;

/// The rows of tiles of a vector, each with its image and the first row of its elements; none behind the last.
struct Group<const ROWS: usize> {
    first: [Option<(usize, isize)>; ROWS],
}

impl<const ROWS: usize> Group<ROWS> {
    /// Elements that a row of tiles has side by side, without those that the next tile shares.
    const WIDTH: usize = 2 * LANES / ROWS;

    fn new(tiles: Tiles, row: usize, end: usize, top: usize) -> Group<ROWS> {
        let first = std::array::from_fn(|i| {
            let row = (row + i < end).then_some(row + i)?;
            Some((row / tiles.rows, (row % tiles.rows * 2) as isize - top as isize))
        });
        Group { first }
    }

    /// Row `i` of the elements of each row of tiles; none outside of the image.
    fn lines(&self, planes: &Planes, i: usize) -> [Option<*mut f32>; ROWS] {
        self.first.map(|first| {
            let (image, row) = first?;
            let row = usize::try_from(row + i as isize).ok()?;
            (row < planes.size[0]).then(|| planes.line(image, row))
        })
    }

    /// Which of the elements from a column on lie inside of images so wide.
    fn inside(column: isize, width: usize) -> u32 {
        let below = |n: isize| ((1_u64 << n.clamp(0, Self::WIDTH as isize)) - 1) as u32;
        below(width as isize - column) & !below(-column)
    }

    /// The lanes of tiles, where a vector has fewer than it could.
    fn kept(tiles: Tiles) -> u16 {
        let width = LANES / ROWS;
        let row = u16::MAX >> (LANES - width.min(tiles.cols));
        (0..ROWS).fold(0, |mask, i| mask | row << (i * width))
    }

    /// The tiles that there are from a column of tiles on.
    fn count(&self, tiles: Tiles, column: usize) -> usize {
        let rows = self.first.iter().flatten().count();
        rows * (tiles.cols - column).min(LANES / ROWS)
    }
}

/// Loads elements of each line from a column on: the tiles' first elements are in the even, their second in the odd lanes of both vectors.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load<const ROWS: usize>(
    lines: [Option<*mut f32>; ROWS],
    column: isize,
    inside: u32,
) -> [__m512; 2] {
    let part = |i: usize, skip: isize, before: __m512| {
        // A load without lanes from nowhere would be right, and slow.
        let Some(line) = lines[i] else { return before };
        // Lanes before the line's are those of another.
        let mask = inside >> skip.max(0) << (-skip).max(0);
        // SAFETY: the mask keeps loads inside the line.
        unsafe { _mm512_mask_loadu_ps(before, mask as u16, line.wrapping_offset(column + skip)) }
    };
    let zero = _mm512_setzero_ps();
    match ROWS {
        1 => [part(0, 0, zero), part(0, 16, zero)],
        2 => [part(0, 0, zero), part(1, 0, zero)],
        _ => [part(1, -8, part(0, 0, zero)), part(3, -8, part(2, 0, zero))],
    }
}

/// Stores what [`load`] would load.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store<const ROWS: usize>(
    values: [__m512; 2],
    lines: [Option<*mut f32>; ROWS],
    column: isize,
    inside: u32,
) {
    let part = |i: usize, skip: isize, values: __m512| {
        let Some(line) = lines[i] else { return };
        let mask = inside >> skip.max(0) << (-skip).max(0);
        // SAFETY: the mask keeps stores inside the line.
        unsafe { _mm512_mask_storeu_ps(line.wrapping_offset(column + skip), mask as u16, values) };
    };
    let [low, high] = values;
    part(0, 0, low);
    match ROWS {
        1 => part(0, 16, high),
        2 => part(1, 0, high),
        _ => {
            part(1, -8, low);
            part(2, 0, high);
            part(3, -8, high);
        }
    }
}

/// The even and the odd elements of both vectors.
#[target_feature(enable = "avx512f")]
#[inline]
fn split([low, high]: [__m512; 2]) -> [__m512; 2] {
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    [_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)]
}

/// Elements of both vectors in turn.
#[target_feature(enable = "avx512f")]
#[inline]
fn join([even, odd]: [__m512; 2]) -> [__m512; 2] {
    let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    [_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd)]
}

/// `Bᵀ` times a column.
#[target_feature(enable = "avx512f")]
#[inline]
fn of_image([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    [_mm512_sub_ps(a, c), _mm512_add_ps(b, c), _mm512_sub_ps(c, b), _mm512_sub_ps(b, d)]
}

/// `A` times a column.
#[target_feature(enable = "avx512f")]
#[inline]
fn of_gradient([a, b]: [__m512; 2]) -> [__m512; 4] {
    let negative = _mm512_sub_ps(_mm512_set1_ps(-0.0), b);
    [a, _mm512_add_ps(a, b), _mm512_sub_ps(a, b), negative]
}

/// `Aᵀ` times a column.
#[target_feature(enable = "avx512f")]
#[inline]
fn to_position([a, b, c, d]: [__m512; 4]) -> [__m512; 2] {
    let first = _mm512_add_ps(_mm512_add_ps(a, b), c);
    [first, _mm512_sub_ps(_mm512_sub_ps(b, c), d)]
}

/// Writes column `j` of transformed tiles.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn write(column: [__m512; 4], j: usize, kept: u16, (place, pitch): (*mut f32, usize)) {
    for (i, values) in column.into_iter().enumerate() {
        let values = if kept == u16::MAX { values } else { _mm512_maskz_compress_ps(kept, values) };
        // SAFETY: the caller vouches for a vector at each point.
        unsafe { _mm512_storeu_ps(place.add((4 * i + j) * pitch), values) };
    }
}

/// The lanes that [`write`] compresses: those of several rows. What a single one has behind its end is overwritten by the next.
fn compressed<const ROWS: usize>(tiles: Tiles) -> u16 {
    if ROWS == 1 { u16::MAX } else { Group::<ROWS>::kept(tiles) }
}

#[target_feature(enable = "avx512f")]
pub(super) unsafe fn of_images<const ROWS: usize>(
    planes: &Planes,
    tiles: Tiles,
    rows: Range<usize>,
    to: Points,
) {
    let kept = compressed::<ROWS>(tiles);
    let [top, left] = planes.low;
    for row in rows.clone().step_by(ROWS) {
        let group = Group::<ROWS>::new(tiles, row, rows.end, top);
        for col in (0..tiles.cols).step_by(LANES / ROWS) {
            let column = (2 * col) as isize - left as isize;
            let inside = [column, column + 2].map(|at| Group::<ROWS>::inside(at, planes.size[1]));
            let place = to.at.wrapping_add((row - rows.start) * tiles.cols + col);
            // SAFETY: masks keep loads inside the images; the caller vouches for the points.
            unsafe {
                let lines = [0, 1, 2, 3].map(|i| {
                    let lines = group.lines(planes, i);
                    let [a, b] = split(load(lines, column, inside[0]));
                    let [c, d] = split(load(lines, column + 2, inside[1]));
                    of_image([a, b, c, d])
                });
                for j in 0..4 {
                    write(of_image(lines.map(|line| line[j])), j, kept, (place, to.pitch));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
pub(super) unsafe fn of_gradients<const ROWS: usize>(
    planes: &Planes,
    tiles: Tiles,
    rows: Range<usize>,
    to: Points,
) {
    let kept = compressed::<ROWS>(tiles);
    for row in rows.clone().step_by(ROWS) {
        let group = Group::<ROWS>::new(tiles, row, rows.end, 0);
        for col in (0..tiles.cols).step_by(LANES / ROWS) {
            let column = (2 * col) as isize;
            let inside = Group::<ROWS>::inside(column, planes.size[1]);
            let place = to.at.wrapping_add((row - rows.start) * tiles.cols + col);
            // SAFETY: masks keep loads inside the images; the caller vouches for the points.
            unsafe {
                let lines = [0, 1]
                    .map(|i| of_gradient(split(load(group.lines(planes, i), column, inside))));
                for j in 0..4 {
                    write(of_gradient(lines.map(|line| line[j])), j, kept, (place, to.pitch));
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f")]
pub(super) unsafe fn to_positions<const ROWS: usize>(
    planes: &Planes,
    tiles: Tiles,
    rows: Range<usize>,
    from: Points,
) {
    let kept = compressed::<ROWS>(tiles);
    for row in rows.clone().step_by(ROWS) {
        let group = Group::<ROWS>::new(tiles, row, rows.end, 0);
        for col in (0..tiles.cols).step_by(LANES / ROWS) {
            let column = (2 * col) as isize;
            let inside = Group::<ROWS>::inside(column, planes.size[1]);
            let there = u16::MAX >> (LANES - group.count(tiles, col));
            let place = from.at.wrapping_add((row - rows.start) * tiles.cols + col);
            // SAFETY: masks keep loads and stores inside tiles and images.
            unsafe {
                let point = |i: usize, j: usize| {
                    let at = place.add((4 * i + j) * from.pitch);
                    let values = _mm512_maskz_loadu_ps(there, at);
                    match kept {
                        u16::MAX => values,
                        _ => _mm512_maskz_expand_ps(kept, values),
                    }
                };
                let columns = [0, 1, 2, 3].map(|j| to_position([0, 1, 2, 3].map(|i| point(i, j))));
                for i in 0..2 {
                    let values = join(to_position(columns.map(|column| column[i])));
                    store(values, group.lines(planes, i), column, inside);
                }
            }
        }
    }
}
