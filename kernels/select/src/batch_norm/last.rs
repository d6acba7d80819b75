//! Kernels for batch normalizations of images that have their channels last.

use super::Norm;
use super::region::Region;
use crate::assembler::Assembler;
use crate::source::{SourceKernel, c_type};
use frit_ir::Op;
use frit_ir::plan::Pointer;

/// Threads per block, as in `batch_norm_last.cu`.
const BLOCK: usize = 256;
/// Threads of a block that adds partial sums, and the channels it adds them for, as there.
const TOTAL_BLOCK: usize = 512;
const TOTAL_CHANNELS: usize = 8;
/// Vectors of a row per block. They are long accesses already; blocks that are wider, and less high, would have more
/// partial sums.
const MOST_COLUMNS: usize = 32;
/// Minimum rows per thread.
const ROWS: usize = 4;
/// Blocks that occupy an H100: three per multiprocessor, all at once, as each has the same work.
const BUSY: usize = 396;
/// Two f64.
const PART_BYTES: usize = 16;

/// How the images of a normalization are divided.
struct Last<'a> {
    norm: &'a Norm<'a>,
    /// Elements per vector access.
    width: usize,
    /// Vectors of a row per block.
    columns: usize,
    /// Blocks beside each other that have all channels.
    tiles: usize,
    /// Blocks that share the rows.
    parts: usize,
}

pub(super) fn cuda(
    a: &mut Assembler<'_>,
    norm: &Norm<'_>,
    region: &Region<'_>,
    reads: &[Pointer],
    writes: &[Pointer],
) -> Option<()> {
    let last = Last::of(norm)?;
    match region.norm.op {
        Op::BatchNorm(_) => last.forward(a, region.has_relu, reads, writes),
        _ => last.gradient(a, reads, writes),
    }
}

impl<'a> Last<'a> {
    fn of(norm: &'a Norm<'a>) -> Option<Last<'a>> {
        // Kernels count rows as u32, a few groups of rows beyond the last one.
        i32::try_from(norm.count()).ok()?;
        let most = 16 / norm.x.dtype.size();
        let fits = |width: &usize| norm.channels().is_multiple_of(*width);
        let width = (0..).map(|i| most >> i).find(fits).unwrap_or(1);
        let packs = norm.channels() / width;
        let columns = packs.div_ceil(packs.div_ceil(MOST_COLUMNS));
        let tiles = packs.div_ceil(columns);
        let share = BLOCK / columns * ROWS;
        let parts = norm.count().div_ceil(share).min(BUSY / tiles).max(1);
        Some(Last { norm, width, columns, tiles, parts })
    }

    fn forward(
        &self,
        a: &mut Assembler<'_>,
        has_relu: bool,
        reads: &[Pointer],
        writes: &[Pointer],
    ) -> Option<()> {
        let ([x, scale, bias, other @ ..], [y, mean, var]) = (reads, writes) else { return None };
        let sums = self.partial_sums(a);
        self.launch(a, "batch_norm_last_parts", &[sums, *x])?;
        let constants = self.constants(a, 3);
        let total = [constants, *mean, *var, sums, *x, *scale, *bias];
        self.launch_total(a, "batch_norm_last_total", &total)?;
        let entry = match (has_relu, other.len()) {
            (false, 0) => "batch_norm_last",
            (true, 0) => "batch_norm_last_relu",
            (true, 1) => "batch_norm_last_sum_relu",
            _ => return None,
        };
        self.launch(a, entry, &[&[*y, *x], other, &[constants]].concat())
    }

    fn gradient(&self, a: &mut Assembler<'_>, reads: &[Pointer], writes: &[Pointer]) -> Option<()> {
        let [dy, x, scale, mean, var, gate @ ..] = reads else { return None };
        let [dx, dscale, dbias, passed @ ..] = writes else { return None };
        let sums = self.partial_sums(a);
        let entry = match gate.len() {
            0 => "batch_norm_last_grad_parts",
            1 => "batch_norm_last_relu_grad_parts",
            _ => "batch_norm_last_sum_relu_grad_parts",
        };
        // What passes a ReLU is in memory between the two, and in that of the result if it is none itself.
        let passed = (!gate.is_empty()).then(|| *passed.first().unwrap_or(dx));
        let parts = [&[sums], passed.as_slice(), &[*dy, *x, *mean], gate].concat();
        self.launch(a, entry, &parts)?;
        let constants = self.constants(a, 4);
        let total = [constants, *dscale, *dbias, sums, *scale, *mean, *var];
        self.launch_total(a, "batch_norm_last_grad_total", &total)?;
        let dy = passed.unwrap_or(*dy);
        self.launch(a, "batch_norm_last_grad", &[*dx, dy, *x, constants])
    }

    /// Allocates the partial sums of all channels.
    fn partial_sums(&self, a: &mut Assembler<'_>) -> Pointer {
        a.scratch(self.norm.channels() * self.parts * PART_BYTES)
    }

    /// Allocates so many numbers per channel, of the type in which kernels compute.
    fn constants(&self, a: &mut Assembler<'_>, n: usize) -> Pointer {
        a.scratch(self.norm.channels() * n * self.norm.x.dtype.size().max(4))
    }

    fn kernel(&self, entry: &'static str, pointers: &[Pointer]) -> Option<SourceKernel> {
        let kernel = SourceKernel::new("batch_norm_last", entry)
            .define("T", c_type(self.norm.x.dtype)?)
            .define("S", c_type(self.norm.statistics)?)
            .define("WIDTH", self.width);
        Some(kernel.pointers(pointers.iter().copied()))
    }

    /// Launches a kernel over the images.
    fn launch(
        &self,
        a: &mut Assembler<'_>,
        entry: &'static str,
        pointers: &[Pointer],
    ) -> Option<()> {
        let kernel = self.kernel(entry, pointers)?.i64(self.norm.count());
        let kernel = kernel.i64(self.norm.channels()).i64(self.columns);
        let mut kernel = kernel.grid(self.tiles)?;
        kernel.grid[1] = self.parts as u32;
        kernel.block = BLOCK as u32;
        a.run(kernel);
        Some(())
    }

    /// Launches a kernel that adds the partial sums.
    fn launch_total(
        &self,
        a: &mut Assembler<'_>,
        entry: &'static str,
        pointers: &[Pointer],
    ) -> Option<()> {
        let kernel = self.kernel(entry, pointers)?.i64(self.parts).i64(self.norm.count());
        let kernel = kernel.i64(self.norm.channels()).f64(self.norm.eps);
        let mut kernel = kernel.grid(self.norm.channels().div_ceil(TOTAL_CHANNELS))?;
        kernel.block = TOTAL_BLOCK as u32;
        a.run(kernel);
        Some(())
    }
}
