//! Benchmarks the GEMMs and the attention of a GPT-2 layer on 1 and 2 threads.
//!
//! `cargo run --release -p frit-kernels --example gemm_bench [FILTER]`. Each line gives the best and the median of several runs in
//! GFLOP/s; f32 and bf16 alternate, so that their ratio is meaningful on a loaded machine.

#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::time::Instant;

use frit_kernels::dtype::Elem;
use frit_kernels::pool::Pool;
use frit_kernels::routine::attention::{Attention, BackwardInputs, BackwardOutputs, Strides};
use frit_kernels::routine::gemm::{Gemm, Operand};

/// Name, m, n, k, whether A and B are given transposed.
const GEMMS: [(&str, [usize; 3], bool, bool); 13] = [
    ("nn 512x768x768", [512, 768, 768], false, false),
    ("nn 512x3072x768", [512, 3072, 768], false, false),
    ("nn 512x768x3072", [512, 768, 3072], false, false),
    ("nt 512x768x3072", [512, 768, 3072], false, true),
    ("nt 512x50257x768", [512, 50257, 768], false, true),
    ("nn 512x768x50257", [512, 768, 50257], false, false),
    ("tn 768x3072x512", [768, 3072, 512], true, false),
    ("tn 50257x768x512", [50257, 768, 512], true, false),
    ("nn 4096x3072x768", [4096, 3072, 768], false, false),
    ("tn 32x32x25088", [32, 32, 25088], true, false),
    ("tn 32x128x25088", [32, 128, 25088], true, false),
    ("tn 64x256x6272", [64, 256, 6272], true, false),
    ("tn 96x384x25088", [96, 384, 25088], true, false),
];

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    println!("{:28} {:>3} {:>22} {:>22} {:>22}", "", "", "f32", "bf16 -> f32", "bf16 -> bf16");
    for threads in [1, 2] {
        let pool = Pool::new(threads);
        for (name, sizes, a_transposed, b_transposed) in GEMMS {
            if name.contains(&filter) {
                gemm(&pool, name, sizes, a_transposed, b_transposed);
            }
        }
        if "attention".contains(&filter) {
            attention(&pool);
        }
        println!("scratch on {threads} threads: {} KiB", pool.scratch_bytes() / 1024);
    }
}

fn gemm(pool: &Pool, name: &str, [m, n, k]: [usize; 3], a_t: bool, b_t: bool) {
    let operand = |elem, rows, cols, transposed: bool| {
        if transposed {
            Operand::row_major(elem, cols, rows).transposed()
        } else {
            Operand::row_major(elem, rows, cols)
        }
    };
    let mut runs: Vec<_> =
        [(Elem::F32, Elem::F32), (Elem::BF16, Elem::F32), (Elem::BF16, Elem::BF16)]
            .into_iter()
            .map(|(elem, out)| {
                let gemm = Gemm {
                    a: operand(elem, m, k, a_t),
                    b: operand(elem, k, n, b_t),
                    ..Gemm::row_major(elem, out, m, n, k)
                };
                let (a, b) = (values(elem, m * k), values(elem, k * n));
                let mut c = values(out, m * n);
                move || {
                    // SAFETY: the buffers have the shapes' sizes.
                    unsafe {
                        let (a, b) = (a.as_ptr().cast(), b.as_ptr().cast());
                        gemm.run(pool, a, b, c.as_mut_ptr().cast(), std::ptr::null());
                    }
                }
            })
            .collect();
    let count = if m * n * k > 1 << 33 { 7 } else { 25 };
    let mut runs: Vec<&mut dyn FnMut()> =
        runs.iter_mut().map(|run| run as &mut dyn FnMut()).collect();
    line(name, pool.threads(), 2 * m * n * k, &mut runs, count);
}

fn attention(pool: &Pool) {
    for (name, batch, len, causal) in [
        ("attention 4x12x128x64", 4, 128, false),
        ("attention causal 4x12x128", 4, 128, true),
        ("attention causal 1x12x1024", 1, 1024, true),
    ] {
        let (heads, dim) = (12, 64);
        let size = batch * heads * len * dim;
        let mut forward = Vec::new();
        let mut backward = Vec::new();
        for elem in [Elem::F32, Elem::BF16] {
            let layout = Strides::time_first(heads, len, dim);
            let shape = Attention {
                batch,
                heads,
                kv_heads: heads,
                q_len: len,
                kv_len: len,
                head_dim: dim,
                value_dim: dim,
                scale: 0.125,
                causal,
                window: None,
                elem,
                q: layout,
                k: layout,
                v: layout,
                o: layout,
                mask: None,
                dropout: None,
            };
            let [q, k, v, d_o] = [0; 4].map(|_| values(elem, size));
            let [mut o, mut d_q, mut d_k, mut d_v] = [0; 4].map(|_| values(elem, size));
            let mut lse = vec![0f32; batch * heads * len];
            let (at_q, at_k, at_v) = (q.as_ptr().cast(), k.as_ptr().cast(), v.as_ptr().cast());
            let at_o = o.as_mut_ptr().cast();
            let at_lse = lse.as_mut_ptr();
            forward.push(move || {
                // SAFETY: the buffers live as long as the closures that own or share them.
                unsafe {
                    shape.forward(pool, at_q, at_k, at_v, [std::ptr::null(); 2], at_o, at_lse)
                };
            });
            backward.push(move || {
                let inputs = BackwardInputs {
                    q: q.as_ptr().cast(),
                    k: k.as_ptr().cast(),
                    v: v.as_ptr().cast(),
                    mask: std::ptr::null(),
                    kept: std::ptr::null(),
                    o: o.as_ptr().cast(),
                    lse: lse.as_ptr(),
                    d_o: d_o.as_ptr().cast(),
                };
                let outputs = BackwardOutputs {
                    d_q: d_q.as_mut_ptr().cast(),
                    d_k: d_k.as_mut_ptr().cast(),
                    d_v: d_v.as_mut_ptr().cast(),
                    d_mask: std::ptr::null_mut(),
                };
                // SAFETY: as above.
                unsafe { shape.backward(pool, &shape.gradient_strides(), &inputs, &outputs) };
            });
        }
        let half = if causal { 2 } else { 1 };
        let flops = 4 * batch * heads * len * len * dim / half;
        let mut runs: Vec<&mut dyn FnMut()> =
            forward.iter_mut().map(|run| run as &mut dyn FnMut()).collect();
        line(&format!("{name} fwd"), pool.threads(), flops, &mut runs, 25);
        let mut runs: Vec<&mut dyn FnMut()> =
            backward.iter_mut().map(|run| run as &mut dyn FnMut()).collect();
        line(&format!("{name} bwd"), pool.threads(), flops * 5 / 2, &mut runs, 25);
    }
}

/// Times the runs in turn and prints the best and the median of each.
fn line(name: &str, threads: usize, flops: usize, runs: &mut [&mut dyn FnMut()], count: usize) {
    let mut times = vec![Vec::new(); runs.len()];
    for _ in 0..count {
        for (run, times) in runs.iter_mut().zip(&mut times) {
            let start = Instant::now();
            run();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    print!("{name:28} {threads:>2}t");
    for times in &mut times {
        times.sort_by(f64::total_cmp);
        let rate = |seconds: f64| flops as f64 / seconds / 1e9;
        print!("   best {:5.0} median {:5.0}", rate(times[0]), rate(times[count / 2]));
    }
    println!();
}

/// Small reproducible values.
fn values(elem: Elem, len: usize) -> Vec<u32> {
    let mut words = vec![0u32; (len * elem.size()).div_ceil(4)];
    for (i, word) in words.iter_mut().enumerate() {
        let value = ((i * 7919 % 2003) as f32 / 1001.0 - 1.0).to_bits();
        *word = match elem {
            Elem::F32 => value,
            _ => (value >> 16) | (value & 0xffff_0000),
        };
    }
    words
}
