//! Measures what the processors of this machine reach: the numbers behind `frit calibrate`.

use frit_kernels::dtype::Elem;
use frit_kernels::peak;
use frit_kernels::pool::Pool;
use frit_kernels::routine::attention::{Attention, Strides};
use frit_kernels::routine::conv::Conv;
use frit_kernels::routine::gemm::{Gemm, Operand};
use frit_kernels::window::Window;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Calls of each measurement, of which the best counts: the least and the most.
const CALLS: (usize, usize) = (3, 12);
/// Time after which a measurement is called no more often than it must be.
const ENOUGH: Duration = Duration::from_millis(400);
/// Channels of convolutions and widths of linear layers that are measured, with the side of the images: those of the stages of ResNet-50, and
/// narrower ones.
const WIDTHS: [(usize, usize); 6] =
    [(16, 112), (32, 112), (64, 56), (128, 28), (256, 14), (512, 7)];
/// Channels of the strided convolution that is measured, one of [`Ceilings::conv_bf16_flops`].
pub const STRIDED_CHANNELS: usize = 128;
/// Taps along each axis of depthwise convolutions that are measured.
const DEPTHWISE_TAPS: [usize; 3] = [3, 5, 7];
/// Rows and width of the large linear layer.
const LARGE: (usize, usize) = (2048, 768);
/// Rows of narrow layers.
const ROWS: usize = 6272;

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
    /// GEMMs of a linear layer of 2048 rows from 768 to 3072 columns, and of its gradients, in f32.
    pub gemm_f32_flops: f64,
    /// The same of bf16 operands.
    pub gemm_bf16_flops: f64,
    /// Causal attention over 1024 tokens, forward, in f32.
    pub attention_flops: f64,
    /// The same of 6272 rows from `w` to `4 w` columns in f32, by `w`; the last is the large layer.
    pub narrow_f32_flops: Vec<(usize, f64)>,
    /// The same of bf16 operands.
    pub narrow_bf16_flops: Vec<(usize, f64)>,
    /// Convolutions of f32 without taps from `w` to `4 w` channels, and their gradients, by `w`.
    pub conv_f32_flops: Vec<(usize, f64)>,
    /// With 3 × 3 taps from `w` to `w` channels, in operations of direct sums.
    pub conv_3x3_f32_flops: Vec<(usize, f64)>,
    /// Both in bf16.
    pub conv_bf16_flops: Vec<(usize, f64)>,
    /// In bf16 with 3 × 3 taps from 128 to 128 channels, to half as many rows and columns.
    pub conv_strided_bf16_flops: f64,
    /// Of one channel per group in f32, by taps.
    pub conv_depthwise_f32_flops: Vec<(usize, f64)>,
    /// Seconds of a kernel that does nothing.
    pub call_seconds: f64,
    /// Bytes that this process may still allocate; `None` where the system does not report them.
    pub memory_bytes: Option<u64>,
}

/// Measures the ceilings of this many threads; takes some seconds.
pub fn ceilings(threads: usize) -> Ceilings {
    let pool = Pool::new(threads);
    let best = |measure: &mut dyn FnMut() -> f64| -> f64 {
        let start = Instant::now();
        let goes_on = |calls: &usize| *calls < CALLS.0 || start.elapsed() < ENOUGH;
        (0..CALLS.1).take_while(goes_on).map(|_| measure()).fold(0.0, f64::max)
    };
    // These take longest: the system needs some tens of milliseconds to give each thread a processor of its own.
    let gemm_f32_flops = best(&mut layer(&pool, Elem::F32, LARGE));
    let gemm_bf16_flops = best(&mut layer(&pool, Elem::BF16, LARGE));
    let multiply_add_flops = best(&mut || peak::f32_flops(&pool));
    let parts = best(&mut || peak::parts_flops(&pool).unwrap_or(0.0));
    let f32_flops = multiply_add_flops.max(parts);
    let half =
        peak::bf16_flops(&pool).map(|_| best(&mut || peak::bf16_flops(&pool).unwrap_or(0.0)));
    let narrow = |elem: Elem, large: f64| {
        let rate = |width: usize| best(&mut layer(&pool, elem, (ROWS, width)));
        let narrow = WIDTHS.map(|(width, _)| (width, rate(width)));
        narrow.into_iter().chain([(LARGE.1, large)]).collect()
    };
    let dense = |elem: Elem, taps: &[usize]| {
        let rate = |width, side| {
            let convs = taps.iter().map(|taps| conv(elem, width, side, *taps)).collect();
            best(&mut convolutions(&pool, convs))
        };
        WIDTHS.map(|(width, side)| (width, rate(width, side))).to_vec()
    };
    let depthwise = |taps: usize| {
        let dense = conv(Elem::F32, 192, 28, taps);
        let conv = Conv { groups: dense.channels, channels: 1, filters: 1, ..dense };
        (taps * taps, best(&mut convolutions(&pool, vec![conv])))
    };
    let strided = {
        let mut conv = conv(Elem::BF16, STRIDED_CHANNELS, 28, 3);
        (conv.window.input, conv.window.strides) = ([1, 56, 56], [1, 2, 2]);
        conv
    };
    Ceilings {
        threads: pool.threads(),
        f32_flops,
        multiply_add_flops,
        bf16_flops: half.unwrap_or(multiply_add_flops),
        bytes_per_second: best(&mut || peak::bytes_per_second(&pool)),
        gemm_f32_flops,
        gemm_bf16_flops,
        attention_flops: best(&mut attention(&pool)),
        narrow_f32_flops: narrow(Elem::F32, gemm_f32_flops),
        narrow_bf16_flops: narrow(Elem::BF16, gemm_bf16_flops),
        conv_f32_flops: dense(Elem::F32, &[1]),
        conv_3x3_f32_flops: dense(Elem::F32, &[3]),
        conv_bf16_flops: dense(Elem::BF16, &[1, 3]),
        conv_strided_bf16_flops: best(&mut convolutions(&pool, vec![strided])),
        conv_depthwise_f32_flops: DEPTHWISE_TAPS.map(depthwise).to_vec(),
        call_seconds: 1.0 / best(&mut || 1.0 / peak::call_seconds(&pool)),
        memory_bytes: crate::memory::available().map(|limit| limit.bytes),
    }
}

/// Operations per second of the GEMMs of a linear layer from so many columns to four times as many and of its gradients, each time it is
/// called. The gradient of the weights is f32, as sums of several micro-steps are.
fn layer(pool: &Pool, elem: Elem, (rows, width): (usize, usize)) -> impl FnMut() -> f64 {
    let wide = 4 * width;
    let forward = Gemm::row_major(elem, elem, rows, wide, width);
    let by_input = Gemm {
        b: Operand::row_major(elem, width, wide).transposed(),
        ..Gemm::row_major(elem, elem, rows, width, wide)
    };
    let by_weight = Gemm {
        a: Operand::row_major(elem, rows, width).transposed(),
        ..Gemm::row_major(elem, Elem::F32, width, wide, rows)
    };
    let [x, y, w] = [rows * width, rows * wide, width * wide].map(|len| numbers(elem, len));
    let (mut dx, mut dw, mut result) = (x.clone(), vec![0_u32; width * wide], y.clone());
    move || {
        let start = Instant::now();
        let [x, y, w] = [&x, &y, &w].map(|operand| operand.as_ptr().cast());
        let none = std::ptr::null();
        // SAFETY: the buffers have the sizes of the shapes.
        unsafe {
            forward.run(pool, x, w, result.as_mut_ptr().cast(), none);
            by_input.run(pool, y, w, dx.as_mut_ptr().cast(), none);
            by_weight.run(pool, x, y, dw.as_mut_ptr().cast(), none);
        }
        3.0 * forward.flops() as f64 / start.elapsed().as_secs_f64()
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
        dropout: None,
    };
    let operand = numbers(Elem::F32, heads * length * width);
    let (mut output, mut statistics) = (operand.clone(), vec![0_f32; heads * length]);
    move || {
        let start = Instant::now();
        let x = operand.as_ptr().cast();
        let (o, lse) = (output.as_mut_ptr().cast(), statistics.as_mut_ptr());
        // SAFETY: the buffers have the sizes of the shape.
        unsafe { shape.forward(pool, x, x, x, [std::ptr::null(); 2], o, lse) };
        (2 * heads * length * length * width) as f64 / start.elapsed().as_secs_f64()
    }
}

/// A convolution of images of so many channels and so many rows and columns, with so many taps along each axis: of one tap to four times as
/// many channels, as in blocks of residual networks, else to as many.
fn conv(elem: Elem, channels: usize, side: usize, taps: usize) -> Conv {
    let window = Window {
        input: [1, side, side],
        output: [1, side, side],
        taps: [1, taps, taps],
        strides: [1; 3],
        dilations: [1; 3],
        low: [0, taps / 2, taps / 2],
    };
    let filters = if taps == 1 { 4 * channels } else { channels };
    Conv { elem, out: elem, batch: 8, groups: 1, channels, filters, window }
}

/// Elements of the images, of the results and of the kernel.
fn sizes(conv: &Conv) -> [usize; 3] {
    let Conv { batch, groups, channels, filters, window, .. } = *conv;
    let pixels = |sides: [usize; 3]| sides.iter().product::<usize>();
    [
        batch * groups * channels * pixels(window.input),
        batch * groups * filters * pixels(window.output),
        groups * filters * channels * pixels(window.taps),
    ]
}

/// Operations per second of convolutions, forward and both gradients, each time it is called.
fn convolutions(pool: &Pool, convs: Vec<Conv>) -> impl FnMut() -> f64 {
    let elem = convs[0].elem;
    let most = convs.iter().map(sizes).fold([0; 3], |a, b| std::array::from_fn(|i| a[i].max(b[i])));
    let [x, y, w] = most.map(|len| numbers(elem, len));
    let (mut dx, mut dw, mut result) = (x.clone(), w.clone(), y.clone());
    move || {
        let start = Instant::now();
        let [x, y, w] = [&x, &y, &w].map(|operand| operand.as_ptr().cast());
        let mut flops = 0;
        for conv in &convs {
            // SAFETY: the buffers are at least as large as the shapes.
            unsafe {
                conv.forward(pool, x, w, result.as_mut_ptr().cast());
                conv.grad_input(pool, y, w, dx.as_mut_ptr().cast());
                conv.grad_weight(pool, y, x, dw.as_mut_ptr().cast());
            }
            let terms = conv.channels * conv.window.taps.iter().product::<usize>();
            flops += 3 * 2 * sizes(conv)[1] * terms;
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
