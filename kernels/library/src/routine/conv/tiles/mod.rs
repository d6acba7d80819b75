//! Winograd's tiles: how images are cut into them, and the maps between images and transformed tiles.
//!
//! Transformed tiles lie by *point*, the element of a tile: of each there is a row of all tiles. Vectors of tiles are mapped at a time, with
//! AVX-512 those of several rows of tiles ([`x86`]), otherwise of one ([`lanes`]); bit for bit the same.

pub(super) mod kernels;
mod lanes;
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
        lanes::$name($planes, $tiles, $rows, $points);
    };
}

/// Writes `Bᵀ d B` of some rows of tiles `d`, 4 × 4 elements at every second row and column.
///
/// # Safety
/// The planes must be readable, `to` writable for the tiles at each point and [`LANES`] behind them.
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
/// The tiles, and [`LANES`] behind them, must be readable at each point, the planes writable.
pub(super) unsafe fn to_positions(planes: &Planes, tiles: Tiles, rows: Range<usize>, from: Points) {
    // SAFETY: the processor has the features; the caller vouches for the rest.
    unsafe {
        dispatch!(to_positions(planes, tiles, rows, from));
    }
}
