//! Implicit-GEMM convolution and its gradients on tensor cores, for 2-byte elements.

use crate::assembler::Assembler;
use crate::conv::Conv;
use crate::source::SourceKernel;
use crate::source::c_type;
use frit_ir::plan::Pointer;
use frit_ir::{DType, Op};

/// Columns of a block's tile, and contracted elements per step, as in `conv_tiles.cu`.
const TILE_N: usize = 128;
const STEP: usize = 32;
/// A weight's gradient has few elements and long sums: these are split until there are about this many blocks, more
/// than any GPU runs at once, but not into parts of fewer steps than [`LEAST_STEPS`].
const BLOCKS: usize = 512;
const LEAST_STEPS: usize = 8;

impl Conv<'_> {
    /// Whether the kernels support it: they index with 32 bits.
    pub(super) fn has_tiles(&self) -> bool {
        let size: usize = self.size.iter().product();
        let images = self.images * self.channels.max(self.filters) * size.max(self.positions);
        let weights = self.channels * self.filters * self.taps.iter().product::<usize>();
        matches!(self.element, DType::F16 | DType::BF16)
            && images.max(weights) < i32::MAX as usize / 2
    }

    pub(super) fn tiles(
        &self,
        a: &mut Assembler<'_>,
        op: &Op,
        [first, second]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        match op {
            Op::Conv(_) => self.tiles_of_images(a, [second, first], to, false),
            Op::ConvGradInput(_) => {
                let weights = self.transposed_weights(a, second)?;
                self.tiles_of_images(a, [weights, first], to, true)
            }
            _ => self.tiles_of_weights(a, [first, second], to),
        }
    }

    /// Channels and filters per group, and taps.
    fn group(&self) -> (usize, usize, usize) {
        let taps = self.taps.iter().product();
        (self.channels / self.groups, self.filters / self.groups, taps)
    }

    /// Transposes `[groups, filters, channels, taps]` to `[groups, channels, filters, taps]`.
    fn transposed_weights(&self, a: &mut Assembler<'_>, from: Pointer) -> Option<Pointer> {
        let ((channels, filters, taps), bytes) = (self.group(), self.element.size());
        let to = a.scratch(self.groups * channels * filters * taps * bytes);
        let of_group = channels * filters * taps;
        a.copy(
            (to, from),
            &[self.groups, channels, filters, taps],
            [vec![of_group, filters * taps, taps, 1], vec![of_group, taps, channels * taps, 1]],
            bytes,
        )?;
        Some(to)
    }

    fn tile_kernel(&self, entry: &'static str, out: DType, rows: usize) -> Option<SourceKernel> {
        let unit = self.window.strides.iter().all(|n| *n == 1);
        let kernel = SourceKernel::new("conv_tiles", entry)
            .define("T", c_type(self.element)?)
            .define("OUT", c_type(out)?)
            .define("RANK", self.size.len())
            .define("TILE_M", tile_rows(rows))
            .define("UNIT", u8::from(unit));
        Some(kernel)
    }

    fn tiles_of_images(
        &self,
        a: &mut Assembler<'_>,
        [weights, images]: [Pointer; 2],
        to: Pointer,
        backward: bool,
    ) -> Option<()> {
        let (channels, filters, _) = self.group();
        let (rows, summed, positions) = match backward {
            true => (channels, filters, self.size.iter().product()),
            false => (filters, channels, self.positions),
        };
        let tiles = rows.div_ceil(tile_rows(rows)) * (self.images * positions).div_ceil(TILE_N);
        let kernel = self
            .tile_kernel("conv_tiles", self.out, rows)?
            .define("BACKWARD", u8::from(backward))
            .grid(tiles * self.groups)?
            .pointer(to)
            .pointer(weights)
            .pointer(images)
            .window(self.window, self.size, self.taps)?
            .i64(self.images)
            .i64(self.groups)
            .i64(rows)
            .i64(summed);
        a.run(kernel);
        Some(())
    }

    fn tiles_of_weights(
        &self,
        a: &mut Assembler<'_>,
        [dy, x]: [Pointer; 2],
        to: Pointer,
    ) -> Option<()> {
        let (channels, filters, taps) = self.group();
        let tiles = filters.div_ceil(tile_rows(filters)) * (channels * taps).div_ceil(TILE_N);
        let steps = (self.images * self.positions).div_ceil(STEP);
        let splits = BLOCKS.div_ceil(tiles * self.groups).min(steps / LEAST_STEPS).max(1);
        let n = self.filters * channels * taps;
        let (sums, sum_type) = self.place_of_parts(a, to, [splits, n]);
        let kernel = self
            .tile_kernel("conv_tiles_grad_weight", sum_type, filters)?
            .define("BACKWARD", 0)
            .grid(tiles * self.groups * splits)?
            .pointer(sums)
            .pointer(dy)
            .pointer(x)
            .window(self.window, self.size, self.taps)?
            .i64(self.images)
            .i64(self.groups)
            .i64(filters)
            .i64(channels)
            .i64(splits);
        a.run(kernel);
        self.add_parts(a, to, sums, [splits, n])
    }
}

/// Rows of a block's tile: fewer if the matrix has few.
fn tile_rows(rows: usize) -> usize {
    if rows > 64 { 128 } else { 64 }
}
