//! Batched GEMM `C = alpha * A @ B [+ C] [+ bias]` with f32 accumulation.
//!
//! A and B have one element type, C and the bias any; strides are arbitrary, so a transpose costs nothing. Frit's micro-kernels (`kernel`, one
//! file for each set of instructions) multiply f32 numbers, to which others are widened, or on processors where that is faster pairs of
//! bf16, with one packed B shared by all threads (`packed`), since hardware threads of one core share its caches. On processors without a
//! micro-kernel, block by block through the crate `gemm` (`blocked`).
//!
//! Results depend on the shapes and on the micro-kernel, not on the number of threads. The instructions for pairs treat subnormal bf16
//! numbers as zero.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocked;
mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_bf16;
mod pack;
mod packed;
#[cfg(target_arch = "x86_64")]
pub(crate) mod planes;
mod store;

use self::kernel::Kernel;
use crate::dtype::Elem;
use crate::pool::{Pool, Scratch, Shareable};
use serde::{Deserialize, Serialize};

/// The layout of a matrix; strides count elements and may be negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Operand {
    /// Element type.
    pub elem: Elem,
    /// Distance between two rows.
    pub row: isize,
    /// Distance between two columns.
    pub col: isize,
    /// Distance between two matrices of the batch; 0 uses one matrix for all (not for C).
    pub batch: isize,
}

impl Operand {
    /// A row-major `rows x cols` matrix; matrices of a batch are contiguous.
    pub fn row_major(elem: Elem, rows: usize, cols: usize) -> Operand {
        Operand { elem, row: cols as isize, col: 1, batch: (rows * cols) as isize }
    }

    /// The transposed view: a `rows x cols` matrix seen as `cols x rows`.
    #[must_use]
    pub fn transposed(self) -> Operand {
        Operand { row: self.col, col: self.row, ..self }
    }

    /// The same matrix for each element of the batch.
    #[must_use]
    pub fn broadcast(self) -> Operand {
        Operand { batch: 0, ..self }
    }
}

/// A batched GEMM: `A[m, k] @ B[k, n] -> C[m, n]`, `batch` times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B. If zero, A @ B is zero.
    pub k: usize,
    /// Number of matrices.
    pub batch: usize,
    /// The left operand.
    pub a: Operand,
    /// The right operand, of the same element type as the left.
    pub b: Operand,
    /// The result. Its elements must be distinct.
    pub c: Operand,
    /// The type of a contiguous vector of `n` elements that is added to each row.
    pub bias: Option<Elem>,
    /// Adds to the former contents of C instead of replacing them.
    pub accumulate: bool,
    /// Factor of A @ B, not of the bias or the former contents.
    pub alpha: f32,
}

/// The most rows, columns or depths of a GEMM whose f32 numbers are not multiplied as sums of bf16 numbers, which is not faster then. Sizes
/// that are padded to multiples of this, or of a divisor, stay on their side.
const THIN: usize = 16;
/// The same for GEMMs inside of convolutions, whose images are packed anew for each block.
const THIN_PART: usize = 48;
/// The bias of a GEMM without one.
const NO_BIAS: *const u8 = std::ptr::null();

/// The pointers of one GEMM.
#[derive(Clone, Copy)]
struct Buffers {
    a: *const u8,
    b: *const u8,
    c: *mut u8,
    bias: *const u8,
}

impl Gemm {
    /// `C = A @ B` of row-major matrices.
    pub fn row_major(elem: Elem, out: Elem, m: usize, n: usize, k: usize) -> Gemm {
        Gemm {
            m,
            n,
            k,
            batch: 1,
            a: Operand::row_major(elem, m, k),
            b: Operand::row_major(elem, k, n),
            c: Operand::row_major(out, m, n),
            bias: None,
            accumulate: false,
            alpha: 1.0,
        }
    }

    /// Floating-point operations of the whole batch.
    pub fn flops(&self) -> usize {
        2 * self.m * self.n * self.k * self.batch
    }

    /// Runs the GEMM on the pool.
    ///
    /// # Panics
    /// If A and B differ in element type.
    ///
    /// # Safety
    /// The pointers must be aligned to their elements and valid for every element that shapes and
    /// strides reach: A and B for reads, C for writes (and reads if `accumulate`), `bias` for `n`
    /// reads if there is one (else it may be null). C must not overlap the others.
    pub unsafe fn run(&self, pool: &Pool, a: *const u8, b: *const u8, c: *mut u8, bias: *const u8) {
        assert_eq!(self.a.elem, self.b.elem, "A and B must have one element type");
        let shape = self.folded();
        if shape.m == 0 || shape.n == 0 || shape.batch == 0 {
            return;
        }
        let buffers = Buffers { a, b, c, bias };
        // SAFETY: the caller vouches for the buffers.
        unsafe {
            match shape.kernel_of_whole() {
                Some(kernel) => packed::run(kernel, &shape, pool, buffers),
                None => blocked::run(&shape, pool, buffers),
            }
        }
    }

    /// As [`Gemm::run`], on the calling thread, and f32 numbers always by f32 instructions: these GEMMs are parts of larger routines, which
    /// divide them as there are threads.
    ///
    /// # Safety
    /// As for [`Gemm::run`].
    pub(crate) unsafe fn run_serial(
        &self,
        packing: &mut Scratch,
        a: *const u8,
        b: *const u8,
        c: *mut u8,
        bias: *const u8,
    ) {
        // SAFETY: passed on.
        unsafe { self.run_on_thread(self.kernel(), packing, Buffers { a, b, c, bias }) };
    }

    /// As [`Gemm::run_serial`], for some rows, columns or depths of a larger GEMM, by the micro-kernel for that, so that the bits do not
    /// depend on how it is divided. Without a bias.
    ///
    /// # Safety
    /// As for [`Gemm::run`].
    pub(crate) unsafe fn run_part(
        &self,
        whole: &Gemm,
        packing: &mut Scratch,
        (a, b): (*const u8, *const u8),
        c: *mut u8,
    ) {
        let kernel = match self.k > 0 && whole.is_by_parts(THIN_PART) {
            true => kernel::by_parts(),
            false => self.kernel(),
        };
        // SAFETY: passed on.
        unsafe { self.run_on_thread(kernel, packing, Buffers { a, b, c, bias: NO_BIAS }) };
    }

    /// Runs the GEMM on the calling thread.
    unsafe fn run_on_thread(
        &self,
        kernel: Option<&'static Kernel>,
        packing: &mut Scratch,
        at: Buffers,
    ) {
        assert_eq!(self.a.elem, self.b.elem);
        let shape = self.folded();
        if shape.m == 0 || shape.n == 0 || shape.batch == 0 {
            return;
        }
        for index in 0..shape.batch {
            // SAFETY: the caller vouches for the buffers.
            unsafe {
                let buffers = shape.of_batch(at, index);
                match kernel {
                    Some(kernel) => packed::run_serial(kernel, &shape, packing, buffers),
                    None => blocked::run_serial(&shape, packing, buffers),
                }
            }
        }
    }

    /// Bytes that [`Gemm::pack`] needs for the right operand; 0 if packing does not help.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.ahead().map_or(0, |kernel| packed::packed_bytes(kernel, self))
    }

    /// Packs the right operand for several [`Gemm::run_packed`].
    ///
    /// # Safety
    /// `b` must be valid, `out` writable for [`Gemm::packed_bytes`].
    pub(crate) unsafe fn pack(&self, b: *const u8, out: *mut u8) {
        if let Some(kernel) = self.ahead() {
            // SAFETY: passed on.
            unsafe { packed::pack_whole(kernel, self, b, out) };
        }
    }

    /// As [`Gemm::run_serial`], for up to `m` rows, the first `n` columns and the first `k` depths
    /// of a right operand that [`Gemm::pack`] packed. Depths behind these are read, too, and multiplied by zero.
    ///
    /// # Safety
    /// As for [`Gemm::run`]; `packed` must come from the same GEMM and operand.
    pub(crate) unsafe fn run_packed(
        &self,
        (m, n, k): (usize, usize, usize),
        packing: &mut Scratch,
        a: *const u8,
        (b, packed): (*const u8, *const u8),
        c: *mut u8,
    ) {
        // SAFETY: passed on.
        unsafe {
            match self.ahead() {
                Some(kernel) if m > 0 && n > 0 && k > 0 => {
                    let at = Buffers { a, b, c, bias: std::ptr::null() };
                    packed::run_packed(kernel, self, (m, n, k), packing, at, packed);
                }
                _ => {
                    let part = Gemm { m, n, k, ..*self };
                    part.run_serial(packing, a, b, c, std::ptr::null());
                }
            }
        }
    }

    /// Bytes that [`Gemm::pack_left`] needs for the left operand; 0 if packing does not help.
    pub(crate) fn packed_left_bytes(&self) -> usize {
        self.left_ahead().map_or(0, |kernel| packed::packed_left_bytes(kernel, self))
    }

    /// Packs some rows and depths of the left operand for several [`Gemm::run_packed_left`]; `a` is where the first row and depth of
    /// these are. Calls for disjoint rows or depths may run at the same time.
    ///
    /// # Safety
    /// `a` must be valid, `out` writable for [`Gemm::packed_left_bytes`]; the rows begin at a multiple of [`Gemm::left_rows`], the depths at
    /// one of 32, or if they are f32 anywhere.
    pub(crate) unsafe fn pack_left(
        &self,
        rows: std::ops::Range<usize>,
        depths: std::ops::Range<usize>,
        a: *const u8,
        out: *mut u8,
    ) {
        if let Some(kernel) = self.left_ahead() {
            // SAFETY: passed on.
            unsafe { packed::pack_left(kernel, self, rows, depths, a, out) };
        }
    }

    /// As [`Gemm::run_packed_left`], for a right operand that is computed: `rows` writes those of a range of depths, `n` columns
    /// one after the other. Only where [`Gemm::packed_left_bytes`] is not 0.
    ///
    /// # Safety
    /// As for [`Gemm::run_packed_left`].
    pub(crate) unsafe fn run_packed_left_by(
        &self,
        size: (std::ops::Range<usize>, usize),
        packing: &mut Scratch,
        packed: *const u8,
        rows: &dyn Fn(std::ops::Range<usize>, *mut u8),
        c: *mut u8,
    ) {
        if size.0.is_empty() || size.1 == 0 {
            return;
        }
        let kernel = self.left_ahead().expect("the left operand is packed");
        let right = packed::Right::Rows(rows);
        // SAFETY: passed on.
        unsafe {
            packed::run_packed_left(kernel, self, size, packing, packed, &right, (c, NO_BIAS))
        };
    }

    /// As [`Gemm::run_serial`], for some rows of a left operand that [`Gemm::pack_left`] packed, and the
    /// first `n` columns; the first of the rows is a multiple of [`Gemm::left_rows`], and goes to `c`.
    ///
    /// # Safety
    /// As for [`Gemm::run`]; `packed` must come from the same GEMM and operand.
    pub(crate) unsafe fn run_packed_left(
        &self,
        (rows, n): (std::ops::Range<usize>, usize),
        packing: &mut Scratch,
        (a, packed): (*const u8, *const u8),
        b: *const u8,
        c: *mut u8,
    ) {
        if rows.is_empty() || n == 0 {
            return;
        }
        // SAFETY: passed on.
        unsafe {
            if let Some(kernel) = self.left_ahead() {
                let (size, right) = ((rows, n), packed::Right::At(b));
                return packed::run_packed_left(
                    kernel,
                    self,
                    size,
                    packing,
                    packed,
                    &right,
                    (c, NO_BIAS),
                );
            }
            let a = self.a.elem.at(a, rows.start as isize * self.a.row);
            Gemm { m: rows.len(), n, ..*self }.run_serial(packing, a, b, c, std::ptr::null());
        }
    }

    /// Rows of a panel of a left operand that [`Gemm::pack_left`] packs.
    pub(crate) fn left_rows(&self) -> usize {
        self.left_ahead().map_or(Gemm::ROWS, |kernel| kernel.rows)
    }

    /// A multiple of [`Gemm::rows`] of f32 for every micro-kernel.
    pub(crate) const ROWS: usize = 12;

    /// Whether the order of sums depends on the depth alone, so that GEMMs of some rows or columns have the bits of the whole. The crate
    /// `gemm` has another order for vectors.
    pub(crate) fn sums_by_depth(elem: Elem) -> bool {
        kernel::of(elem).is_some()
    }

    /// Rows of a panel of a packed left operand of a type.
    pub(crate) fn rows(elem: Elem) -> usize {
        kernel::of(elem).map_or(Gemm::ROWS, |kernel| kernel.rows)
    }

    /// The micro-kernel that computes a part of a routine, if any.
    fn kernel(&self) -> Option<&'static Kernel> {
        if self.k > 0 { kernel::of(self.a.elem) } else { None }
    }

    /// The micro-kernel that computes the GEMM by itself, if any.
    fn kernel_of_whole(&self) -> Option<&'static Kernel> {
        if self.is_by_parts(THIN) { kernel::by_parts() } else { self.kernel() }
    }

    /// Whether f32 numbers are multiplied as sums of bf16 numbers, if all sizes are larger than `thin`.
    fn is_by_parts(&self, thin: usize) -> bool {
        let is_thin = [self.m, self.n, self.k].iter().any(|size| *size <= thin);
        !is_thin && self.a.elem != Elem::BF16 && kernel::by_parts().is_some()
    }

    /// The micro-kernel that reads operands packed ahead, if one does.
    fn ahead(&self) -> Option<&'static Kernel> {
        let is_plain = self.batch == 1 && self.bias.is_none() && self.c.col == 1 && self.n > 0;
        if is_plain { self.kernel() } else { None }
    }

    /// The micro-kernel that reads left operands packed ahead, if one does.
    fn left_ahead(&self) -> Option<&'static Kernel> {
        let kernel = self.ahead()?;
        if self.is_by_parts(THIN_PART) { kernel::by_parts() } else { Some(kernel) }
    }

    /// The same GEMM with the batch folded into the rows, if B is shared and the matrices of A and C are contiguous.
    fn folded(&self) -> Gemm {
        let m = self.m as isize;
        let folds = self.batch > 1
            && self.b.batch == 0
            && self.a.batch == m * self.a.row
            && self.c.batch == m * self.c.row;
        if folds { Gemm { m: self.m * self.batch, batch: 1, ..*self } } else { *self }
    }

    /// The pointers of one matrix of the batch.
    fn of_batch(&self, at: Buffers, index: usize) -> Buffers {
        let index = index as isize;
        Buffers {
            a: self.a.elem.at(at.a, index * self.a.batch),
            b: self.b.elem.at(at.b, index * self.b.batch),
            c: self.c.elem.at_mut(at.c, index * self.c.batch),
            bias: at.bias,
        }
    }
}

/// The name of the micro-kernel that multiplies large matrices of a type on this processor, that of its instructions; `gemm` for the crate.
pub(crate) fn name_of(elem: Elem) -> &'static str {
    let by_parts = if elem == Elem::BF16 { None } else { kernel::by_parts() };
    by_parts.or_else(|| kernel::of(elem)).map_or("gemm", |kernel| kernel.name)
}

/// Whether large matrices of f32 are multiplied as sums of bf16 numbers.
pub(crate) fn multiplies_parts() -> bool {
    kernel::by_parts().is_some()
}

/// Runs chains of bf16 products in registers, as the micro-kernel does, and returns their operations; none where bf16 numbers are multiplied
/// as f32.
pub(crate) fn bf16_products(rounds: usize) -> Option<usize> {
    match name_of(Elem::BF16) {
        // SAFETY: the processor has the features.
        #[cfg(target_arch = "x86_64")]
        "avx512-bf16" => Some(unsafe { avx512::products(rounds) }),
        #[cfg(target_arch = "x86_64")]
        "amx-bf16" => Some(amx::products(rounds)),
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        "neon-bf16" => Some(unsafe { neon_bf16::products(rounds) }),
        _ => None,
    }
}

/// The buffers, shareable with the threads of a pool.
fn shareable(at: Buffers) -> Shareable<Buffers> {
    Shareable::new(at)
}

#[cfg(test)]
mod tests;
