//! The tile registers of the processor, by instructions that the compiler has no stable functions for.

use super::{ROW_BYTES, SIDE, Tiles};
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// The registers of the processor.
pub(super) struct Hardware;

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row, for each register.
    row_bytes: [u16; 16],
    /// Rows, for each register.
    rows: [u8; 16],
}

/// All eight registers as large as they get.
static WHOLE: Configuration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut register = 0;
    while register < 8 {
        row_bytes[register] = ROW_BYTES as u16;
        rows[register] = SIDE as u8;
        register += 1;
    }
    Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

impl Tiles for Hardware {
    fn configure() {
        // SAFETY: the kernel is only chosen where the instructions are available.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE, options(nostack, readonly, preserves_flags));
        }
    }

    fn release() {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn zero<const T: u8>() {
        // SAFETY: the compiler keeps nothing in these registers.
        unsafe { asm!("tilezero tmm{}", const T, options(nostack, nomem, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn load<const T: u8>(from: *const u32, stride: usize) {
        // SAFETY: the caller vouches for the rows.
        unsafe {
            asm!(
                "tileloadd tmm{}, [{} + {}]",
                const T, in(reg) from, in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn load_passing<const T: u8>(from: *const u32, stride: usize) {
        // SAFETY: the caller vouches for the rows.
        unsafe {
            asm!(
                "tileloaddt1 tmm{}, [{} + {}]",
                const T, in(reg) from, in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
        // SAFETY: the compiler keeps nothing in these registers.
        unsafe {
            asm!(
                "tdpbf16ps tmm{}, tmm{}, tmm{}",
                const C, const A, const B,
                options(nostack, nomem, preserves_flags),
            );
        }
    }

    #[inline(always)]
    unsafe fn store<const T: u8>(to: *mut f32, stride: usize) {
        // SAFETY: the caller vouches for the rows.
        unsafe {
            asm!(
                "tilestored [{} + {}], tmm{}",
                in(reg) to, in(reg) stride, const T,
                options(nostack, preserves_flags),
            );
        }
    }
}

/// Whether the processor has the instructions, and the system lets this process use them. It is asked once.
pub(super) fn is_available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| has_instructions() && saves_registers() && is_permitted())
}

/// AMX-TILE and AMX-BF16.
fn has_instructions() -> bool {
    const LEAF: u32 = 7;
    const WANTED: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= LEAF && __cpuid_count(LEAF, 0).edx & WANTED == WANTED
}

/// Whether the system saves the configuration and the data of the registers with a thread.
fn saves_registers() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const WANTED: u64 = 1 << 17 | 1 << 18;
    // SAFETY: the bit says that there is the instruction.
    __cpuid(1).ecx & OSXSAVE != 0 && unsafe { enabled_states() } & WANTED == WANTED
}

#[target_feature(enable = "xsave")]
unsafe fn enabled_states() -> u64 {
    // SAFETY: register 0 is there.
    unsafe { _xgetbv(0) }
}

/// Asks the kernel for the registers, for all threads of the process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the call reads and writes no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inout("rax") result, in("rdi") ARCH_REQ_XCOMP_PERM, in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _, out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}
