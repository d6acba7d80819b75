//! Convolutions and gradients against sums over all taps in f64, on one thread and on three.

use super::tiles::tests::numbers;
use super::*;
use crate::routine::gemm::name_of;

/// Small values that sum exactly in f32 in any order, and are exact in bf16.
fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 9) as f32 - 4.0).collect()
}

fn bytes(values: &[f32], elem: Elem) -> Vec<u64> {
    let mut all = vec![0_u64; (values.len() * elem.size()).div_ceil(8)];
    for (i, &value) in values.iter().enumerate() {
        // SAFETY: inside the vector.
        unsafe { elem.store(all.as_mut_ptr().cast(), i as isize, value) };
    }
    all
}

/// Calls `each` with every element of x and w and the element of y to which they contribute.
fn products(conv: &Conv, mut each: impl FnMut(usize, usize, usize)) {
    let Conv { batch, groups, channels, filters, window, .. } = *conv;
    let taps = window.taps_len();
    for (image, channel, filter, tap, row) in (0..batch * groups * filters * channels)
        .map(|i| (i / (filters * channels), i % channels, i / channels % filters))
        .flat_map(|(i, c, m)| (0..taps * window.rows()).map(move |r| (i, c, m, r % taps, r / taps)))
    {
        let span = window.spans(tap, row).next().expect("without end");
        for position in span.first..span.last {
            let x = (image * channels + channel) * window.input_len()
                + span.from
                + (position - span.first) * window.strides[2];
            let w = ((image % groups * filters + filter) * channels + channel) * taps + tap;
            let y = (image * filters + filter) * window.output_len();
            each(x, w, y + row * window.output[2] + position);
        }
    }
}

fn check(conv: &Conv) {
    let Conv { elem, out, batch, groups, channels, filters, window } = *conv;
    let x_len = batch * groups * channels * window.input_len();
    let w_len = groups * filters * channels * window.taps_len();
    let y_len = batch * groups * filters * window.output_len();
    let (x, w, dy) = (values(x_len, 1), values(w_len, 2), values(y_len, 3));
    let (mut y, mut dx, mut dw) = (vec![0.0; y_len], vec![0.0; x_len], vec![0.0; w_len]);
    products(conv, |i, j, k| {
        y[k] += x[i] * w[j];
        dx[i] += dy[k] * w[j];
        dw[j] += dy[k] * x[i];
    });
    let [x, w, dy] = [&x, &w, &dy].map(|v| bytes(v, elem));
    let at = |v: &Vec<u64>| v.as_ptr().cast::<u8>();
    for threads in [1, 3] {
        let pool = Pool::new(threads);
        for (expected, which) in [(&y, 0), (&dx, 1), (&dw, 2)] {
            let mut found = bytes(&vec![7.0; expected.len()], out);
            let to = found.as_mut_ptr().cast();
            // SAFETY: the tensors have these shapes.
            unsafe {
                match which {
                    0 => conv.forward(&pool, at(&x), at(&w), to),
                    1 => conv.grad_input(&pool, at(&dy), at(&w), to),
                    _ => conv.grad_weight(&pool, at(&dy), at(&x), to),
                }
            }
            let wanted = bytes(expected, out);
            // The crate `gemm` has zeros of either sign.
            let differs = match name_of(elem) {
                "gemm" => {
                    // SAFETY: inside both vectors.
                    let of =
                        |v: &[u64], i: usize| unsafe { out.load(v.as_ptr().cast(), i as isize) };
                    (0..expected.len()).position(|i| of(&found, i) != of(&wanted, i))
                }
                _ => found.iter().zip(&wanted).position(|(a, b)| a != b),
            };
            assert_eq!(differs, None, "{which} on {threads} threads: {conv:?}");
        }
    }
}

/// A window over images of `size` with this border on both sides.
fn window(
    size: [usize; 3],
    taps: [usize; 3],
    stride: usize,
    dilation: usize,
    border: usize,
) -> Window {
    let mut window = Window {
        input: size,
        output: [1; 3],
        taps,
        strides: [1; 3],
        dilations: [1; 3],
        low: [0; 3],
    };
    for i in 0..3 {
        if size[i] > 1 {
            (window.strides[i], window.dilations[i]) = (stride, dilation);
            window.low[i] = border;
        }
        let room = size[i] + 2 * window.low[i] - window.dilations[i] * (taps[i] - 1) - 1;
        window.output[i] = room / window.strides[i] + 1;
    }
    window
}

#[test]
fn all_shapes_and_types_are_exact() {
    let windows = [
        window([1, 7, 7], [1, 3, 3], 1, 1, 1),
        window([1, 7, 9], [1, 3, 2], 2, 1, 1),
        window([1, 6, 5], [1, 1, 1], 1, 1, 0),
        window([1, 6, 5], [1, 1, 1], 2, 1, 0),
        window([1, 6, 5], [1, 1, 1], 1, 1, 1),
        window([1, 1, 40], [1, 1, 5], 1, 2, 0),
        window([3, 4, 5], [2, 3, 2], 1, 1, 1),
        window([1, 25, 31], [1, 2, 3], 1, 1, 0),
    ];
    for window in windows {
        for (batch, groups, channels, filters) in
            [(1, 1, 3, 4), (5, 2, 2, 13), (3, 3, 1, 2), (2, 1, 40, 30)]
        {
            for (elem, out) in
                [(Elem::F32, Elem::F32), (Elem::BF16, Elem::F32), (Elem::BF16, Elem::BF16)]
            {
                // Sums of these products have few bits; in bf16 only those of few are exact.
                let narrow = out == Elem::BF16;
                if narrow && window.output_len() * batch * channels * window.taps_len() > 2 {
                    continue;
                }
                check(&Conv { elem, out, batch, groups, channels, filters, window });
            }
        }
    }
}

#[test]
fn large_kernels_are_cut_into_parts() {
    let conv = |channels, filters, window| {
        let (elem, out) = (Elem::F32, Elem::F32);
        Conv { elem, out, batch: 6, groups: 1, channels, filters, window }
    };
    check(&conv(120, 420, window([1, 5, 5], [1, 3, 3], 1, 1, 1)));
    check(&conv(520, 16, window([1, 6, 6], [1, 1, 1], 2, 1, 0)));
    check(&conv(4, 5, window([1, 70, 70], [1, 3, 3], 1, 1, 1)));
    let large = conv(96, 310, window([1, 13, 31], [1, 3, 3], 1, 1, 1));
    check(&Conv { elem: Elem::BF16, batch: 1, ..large });
    let wide = conv(4, 5, window([1, 9, 70], [1, 3, 3], 1, 1, 1));
    check(&Conv { elem: Elem::BF16, ..wide });
}

/// Several images per GEMM, several parts of the channels, and rows of less and more than a vector.
#[test]
fn strides_of_unfolded_images_are_exact() {
    let windows = [
        window([1, 9, 9], [1, 3, 3], 2, 1, 1),
        window([1, 18, 75], [1, 2, 2], 2, 1, 0),
        window([1, 5, 140], [1, 1, 3], 2, 1, 1),
        window([1, 7, 3], [1, 2, 2], 2, 1, 0),
        window([1, 8, 40], [1, 3, 3], 3, 1, 1),
    ];
    for window in windows {
        for (batch, groups, channels, filters) in [(6, 1, 40, 13), (2, 2, 3, 5), (1, 1, 300, 2)] {
            for elem in [Elem::F32, Elem::BF16] {
                let out = Elem::F32;
                check(&Conv { elem, out, batch, groups, channels, filters, window });
            }
        }
    }
}

/// Windows of every kind over images of one channel per group, and of a few: rows of less and more than a vector, elements before, between
/// and behind what taps read, and gradients of elements that no tap reads.
#[test]
fn few_channels_are_exact() {
    let windows = [
        window([1, 9, 7], [1, 7, 7], 1, 1, 3),
        window([1, 10, 35], [1, 3, 3], 2, 1, 1),
        window([1, 9, 34], [1, 5, 5], 2, 1, 2),
        window([1, 11, 50], [1, 3, 2], 3, 1, 1),
        window([1, 8, 40], [1, 2, 3], 2, 3, 2),
        window([1, 9, 20], [1, 3, 3], 3, 2, 0),
        window([1, 4, 4], [1, 1, 1], 4, 1, 0),
        window([1, 1, 100], [1, 1, 4], 1, 1, 3),
        window([4, 5, 18], [3, 3, 3], 2, 1, 1),
        // Parts of whole vectors.
        window([1, 9, 32], [1, 3, 3], 2, 1, 1),
        window([1, 6, 64], [1, 5, 5], 2, 1, 2),
        window([1, 7, 48], [1, 3, 3], 3, 1, 1),
    ];
    for window in windows {
        for (batch, groups, channels, filters) in
            [(2, 5, 1, 1), (1, 3, 1, 3), (3, 1, 1, 2), (2, 2, 4, 4), (1, 2, 3, 2), (0, 4, 1, 1)]
        {
            for elem in [Elem::F32, Elem::BF16] {
                let out = Elem::F32;
                let conv = Conv { elem, out, batch, groups, channels, filters, window };
                assert!(conv.has_few_channels());
                check(&conv);
            }
        }
    }
}

/// Strides, dilations and borders, with groups, odd numbers of channels, and filters beyond whole panels.
#[cfg(target_arch = "x86_64")]
#[test]
fn taps_at_offsets_are_exact() {
    if !crate::simd::prefers_bf16_dots() {
        return;
    }
    let windows = [
        window([1, 13, 31], [1, 3, 3], 1, 1, 1),
        window([1, 14, 33], [1, 3, 3], 2, 1, 1),
        window([1, 33, 64], [1, 7, 7], 2, 1, 3),
        window([1, 12, 63], [1, 2, 5], 1, 2, 0),
        window([1, 20, 46], [1, 3, 2], 3, 1, 1),
        window([1, 21, 35], [1, 3, 3], 2, 3, 2),
        window([1, 11, 47], [1, 2, 2], 1, 1, 1),
        window([1, 1, 260], [1, 1, 5], 1, 1, 2),
    ];
    let mut taken = [0; 3];
    for window in windows {
        for (batch, groups, channels, filters) in
            [(2, 1, 16, 13), (3, 2, 15, 12), (1, 1, 33, 30), (1, 2, 2, 5), (0, 1, 16, 16)]
        {
            for (elem, out) in [(Elem::BF16, Elem::F32), (Elem::BF16, Elem::BF16)] {
                let conv = Conv { elem, out, batch, groups, channels, filters, window };
                check(&conv);
                let x = bytes(&values(batch * groups * channels * window.input_len(), 1), elem);
                let w = values(groups * filters * channels * window.taps_len(), 2);
                let y = values(batch * groups * filters * window.output_len(), 3);
                let (w, y) = (bytes(&w, elem), bytes(&y, elem));
                let mut to = vec![0_u64; 2 * (x.len() + w.len() + y.len()) + 1];
                let (pool, to) = (Pool::new(1), to.as_mut_ptr().cast::<u8>());
                let [x, w, y] = [&x, &w, &y].map(|v| v.as_ptr().cast::<u8>());
                // SAFETY: the tensors have these shapes, and the result has room for any of them.
                unsafe {
                    taken[0] += usize::from(conv.direct(&pool, x, w, to));
                    taken[1] += usize::from(conv.direct_grad_input(&pool, y, w, to));
                    taken[2] += usize::from(conv.direct_grad_weight(&pool, y, x, to));
                }
            }
        }
    }
    assert!(taken[0] > 40 && taken[1] > 40 && taken[2] > 12, "{taken:?}");
}

#[test]
fn no_images_give_no_gradient() {
    let window = window([1, 4, 4], [1, 3, 3], 1, 1, 1);
    let (elem, out) = (Elem::F32, Elem::F32);
    check(&Conv { elem, out, batch: 0, groups: 1, channels: 2, filters: 3, window });
}

#[test]
fn tiles_of_all_borders_and_sizes_are_exact() {
    for (size, border) in
        [([1, 7, 7], 1), ([1, 8, 6], 1), ([1, 9, 33], 0), ([1, 3, 3], 2), ([1, 4, 3], 0)]
    {
        let window = window(size, [1, 3, 3], 1, 1, border);
        // Enough tiles, of each image one for 2 x 2 positions, for all three directions.
        let positions = &window.output;
        let enough = 97_usize.div_ceil(positions[1].div_ceil(2) * positions[2].div_ceil(2));
        for (batch, groups, channels, filters) in
            [(enough, 1, 16, 17), (3, 2, 19, 16), (enough, 2, 19, 16), (0, 1, 16, 16)]
        {
            let (elem, out) = (Elem::F32, Elem::F32);
            let conv = Conv { elem, out, batch, groups, channels, filters, window };
            assert!(conv.is_winograd());
            let ways = [conv.is_winograd_forward(), conv.is_winograd_grad_weight()];
            assert!(batch != enough || ways == [true; 2], "{conv:?}");
            check(&conv);
        }
    }
    let (elem, out, window) = (Elem::F32, Elem::F32, window([1, 6, 6], [1, 3, 3], 1, 1, 1));
    check(&Conv { elem, out, batch: 40, groups: 1, channels: 16, filters: 300, window });
    check(&Conv { elem, out, batch: 1, groups: 1, channels: 600, filters: 20, window });
}

/// The convolution over 40 channels of numbers in [-1, 1) by both methods: root mean squares of their errors.
#[test]
fn transformed_tiles_round_little_more_than_sums() {
    let (elem, out, window) = (Elem::F32, Elem::F32, window([1, 20, 20], [1, 3, 3], 1, 1, 1));
    let conv = Conv { elem, out, batch: 3, groups: 1, channels: 40, filters: 24, window };
    let (x, w) = (numbers(3 * 40 * 400, 1), numbers(24 * 40 * 9, 2));
    let (y_len, w_len) = (3 * 24 * 400, w.len());
    let dy = numbers(y_len, 3);
    let (mut y, mut dw) = (vec![0_f64; y_len], vec![0_f64; w_len]);
    products(&conv, |i, j, k| {
        y[k] += f64::from(x[i]) * f64::from(w[j]);
        dw[j] += f64::from(dy[k]) * f64::from(x[i]);
    });
    let error = |found: &[f32], exact: &[f64]| {
        let square = |(a, b): (&f32, &f64)| (f64::from(*a) - b).powi(2);
        (found.iter().zip(exact).map(square).sum::<f64>() / exact.len() as f64).sqrt()
    };
    let pool = Pool::new(2);
    let (mut tiles, mut sums) = (vec![0_f32; y_len], vec![0_f32; y_len]);
    let (mut tiles_dw, mut sums_dw) = (vec![0_f32; w_len], vec![0_f32; w_len]);
    let at = |v: &[f32]| v.as_ptr().cast::<u8>();
    // SAFETY: the tensors have these shapes.
    unsafe {
        conv.winograd(&pool, at(&x), (at(&w), false), tiles.as_mut_ptr().cast());
        conv.dense(&pool, at(&x), at(&w), sums.as_mut_ptr().cast());
        conv.winograd_grad_weight(&pool, at(&dy), at(&x), tiles_dw.as_mut_ptr().cast());
        conv.dense_grad_weight(&pool, at(&dy), at(&x), sums_dw.as_mut_ptr().cast());
    }
    let (forward, weight) = (error(&tiles, &y), error(&tiles_dw, &dw));
    let (forward_sums, weight_sums) = (error(&sums, &y), error(&sums_dw, &dw));
    assert!(forward < 2.0 * forward_sums && forward > 0.0, "{forward:e} {forward_sums:e}");
    assert!(weight < 3.0 * weight_sums && weight > 0.0, "{weight:e} {weight_sums:e}");
}

/// Of numbers that are rounded, the same bits on any number of threads, among which channels and filters are divided.
#[test]
fn results_do_not_depend_on_the_threads() {
    let windows = [
        window([1, 14, 14], [1, 3, 3], 1, 1, 1),
        window([1, 7, 9], [1, 3, 3], 2, 1, 1),
        window([1, 12, 12], [1, 1, 1], 1, 1, 0),
        window([1, 9, 9], [1, 1, 1], 2, 1, 0),
    ];
    for window in windows {
        for (batch, groups, channels, filters) in
            [(1, 1, 49, 401), (3, 1, 97, 33), (2, 3, 17, 18), (5, 1, 200, 385)]
        {
            for elem in [Elem::F32, Elem::BF16] {
                let conv = Conv { elem, out: elem, batch, groups, channels, filters, window };
                let x_len = batch * groups * channels * window.input_len();
                let w_len = groups * filters * channels * window.taps_len();
                let y_len = batch * groups * filters * window.output_len();
                let [x, w, dy] = [(x_len, 1), (w_len, 2), (y_len, 3)]
                    .map(|(n, seed)| bytes(&numbers(n, seed), elem));
                let at = |v: &Vec<u64>| v.as_ptr().cast::<u8>();
                let on = |threads: usize| {
                    let pool = Pool::new(threads);
                    let mut found = [y_len, x_len, w_len].map(|n| bytes(&vec![7.0; n], elem));
                    let [y, dx, dw] = found.each_mut().map(|v| v.as_mut_ptr().cast::<u8>());
                    // SAFETY: the tensors have these shapes.
                    unsafe {
                        conv.forward(&pool, at(&x), at(&w), y);
                        conv.grad_input(&pool, at(&dy), at(&w), dx);
                        conv.grad_weight(&pool, at(&dy), at(&x), dw);
                    }
                    found
                };
                let one = on(1);
                for threads in [2, 3, 8] {
                    assert!(on(threads) == one, "{threads} threads: {conv:?}");
                }
            }
        }
    }
}
