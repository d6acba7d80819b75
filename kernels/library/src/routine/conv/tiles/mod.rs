//! Winograd's tiles: how images are cut into them, and the maps between images and transformed tiles.
//!
//! Transformed tiles lie by *point*, the element of a tile: of each there is a row of all tiles. With AVX-512 a vector of tiles is mapped
//! at a time, otherwise one tile; bit for bit the same.

pub(super) mod kernels;
#[cfg(test)]
pub(super) mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

/// Elements of a transformed tile.
pub(super) const POINTS: usize = 16;
/// Tiles of a vector.
const LANES: usize = 16;

/// How images are cut into tiles: `rows` of `cols` tiles each. Rows are counted through all images.
#[derive(Clone, Copy)]
pub(super) struct Tiles {
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// A channel of all images.
#[derive(Clone, Copy)]
pub(super) struct Planes {
    pub(super) at: *mut f32,
    /// Elements between two images.
    pub(super) image: usize,
    /// Height and width.
    pub(super) size: [usize; 2],
    /// Padding above and to the left.
    pub(super) low: [usize; 2],
}

/// Transformed tiles of a channel: some rows of tiles, one after the other, at each point.
#[derive(Clone, Copy)]
pub(super) struct Points {
    at: *mut f32,
    /// Elements between two points.
    pitch: usize,
}

/// Where transformed tiles of some channels lie: at each point a matrix `[channels, tiles]`.
#[derive(Clone, Copy)]
pub(super) struct Matrices {
    channels: usize,
    /// Elements between two channels.
    pub(super) row: usize,
}

impl Matrices {
    /// For `n` tiles: rows are whole vectors, and one that begins at the last tile.
    pub(super) fn new(channels: usize, n: usize) -> Matrices {
        Matrices { channels, row: n.next_multiple_of(LANES) + LANES }
    }

    /// Elements between two points: an odd number of lines of the cache, as a tile's points would else be in the same places of
    /// the cache and evict each other.
    fn point(&self) -> usize {
        ((self.channels * self.row / LANES) | 1) * LANES
    }

    pub(super) fn bytes(&self) -> usize {
        POINTS * self.point() * size_of::<f32>()
    }

    /// The tiles of a channel.
    pub(super) fn channel(&self, at: *mut u8, channel: usize) -> Points {
        Points { at: at.cast::<f32>().wrapping_add(channel * self.row), pitch: self.point() }
    }

    /// The matrix of a point, from a channel on.
    pub(super) fn matrix(&self, at: *mut u8, point: usize, channel: usize) -> *mut u8 {
        let skip = point * self.point() + channel * self.row;
        at.cast::<f32>().wrapping_add(skip).cast()
    }
}

impl Planes {
    /// Where a row of an image begins.
    fn line(&self, image: usize, row: usize) -> *mut f32 {
        self.at.wrapping_add(image * self.image + row * self.size[1])
    }

    /// An element, 0 in the padding.
    unsafe fn get(&self, image: usize, row: isize, column: isize) -> f32 {
        let is_inside = (0..self.size[0] as isize).contains(&row)
            && (0..self.size[1] as isize).contains(&column);
        // SAFETY: the element lies inside the image.
        if is_inside { unsafe { *self.line(image, row as usize).offset(column) } } else { 0.0 }
    }
}

/// Which way tiles are mapped.
macro_rules! dispatch {
    ($name:ident($planes:ident, $tiles:ident, $rows:ident, $points:ident)) => {
        #[cfg(target_arch = "x86_64")]
        if crate::simd::has_avx512() {
            // As many rows of tiles as a vector holds.
            return match $tiles.cols {
                ..=4 => x86::$name::<4>($planes, $tiles, $rows, $points),
                5..=8 => x86::$name::<2>($planes, $tiles, $rows, $points),
                _ => x86::$name::<1>($planes, $tiles, $rows, $points),
            };
        }
        portable::$name($planes, $tiles, $rows, $points);
    };
}

/// Writes `Bᵀ d B` of some rows of tiles `d`, 4 × 4 elements at every second row and column.
///
/// # Safety
/// The planes must be readable, `to` writable for the tiles at each point and a vector behind them.
pub(super) unsafe fn of_images(planes: &Planes, tiles: Tiles, rows: Range<usize>, to: Points) {
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        dispatch!(of_images(planes, tiles, rows, to));
    }
}

/// Writes `A dy Aᵀ` of some rows of tiles `dy`, 2 × 2 positions.
///
/// # Safety
/// As for [`of_images`].
pub(super) unsafe fn of_gradients(planes: &Planes, tiles: Tiles, rows: Range<usize>, to: Points) {
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        dispatch!(of_gradients(planes, tiles, rows, to));
    }
}

/// Writes positions `Aᵀ m A` of some rows of tiles `m`.
///
/// # Safety
/// The tiles must be readable at each point, the planes writable.
pub(super) unsafe fn to_positions(planes: &Planes, tiles: Tiles, rows: Range<usize>, from: Points) {
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        dispatch!(to_positions(planes, tiles, rows, from));
    }
}

/// One tile at a time.
mod portable {
    use super::*;

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
                let get = |i, j| planes.get(image, row - top + i, column - left + j);
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
                let get = |i, j| planes.get(image, row + i, column + j);
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
