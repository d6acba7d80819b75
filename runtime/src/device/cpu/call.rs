//! Calls generated kernels: `extern "C" fn(operands: *const *mut u8, begin: i64, end: i64)`.

use frit_kernels::pool::Pool;

/// A generated kernel.
pub(super) type Function = unsafe extern "C" fn(*const *mut u8, i64, i64);

/// Finds a kernel in the object file.
pub(super) fn find(library: &libloading::Library, symbol: &str) -> Result<Function, String> {
    // SAFETY: the compiler generates this signature for every kernel of a plan of this format version.
    let found = unsafe { library.get::<Function>(symbol.as_bytes()) };
    Ok(*found.map_err(|e| format!("kernel `{symbol}`: {e}"))?)
}

/// The addresses of a kernel's operands and results.
struct Operands<'a>(&'a [*mut u8]);

// SAFETY: the addresses are only handed to the kernel, whose parts write disjoint memory.
unsafe impl Sync for Operands<'_> {}

impl Operands<'_> {
    /// Calls the kernel for a range.
    ///
    /// # Safety
    /// The addresses must be those of the kernel's operands and results, of the types for which it was compiled, and
    /// the range must be within its extent.
    unsafe fn call(&self, function: Function, begin: usize, end: usize) {
        // SAFETY: as above.
        unsafe { function(self.0.as_ptr(), begin as i64, end as i64) };
    }
}

/// Runs a kernel over `0..extent`, divided at multiples of `grain` among the pool's threads.
pub(super) fn split(
    pool: &Pool,
    function: Function,
    operands: &[*mut u8],
    extent: usize,
    grain: usize,
) {
    let grains = extent.div_ceil(grain);
    let parts = (pool.threads() * 4).min(grains).max(1);
    let operands = Operands(operands);
    pool.run(parts, &|part| {
        let begin = part * grains / parts * grain;
        let end = ((part + 1) * grains / parts * grain).min(extent);
        if begin < end {
            // SAFETY: the plan was checked against the kernel's body; parts are disjoint.
            unsafe { operands.call(function, begin, end) };
        }
    });
}
