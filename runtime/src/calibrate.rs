//! Measures what the processors of this machine reach: the numbers behind `frit calibrate`.

use frit_kernels::dtype::Elem;
use frit_kernels::peak;
use frit_kernels::pool::Pool;
use frit_kernels::routine::attention::{Attention, Strides};
use frit_kernels::routine::gemm::Gemm;
use serde::Serialize;
use std::time::Instant;

/// Calls of each measurement, of which the best counts.
const CALLS: usize = 12;

/// What this machine reaches with a number of threads. Rates are the best of several calls, in operations or bytes per
/// second.
#[derive(Clone, Debug, Serialize)]
pub struct Ceilings {
    /// Threads.
    pub threads: usize,
    /// Multiply-adds of f32 in registers.
    pub f32_flops: f64,
    /// Products of bf16 added in f32, in registers; the rate of f32 where there are no such instructions.
    pub bf16_flops: f64,
    /// Bytes that a loop over arrays larger than caches reads and writes.
    pub bytes_per_second: f64,
    /// A GEMM of 2048 × 3072 × 768 in f32.
    pub gemm_f32_flops: f64,
    /// The same of bf16 operands.
    pub gemm_bf16_flops: f64,
    /// Causal attention over 1024 tokens, forward, in f32.
    pub attention_flops: f64,
    /// Seconds of a kernel that does nothing.
    pub call_seconds: f64,
    /// Bytes that this process may still allocate; `None` where the system does not report them.
    pub memory_bytes: Option<u64>,
}

/// Measures the ceilings of this many threads; takes some seconds.
pub fn ceilings(threads: usize) -> Ceilings {
    let pool = Pool::new(threads);
    let best = |measure: &mut dyn FnMut() -> f64| -> f64 {
        (0..CALLS).map(|_| measure()).fold(0.0, f64::max)
    };
    // These take longest: the system needs some tens of milliseconds to give each thread a processor of its own.
    let gemm_f32_flops = best(&mut gemm(&pool, Elem::F32));
    let gemm_bf16_flops = best(&mut gemm(&pool, Elem::BF16));
    let f32_flops = best(&mut || peak::f32_flops(&pool));
    let half =
        peak::bf16_flops(&pool).map(|_| best(&mut || peak::bf16_flops(&pool).unwrap_or(0.0)));
    Ceilings {
        threads: pool.threads(),
        f32_flops,
        bf16_flops: half.unwrap_or(f32_flops),
        bytes_per_second: best(&mut || peak::bytes_per_second(&pool)),
        gemm_f32_flops,
        gemm_bf16_flops,
        attention_flops: best(&mut attention(&pool)),
        call_seconds: 1.0 / best(&mut || 1.0 / peak::call_seconds(&pool)),
        memory_bytes: crate::memory::available().map(|limit| limit.bytes),
    }
}

/// Operations per second of a GEMM, each time it is called.
fn gemm(pool: &Pool, elem: Elem) -> impl FnMut() -> f64 {
    let (m, n, k) = (2048, 3072, 768);
    let gemm = Gemm::row_major(elem, Elem::F32, m, n, k);
    let (a, b) = (ones(elem, m * k), ones(elem, k * n));
    let mut c = vec![0_u32; m * n];
    move || {
        let start = Instant::now();
        let (a, b) = (a.as_ptr().cast(), b.as_ptr().cast());
        // SAFETY: the buffers have the sizes of the shape.
        unsafe { gemm.run(pool, a, b, c.as_mut_ptr().cast(), std::ptr::null()) };
        gemm.flops() as f64 / start.elapsed().as_secs_f64()
    }
}

/// Operations per second of attention, each time it is called.
fn attention(pool: &Pool) -> impl FnMut() -> f64 {
    let (heads, length, width) = (12, 1024, 64);
    let layout = Strides::time_first(heads, length, width);
    let shape = Attention {
        batch: 1,
        heads,
        kv_heads: heads,
        q_len: length,
        kv_len: length,
        head_dim: width,
        value_dim: width,
        scale: 0.125,
        causal: true,
        window: None,
        elem: Elem::F32,
        q: layout,
        k: layout,
        v: layout,
        o: layout,
        mask: None,
    };
    let operand = ones(Elem::F32, heads * length * width);
    let (mut output, mut statistics) = (operand.clone(), vec![0_f32; heads * length]);
    move || {
        let start = Instant::now();
        let x = operand.as_ptr().cast();
        let (o, lse) = (output.as_mut_ptr().cast(), statistics.as_mut_ptr());
        // SAFETY: the buffers have the sizes of the shape.
        unsafe { shape.forward(pool, x, x, x, std::ptr::null(), o, lse) };
        (2 * heads * length * length * width) as f64 / start.elapsed().as_secs_f64()
    }
}

/// Elements of one, as words.
fn ones(elem: Elem, len: usize) -> Vec<u32> {
    let one = 1_f32.to_bits();
    let word = if elem == Elem::F32 { one } else { one | one >> 16 };
    vec![word; (len * elem.size()).div_ceil(4)]
}
