//! The gradient of the weights where images lie channels last, of 2-byte elements: an implicit GEMM on tensor cores that reads both
//! operands as they lie.

use crate::assembler::Assembler;
use crate::conv::Conv;
use crate::conv::cudnn::VECTOR;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::plan::{Launch, Pointer};
use frit_ir::{DType, Op};

/// Contracted elements of a step, as in `conv_last_grad_weight.cu`.
const STEP: usize = 32;
/// Steps of operands in shared memory.
const STAGES: usize = 4;
/// Rows and columns of a block's tile.
const TILES: [Tile; 5] = [
    Tile { rows: 64, columns: 128 },
    Tile { rows: 64, columns: 192 },
    Tile { rows: 128, columns: 128 },
    Tile { rows: 128, columns: 192 },
    Tile { rows: 128, columns: 256 },
];
/// Parts have at least this many steps.
const LEAST_STEPS: usize = 8;
/// What a block takes besides its steps, in steps.
const FIRST_STEPS: usize = 8;
/// Multiprocessors of an H100, for which tile and number of parts are chosen; elsewhere only the speed differs.
const PROCESSORS: usize = 132;
/// Per clock of a multiprocessor: multiplications on tensor cores, and bytes from the L2 cache or memory; as convolutions of ResNet-50 ran
/// on an H100.
const PRODUCTS: usize = 600;
const BYTES: usize = 13;
/// Clocks of the launch that adds the parts.
const LAUNCH: usize = 5000;
/// The kernel counts elements on axes, and those that a window visits of all images, below this.
const MOST: usize = 1 << 29;

#[derive(Clone, Copy, Debug)]
struct Tile {
    rows: usize,
    columns: usize,
}

impl Tile {
    /// Eight for large tiles, as in the kernel.
    fn warps(self) -> usize {
        if self.rows == 128 && self.columns > 128 { 8 } else { 4 }
    }

    /// Blocks that a multiprocessor runs at once.
    fn resident(self) -> usize {
        8 / self.warps()
    }

    fn shared_bytes(self) -> u32 {
        ((self.rows + self.columns) * STEP * STAGES * DType::BF16.size()) as u32
    }
}

impl Conv<'_> {
    /// Whether the kernel supports the operation.
    pub(super) fn has_last_grad_weight(&self, op: &Op) -> bool {
        let low = matches!(self.element, DType::F16 | DType::BF16);
        let window = self.window;
        let visited = |axis: usize| {
            // No more than as many strides or dilations as there are elements and padding.
            let windows = self.size[axis] + window.low[axis] + window.high[axis];
            windows
                .checked_add(window.strides[axis])?
                .checked_add(self.taps[axis] * window.dilations[axis])
        };
        let image = (0..self.size.len()).try_fold(1_usize, |n, axis| n.checked_mul(visited(axis)?));
        let fits =
            |factor: usize| image.and_then(|n| n.checked_mul(factor)).is_some_and(|n| n < MOST);
        matches!(op, Op::ConvGradWeight(_))
            && low
            && self.groups == 1
            && c_type(self.out).is_some()
            && fits(self.images)
            && fits(self.channels.next_multiple_of(VECTOR))
            && fits(self.filters)
    }

    /// The launches of the kernel, with padded copies of what has channels or filters that are no whole vectors.
    pub(super) fn last_grad_weight(
        &self,
        a: &mut Assembler<'_>,
        [dy, x]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let padded = Conv {
            channels: self.channels.next_multiple_of(VECTOR),
            filters: self.filters.next_multiple_of(VECTOR),
            ..*self
        };
        let size: usize = self.size.iter().product();
        let taps: usize = self.taps.iter().product();
        let dy =
            self.padded(a, dy, self.images * self.positions, [self.filters, padded.filters])?;
        let x = self.padded(a, x, self.images * size, [self.channels, padded.channels])?;
        if (padded.channels, padded.filters) == (self.channels, self.filters) {
            return padded.whole_grad_weight(a, [dy, x], to);
        }
        let bytes = self.out.size();
        let result = a.scratch(padded.filters * taps * padded.channels * bytes);
        padded.whole_grad_weight(a, [dy, x], result)?;
        let strides = |channels: usize| vec![taps * channels, channels, 1];
        a.copy(
            (to, result),
            &[self.filters, taps, self.channels],
            [strides(self.channels), strides(padded.channels)],
            bytes,
        )
    }

    /// A copy of a matrix whose rows are filled up with zeros, if they become longer.
    fn padded(
        &self,
        a: &mut Assembler<'_>,
        from: Pointer,
        rows: usize,
        [own, padded]: [usize; 2],
    ) -> Option<Pointer> {
        if own == padded {
            return Some(from);
        }
        let size = self.element.size();
        let to = a.scratch(rows * padded * size);
        a.launch(Launch::Zero { at: to, bytes: rows * padded * size });
        a.copy((to, from), &[rows, own], [vec![padded, 1], vec![own, 1]], size)?;
        Some(to)
    }

    fn whole_grad_weight(
        &self,
        a: &mut Assembler<'_>,
        [dy, x]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let (tile, splits) = self.tile_and_splits();
        let taps: usize = self.taps.iter().product();
        let n = self.filters * self.rows().0;
        let (sums, sum_type) = self.place_of_parts(a, to, [splits, n]);
        let mut kernel = SourceKernel::new("conv_last_grad_weight", "conv_last_grad_weight")
            .define("T", c_type(self.element)?)
            .define("OUT", c_type(sum_type)?)
            .fixed_window(self.window, self.size, self.taps)?
            .define("TILE_M", tile.rows)
            .define("TILE_N", tile.columns)
            .define("STAGES", STAGES)
            .define("CACHED", u8::from(self.channels < tile.columns && taps > 1))
            .grid(self.tiles_of(tile) * splits)?
            .pointer(sums)
            .pointer(dy)
            .pointer(x)
            .i64(self.images)
            .i64(self.filters)
            .i64(self.channels)
            .i64(splits);
        kernel.block = 32 * tile.warps() as u32;
        kernel.shared_bytes = tile.shared_bytes();
        a.run(kernel);
        self.add_parts(a, to, sums, [splits, n])
    }

    fn tiles_of(&self, tile: Tile) -> usize {
        self.filters.div_ceil(tile.rows) * self.rows().0.div_ceil(tile.columns)
    }

    /// The tile, and the number of parts of the positions, that are estimated to be the fastest.
    fn tile_and_splits(&self) -> (Tile, usize) {
        let steps = (self.images * self.positions).div_ceil(STEP);
        let most = (steps / LEAST_STEPS).clamp(1, 2 * PROCESSORS);
        let all = TILES.iter().flat_map(|tile| (1..=most).map(|splits| (*tile, splits)));
        all.min_by_key(|(tile, splits)| self.clocks(*tile, *splits)).unwrap_or((TILES[0], 1))
    }

    /// Estimated clocks with this tile and this many parts.
    fn clocks(&self, tile: Tile, splits: usize) -> usize {
        let Tile { rows, columns } = tile;
        let steps = (self.images * self.positions).div_ceil(STEP).div_ceil(splits);
        // Neighboring taps read the same elements, all but the first from the L1 cache.
        let taps = self.taps.last().copied().unwrap_or(1);
        let read = (columns / taps).max(self.channels).min(columns);
        let bytes = (rows + read) * STEP * self.element.size();
        let step = (rows * columns * STEP / PRODUCTS).max(bytes / BYTES) * tile.resident();
        let waves = (self.tiles_of(tile) * splits).div_ceil(PROCESSORS * tile.resident());
        let moved = 2 * splits * self.filters * self.rows().0 * DType::F32.size();
        let added = if splits == 1 { 0 } else { LAUNCH + moved / (PROCESSORS * BYTES) };
        waves * (steps + FIRST_STEPS) * step + added
    }
}
