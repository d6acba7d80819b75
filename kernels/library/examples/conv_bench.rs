//! Benchmarks the convolutions of ResNet-50, of a diffusion UNet and of networks of depthwise ones, on one thread.
//!
//! `cargo run --release -p frit-kernels --example conv_bench [FILTER]`. Each line gives GFLOP/s of processor time, best of several runs, of the
//! forward convolution and of its gradients by input and by weight. The last line weighs the layers of ResNet-50 by how often they occur.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use frit_kernels::dtype::Elem;
use frit_kernels::pool::Pool;
use frit_kernels::routine::conv::Conv;
use frit_kernels::window::Window;
use std::time::Instant;

const BATCH: usize = 8;
const RUNS: usize = 4;

/// Groups, channels and filters of each, side of the input, side of the kernel, stride, and occurrences in ResNet-50.
const LAYERS: [[usize; 7]; 40] = [
    [1, 3, 64, 224, 7, 2, 1],
    [1, 64, 64, 56, 1, 1, 1],
    [1, 64, 64, 56, 3, 1, 3],
    [1, 64, 256, 56, 1, 1, 4],
    [1, 256, 64, 56, 1, 1, 2],
    [1, 256, 128, 56, 1, 1, 1],
    [1, 128, 128, 56, 3, 2, 1],
    [1, 128, 512, 28, 1, 1, 4],
    [1, 256, 512, 56, 1, 2, 1],
    [1, 512, 128, 28, 1, 1, 3],
    [1, 128, 128, 28, 3, 1, 3],
    [1, 512, 256, 28, 1, 1, 1],
    [1, 256, 256, 28, 3, 2, 1],
    [1, 256, 1024, 14, 1, 1, 6],
    [1, 512, 1024, 28, 1, 2, 1],
    [1, 1024, 256, 14, 1, 1, 5],
    [1, 256, 256, 14, 3, 1, 5],
    [1, 1024, 512, 14, 1, 1, 1],
    [1, 512, 512, 14, 3, 2, 1],
    [1, 512, 2048, 7, 1, 1, 3],
    [1, 1024, 2048, 14, 1, 2, 1],
    [1, 2048, 512, 7, 1, 1, 2],
    [1, 512, 512, 7, 3, 1, 2],
    [1, 192, 192, 32, 3, 1, 0],
    [32, 4, 4, 56, 3, 1, 0],
    [32, 8, 8, 28, 3, 1, 0],
    [32, 16, 16, 14, 3, 1, 0],
    [16, 24, 24, 28, 3, 1, 0],
    [16, 24, 24, 28, 3, 2, 0],
    [32, 8, 8, 28, 3, 2, 0],
    [32, 32, 32, 7, 3, 1, 0],
    [32, 1, 1, 112, 3, 1, 0],
    [96, 1, 1, 112, 3, 2, 0],
    [192, 1, 1, 28, 3, 1, 0],
    [960, 1, 1, 7, 3, 1, 0],
    [672, 1, 1, 14, 5, 2, 0],
    [96, 1, 1, 56, 7, 1, 0],
    [192, 1, 1, 28, 7, 1, 0],
    [384, 1, 1, 14, 7, 1, 0],
    [768, 1, 1, 7, 7, 1, 0],
];

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    println!("{:24} {:>26} {:>26}", "forward, dx, dw", "f32", "bf16");
    let pool = Pool::new(1);
    let mut totals = [[0.0; 3]; 2];
    let mut operations = 0.0;
    for [groups, channels, filters, side, taps, stride, times] in LAYERS {
        let name = format!("{groups} x {channels}->{filters} {side} k{taps} s{stride}");
        if !name.contains(&filter) {
            continue;
        }
        let low = taps / 2;
        let out = (side + 2 * low - taps) / stride + 1;
        let window = Window {
            input: [1, side, side],
            output: [1, out, out],
            taps: [1, taps, taps],
            strides: [1, stride, stride],
            dilations: [1; 3],
            low: [0, low, low],
        };
        let flops = 2.0 * (BATCH * groups * channels * filters * taps * taps * out * out) as f64;
        operations += flops * times as f64;
        let mut line = format!("{name:24}");
        for (elem, totals) in [Elem::F32, Elem::BF16].into_iter().zip(&mut totals) {
            let batch = BATCH;
            let conv = Conv { elem, out: elem, batch, groups, channels, filters, window };
            line += "  ";
            for (seconds, total) in measure(&conv, &pool).into_iter().zip(totals) {
                *total += seconds * times as f64;
                line += &format!("{:8.1}", flops / seconds / 1e9);
            }
        }
        println!("{line}");
    }
    let rates = totals.map(|of| of.map(|seconds| format!("{:8.1}", operations / seconds / 1e9)));
    println!("{:24}  {}  {}", "ResNet-50", rates[0].concat(), rates[1].concat());
    let sums = totals.map(|of| format!("{:.3} s", of.iter().sum::<f64>()));
    println!("{:24}  {:>24}  {:>24}", "its convolutions", sums[0], sums[1]);
}

/// Seconds of the forward convolution and of its two gradients.
fn measure(conv: &Conv, pool: &Pool) -> [f64; 3] {
    let images = conv.batch * conv.groups;
    let filled = |n: usize| vec![0x3f80_3f80_u32; n * conv.elem.size() / 4 + 1];
    let x = filled(images * conv.channels * conv.window.input_len());
    let w = filled(conv.groups * conv.filters * conv.channels * conv.window.taps_len());
    let y = filled(images * conv.filters * conv.window.output_len());
    let (mut dx, mut dw, mut z) = (x.clone(), w.clone(), y.clone());
    let at = |v: &[u32]| v.as_ptr().cast::<u8>();
    // SAFETY: the tensors have these shapes.
    let mut forward = || unsafe { conv.forward(pool, at(&x), at(&w), z.as_mut_ptr().cast()) };
    let first = best(&mut forward);
    // SAFETY: as above.
    let mut input = || unsafe { conv.grad_input(pool, at(&y), at(&w), dx.as_mut_ptr().cast()) };
    let second = best(&mut input);
    // SAFETY: as above.
    let mut weight = || unsafe { conv.grad_weight(pool, at(&y), at(&x), dw.as_mut_ptr().cast()) };
    [first, second, best(&mut weight)]
}

fn best(run: &mut dyn FnMut()) -> f64 {
    run();
    // The system counts in ticks of some milliseconds.
    let mut seconds = |_| {
        let (begin, mut runs) = (processor_seconds(), 0);
        loop {
            run();
            runs += 1;
            let spent = processor_seconds() - begin;
            if spent > 0.1 {
                return spent / f64::from(runs);
            }
        }
    };
    (0..RUNS).map(&mut seconds).fold(f64::INFINITY, f64::min)
}

/// Seconds for which this thread has run, where Linux says it, and else the time.
fn processor_seconds() -> f64 {
    thread_local!(static BEGIN: Instant = Instant::now());
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split_whitespace().next().and_then(|n| n.parse::<f64>().ok());
    nanoseconds.map_or_else(|| BEGIN.with(|begin| begin.elapsed().as_secs_f64()), |ns| ns / 1e9)
}
