//! What the processors and the memory of this machine reach: the ceilings beside which kernels are judged.
//!
//! Each function runs a loop on all threads of a pool and returns a rate. A loaded machine gives less: take the best of several calls.

use std::hint::black_box;
use std::time::Instant;

use crate::pool::{Pool, Shareable};
use crate::routine::gemm::{bf16_products, multiplies_parts};

/// Independent chains of multiply-adds: enough to hide the latency of two units of four cycles.
const CHAINS: usize = 12;
/// Multiply-adds of one chain in one chunk: about 30 microseconds.
const ROUNDS: usize = 20_000;
/// Chunks per thread, so that threads that begin late take fewer.
const CHUNKS: usize = 16;
/// Elements of each array of the bandwidth loop; together they are larger than caches.
const STREAM: usize = 1 << 24;
/// Elements of a chunk of the bandwidth loop.
const STREAM_CHUNK: usize = 1 << 18;

/// Floating-point operations per second of f32 multiply-adds in registers.
pub fn f32_flops(pool: &Pool) -> f64 {
    rate(pool, &|| multiply_adds(ROUNDS))
}

/// As [`f32_flops`] for GEMMs that multiply f32 numbers as sums of bf16 numbers, six products of these for one; none where they do not.
pub fn parts_flops(pool: &Pool) -> Option<f64> {
    multiplies_parts().then(|| bf16_flops(pool).map(|rate| rate / 6.0)).flatten()
}

/// As [`f32_flops`] for products of bf16 that are added in f32; none where the kernels multiply bf16 numbers as f32.
pub fn bf16_flops(pool: &Pool) -> Option<f64> {
    bf16_products(1)?;
    Some(rate(pool, &|| bf16_products(ROUNDS).expect("there are chains of bf16")))
}

/// Bytes per second of a loop that reads two arrays and writes a third, `c = a + s b`. A store reads the line that it writes to, so
/// four arrays move for the three that it names; three are counted, as STREAM does.
pub fn bytes_per_second(pool: &Pool) -> f64 {
    let (a, b) = (vec![1f32; STREAM], vec![2f32; STREAM]);
    // Not of zeros, whose pages would be there only when the loop writes to them.
    let mut c = vec![3f32; STREAM];
    let c = Shareable::new(c.as_mut_ptr());
    let start = Instant::now();
    pool.run(STREAM / STREAM_CHUNK, &|chunk| {
        let at = chunk * STREAM_CHUNK;
        let range = at..at + STREAM_CHUNK;
        // SAFETY: chunks are disjoint parts of `c`, which outlives the call.
        let c = unsafe { std::slice::from_raw_parts_mut(c.get().add(at), STREAM_CHUNK) };
        triad(&a[range.clone()], &b[range], c);
    });
    (3 * STREAM * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64()
}

/// Seconds of a call of the pool whose chunks do nothing.
pub fn call_seconds(pool: &Pool) -> f64 {
    const CALLS: u32 = 1000;
    let start = Instant::now();
    for _ in 0..CALLS {
        pool.run(pool.threads(), &|_| {});
    }
    start.elapsed().as_secs_f64() / f64::from(CALLS)
}

/// Operations per second of a body that says how many it took.
fn rate(pool: &Pool, body: &(dyn Fn() -> usize + Sync)) -> f64 {
    let chunks = CHUNKS * pool.threads();
    let start = Instant::now();
    pool.run(chunks, &|_| {
        black_box(body());
    });
    let seconds = start.elapsed().as_secs_f64();
    (chunks * body()) as f64 / seconds
}

crate::simd::vectorized! {
    fn triad(a: &[f32], b: &[f32], c: &mut [f32]) {
        for ((c, a), b) in c.iter_mut().zip(a).zip(b) {
            *c = a + 3.0 * b;
        }
    }
}

/// Runs chains of multiply-adds and returns their operations.
fn multiply_adds(rounds: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        match crate::simd::level() {
            // SAFETY: the level says that the features are present.
            crate::simd::AVX512 => return unsafe { x86::multiply_adds_512(rounds) },
            // SAFETY: as above.
            crate::simd::AVX2 => return unsafe { x86::multiply_adds_256(rounds) },
            _ => {}
        }
    }
    let (x, y) = black_box((0.5f32, 1.0f32));
    let mut chains = [[1f32; 4]; CHAINS];
    for _ in 0..rounds {
        for value in chains.as_flattened_mut() {
            *value = if cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64") {
                value.mul_add(x, y)
            } else {
                *value * x + y
            };
        }
    }
    black_box(chains);
    2 * 4 * CHAINS * rounds
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, black_box};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn multiply_adds_512(rounds: usize) -> usize {
        let (x, y) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(1.0)));
        let mut chains = [x; CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm512_fmadd_ps(*chain, x, y);
            }
        }
        black_box(chains);
        2 * 16 * CHAINS * rounds
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn multiply_adds_256(rounds: usize) -> usize {
        let (x, y) = black_box((_mm256_set1_ps(0.5), _mm256_set1_ps(1.0)));
        let mut chains = [x; CHAINS];
        for _ in 0..rounds {
            for chain in &mut chains {
                *chain = _mm256_fmadd_ps(*chain, x, y);
            }
        }
        black_box(chains);
        2 * 8 * CHAINS * rounds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_plausible_and_bf16_is_no_slower_than_half_of_f32() {
        let pool = Pool::new(2);
        let single = f32_flops(&pool);
        assert!(single > 1e8 && single < 1e14, "{single}");
        if let Some(half) = bf16_flops(&pool) {
            assert!(half > 1e8 && half < 1e14, "{half}");
        }
        assert!(bytes_per_second(&pool) > 1e7);
        assert!(call_seconds(&pool) < 1.0);
    }

    #[test]
    fn chains_count_their_operations() {
        let widest = multiply_adds(10);
        assert!([4, 8, 16].contains(&(widest / (2 * CHAINS * 10))), "{widest}");
    }
}
