//! Run-time selection of the vector width for auto-vectorized loops.
//!
//! The body is compiled three times (AVX-512, AVX2 with FMA, baseline) with bit-identical results: the compiler never contracts
//! `a * b + c` on its own, and `mul_add` is exact everywhere (slow without hardware support).

use std::sync::OnceLock;

#[cfg(target_arch = "aarch64")]
pub(crate) use arm::{NEON, NEON_BF16, level};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{AVX2, AVX512, has_avx512, has_bf16, level, prefers_bf16_dots};

/// Defines a function whose body is compiled for AVX-512, AVX2 and the baseline, and picks the
/// best at run time.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    body($($arg),*)
                }
                match $crate::simd::level() {
                    // SAFETY: the level says that the features are present.
                    $crate::simd::AVX512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::AVX2 => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            body($($arg),*)
        }
    };
}
pub(crate) use vectorized;

/// The only features that kernels may use, if they are limited.
static LIMIT: OnceLock<Vec<String>> = OnceLock::new();

/// Limits kernels to these features, in LLVM's words. Has an effect before the first kernel of the process.
pub(crate) fn limit(features: &str) {
    let words = features.split(',').filter_map(|f| f.strip_prefix('+')).map(str::to_string);
    // A second limit would come too late.
    let _ = LIMIT.set(words.collect());
}

/// Whether kernels may use a feature, if the processor has it. Not asked on aarch64, where LLVM does not list all that a processor has.
#[cfg(target_arch = "x86_64")]
pub(crate) fn is_allowed(feature: &str) -> bool {
    LIMIT.get().is_none_or(|features| features.iter().any(|f| f == feature))
}

/// Detection of the level, once.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::is_allowed;
    use std::arch::is_x86_feature_detected as has;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU8, Ordering};

    /// Neither of the following.
    const BASELINE: u8 = 1;
    /// AVX2, FMA and F16C.
    pub(crate) const AVX2: u8 = 2;
    /// AVX-512 F, BW, DQ, VL, and FMA.
    pub(crate) const AVX512: u8 = 3;

    /// The level of the CPU, detected once; 0 before that.
    static LEVEL: AtomicU8 = AtomicU8::new(0);

    /// The widest level that this CPU has.
    #[inline]
    pub(crate) fn level() -> u8 {
        match LEVEL.load(Ordering::Relaxed) {
            0 => detect(),
            level => level,
        }
    }

    #[cold]
    fn detect() -> u8 {
        #[cfg(test)]
        let most = match crate::tests::path().as_deref() {
            Some("baseline") => BASELINE,
            Some("avx2") => AVX2,
            _ => AVX512,
        };
        #[cfg(not(test))]
        let most = AVX512;
        let avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
        let is_listed = |features: &[&str]| features.iter().all(|f| is_allowed(f));
        let avx512 = avx512 && is_listed(&["avx512f", "avx512bw", "avx512dq", "avx512vl"]);
        let avx2 = has!("avx2") && has!("fma") && has!("f16c");
        let level = match (avx2 && is_listed(&["avx2", "fma", "f16c"]), avx512) {
            (true, true) => AVX512,
            (true, false) => AVX2,
            _ => BASELINE,
        };
        let level = level.min(most);
        LEVEL.store(level, Ordering::Relaxed);
        level
    }

    /// Whether the AVX-512 subset that the kernels use (F, BW, DQ, VL) is present.
    #[inline]
    pub(crate) fn has_avx512() -> bool {
        level() == AVX512
    }

    /// Whether AVX-512 has instructions for bf16.
    pub(crate) fn has_bf16() -> bool {
        static FOUND: OnceLock<bool> = OnceLock::new();
        *FOUND.get_or_init(|| has_avx512() && has!("avx512bf16") && is_allowed("avx512bf16"))
    }

    /// Whether bf16 numbers are multiplied in pairs (`vdpbf16ps`), and not as f32 numbers. On AMD's processors the one is twice as fast
    /// as the other, on Intel's half as fast.
    pub(crate) fn prefers_bf16_dots() -> bool {
        static FOUND: OnceLock<bool> = OnceLock::new();
        *FOUND.get_or_init(|| {
            #[cfg(test)]
            if let Some(path) = crate::tests::path() {
                return has_bf16() && path == "avx512-bf16";
            }
            let name = std::arch::x86_64::__cpuid(0);
            has_bf16()
                && [name.ebx, name.edx, name.ecx].map(u32::to_le_bytes).concat() == *b"AuthenticAMD"
        })
    }
}

/// Detection of the level; loops are compiled once, with NEON.
#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::is_aarch64_feature_detected as has;
    use std::sync::OnceLock;

    /// Loops only; tests ask for it.
    const BASELINE: u8 = 1;
    /// NEON.
    pub(crate) const NEON: u8 = 2;
    /// NEON with the products of bf16 matrices.
    pub(crate) const NEON_BF16: u8 = 3;

    /// The level of the CPU, detected once.
    pub(crate) fn level() -> u8 {
        static LEVEL: OnceLock<u8> = OnceLock::new();
        *LEVEL.get_or_init(|| {
            #[cfg(test)]
            let most = match crate::tests::path().as_deref() {
                Some("baseline") => BASELINE,
                Some("neon") => NEON,
                _ => NEON_BF16,
            };
            #[cfg(not(test))]
            let most = NEON_BF16;
            let level = match (has!("neon"), has!("bf16")) {
                (true, true) => NEON_BF16,
                (true, false) => NEON,
                _ => BASELINE,
            };
            level.min(most)
        })
    }
}
