//! Calls generated kernels: `extern "C" fn(pointers…, begin: i64, end: i64)`.

use frit_kernels::pool::Pool;
use std::ffi::c_void;

/// A generated kernel and the number of its pointers.
#[derive(Clone, Copy)]
pub(super) struct Function {
    address: *const c_void,
    n_pointers: usize,
}

// SAFETY: an address of code, which is never written.
unsafe impl Sync for Function {}
// SAFETY: as above.
unsafe impl Send for Function {}

/// Most pointers that a kernel takes.
const MAX_POINTERS: usize = 32;

impl Function {
    /// Finds a kernel in the object file.
    pub(super) fn find(
        library: &libloading::Library,
        symbol: &str,
        n_pointers: usize,
    ) -> Result<Self, String> {
        if n_pointers == 0 || n_pointers > MAX_POINTERS {
            return Err(format!("kernel `{symbol}` has {n_pointers} operands"));
        }
        // SAFETY: only the address is taken here.
        let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
        let address = *found.map_err(|e| format!("kernel `{symbol}`: {e}"))?;
        Ok(Function { address, n_pointers })
    }

    /// Calls the kernel.
    ///
    /// # Safety
    /// The addresses are those of the kernel's operands and results, of the types it was compiled for,
    /// and the range is within its extent.
    unsafe fn call(self, p: &[usize], begin: i64, end: i64) {
        assert_eq!(p.len(), self.n_pointers);
        macro_rules! call {
            ($($name:ident)*) => {{
                let &[$($name),*] = p else { unreachable!("invariant: the length was matched") };
                $(let $name = $name as *mut u8;)*
                // SAFETY: the compiler generates this signature for this number of pointers.
                unsafe {
                    let f: extern "C" fn($(call!(@ $name)),*, i64, i64) =
                        std::mem::transmute(self.address);
                    f($($name),*, begin, end);
                }
            }};
            (@ $name:ident) => { *mut u8 };
        }
        match p.len() {
            1 => call!(p0),
            2 => call!(p0 p1),
            3 => call!(p0 p1 p2),
            4 => call!(p0 p1 p2 p3),
            5 => call!(p0 p1 p2 p3 p4),
            6 => call!(p0 p1 p2 p3 p4 p5),
            7 => call!(p0 p1 p2 p3 p4 p5 p6),
            8 => call!(p0 p1 p2 p3 p4 p5 p6 p7),
            9 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8),
            10 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9),
            11 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10),
            12 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11),
            13 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12),
            14 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13),
            15 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14),
            16 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15),
            17 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16),
            18 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17),
            19 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18),
            20 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19),
            21 => call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20),
            22 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21)
            }
            23 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22)
            }
            24 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23)
            }
            25 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24)
            }
            26 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25)
            }
            27 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25 p26)
            }
            28 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25 p26 p27)
            }
            29 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25 p26 p27 p28)
            }
            30 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25 p26 p27 p28 p29)
            }
            31 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25 p26 p27 p28 p29 p30)
            }
            32 => {
                call!(p0 p1 p2 p3 p4 p5 p6 p7 p8 p9 p10 p11 p12 p13 p14 p15 p16 p17 p18 p19 p20 p21 p22 p23 p24 p25 p26 p27 p28 p29 p30 p31)
            }
            n => unreachable!("invariant: {n} pointers were refused at load"),
        }
    }
}

/// Runs a kernel over `0..extent`, cut at multiples of `grain` into parts for the pool's threads.
pub(super) fn split(
    pool: &Pool,
    function: Function,
    pointers: &[usize],
    extent: usize,
    grain: usize,
) {
    let grains = extent.div_ceil(grain);
    let parts = (pool.threads() * 4).min(grains).max(1);
    pool.run(parts, &|part| {
        let begin = part * grains / parts * grain;
        let end = ((part + 1) * grains / parts * grain).min(extent);
        if begin < end {
            // SAFETY: the plan was checked against the kernel's body; parts are disjoint.
            unsafe { function.call(pointers, begin as i64, end as i64) };
        }
    });
}
