//! Measures what the processors of this machine reach: the numbers behind `frit calibrate`.

use frit_kernels::dtype::Elem;
use frit_kernels::peak;
use frit_kernels::pool::Pool;
use frit_kernels::routine::attention::{Attention, Strides};
use frit_kernels::routine::conv::Conv;
use frit_kernels::routine::gemm::Gemm;
use frit_kernels::window::Window;
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
    /// Multiply-adds of f32 in registers; or products of f32 numbers as sums of bf16 numbers, if GEMMs take these and they are faster.
    pub f32_flops: f64,
    /// Multiply-adds of f32 in registers.
    pub multiply_add_flops: f64,
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
    /// Convolutions of f32 without taps, and their gradients.
    pub conv_f32_flops: f64,
    /// The same with 3 × 3 taps, in operations of direct sums.
    pub conv_3x3_f32_flops: f64,
    /// Both in bf16.
    pub conv_bf16_flops: f64,
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
    let multiply_add_flops = best(&mut || peak::f32_flops(&pool));
    let parts = best(&mut || peak::parts_flops(&pool).unwrap_or(0.0));
    let f32_flops = multiply_add_flops.max(parts);
    let half =
        peak::bf16_flops(&pool).map(|_| best(&mut || peak::bf16_flops(&pool).unwrap_or(0.0)));
    Ceilings {
        threads: pool.threads(),
        f32_flops,
        multiply_add_flops,
        bf16_flops: half.unwrap_or(multiply_add_flops),
        bytes_per_second: best(&mut || peak::bytes_per_second(&pool)),
        gemm_f32_flops,
        gemm_bf16_flops,
        attention_flops: best(&mut attention(&pool)),
        conv_f32_flops: best(&mut convolutions(&pool, Elem::F32, &[1])),
        conv_3x3_f32_flops: best(&mut convolutions(&pool, Elem::F32, &[3])),
        conv_bf16_flops: best(&mut convolutions(&pool, Elem::BF16, &[1, 3])),
        call_seconds: 1.0 / best(&mut || 1.0 / peak::call_seconds(&pool)),
        memory_bytes: crate::memory::available().map(|limit| limit.bytes),
    }
}

/// Operations per second of a GEMM, each time it is called.
fn gemm(pool: &Pool, elem: Elem) -> impl FnMut() -> f64 {
    let (m, n, k) = (2048, 3072, 768);
    let gemm = Gemm::row_major(elem, Elem::F32, m, n, k);
    let (a, b) = (numbers(elem, m * k), numbers(elem, k * n));
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
    let operand = numbers(Elem::F32, heads * length * width);
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

/// Operations per second of convolutions with so many taps, forward and both gradients, each time it is called. Source of the sizes: the
/// fourth stage of ResNet-50, which has most of its layers.
fn convolutions(pool: &Pool, elem: Elem, taps: &[usize]) -> impl FnMut() -> f64 {
    let (batch, channels, size) = (8, 256, 14);
    let conv = |taps: usize| {
        let window = Window {
            input: [1, size, size],
            output: [1, size, size],
            taps: [1, taps, taps],
            strides: [1; 3],
            dilations: [1; 3],
            low: [0, taps / 2, taps / 2],
        };
        let filters = if taps == 1 { 4 * channels } else { channels };
        Conv { elem, out: elem, batch, groups: 1, channels, filters, window }
    };
    let convs: Vec<Conv> = taps.iter().map(|taps| conv(*taps)).collect();
    let images = numbers(elem, batch * 4 * channels * size * size);
    let kernels = numbers(elem, 9 * channels * channels);
    let (mut result, mut gradient) = (images.clone(), kernels.clone());
    move || {
        let start = Instant::now();
        let (x, w) = (images.as_ptr().cast(), kernels.as_ptr().cast());
        let mut flops = 0;
        for conv in &convs {
            // SAFETY: the buffers are at least as large as the shapes.
            unsafe {
                conv.forward(pool, x, w, result.as_mut_ptr().cast());
                conv.grad_input(pool, x, w, result.as_mut_ptr().cast());
                conv.grad_weight(pool, x, x, gradient.as_mut_ptr().cast());
            }
            let Conv { filters, window, .. } = conv;
            let taps: usize = window.taps.iter().product();
            flops += 3 * 2 * batch * channels * filters * taps * size * size;
        }
        flops as f64 / start.elapsed().as_secs_f64()
    }
}

/// Numbers between -1 and 1, as words. With equal ones processors take less power, and run at a higher frequency.
fn numbers(elem: Elem, len: usize) -> Vec<u32> {
    let number = |i: usize| ((i * 7919 % 20_011) as f32 / 10_006.0 - 1.0).to_bits();
    let word = |i: usize| match elem {
        Elem::F32 => number(i),
        _ => number(2 * i) >> 16 | number(2 * i + 1) >> 16 << 16,
    };
    (0..(len * elem.size()).div_ceil(4)).map(word).collect()
}
