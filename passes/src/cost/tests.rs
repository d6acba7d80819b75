//! Tests of the cost model: what must be faster than what, and published collectives.

use super::*;
use frit_ir::ops::{Conv, Input, Window};
use frit_ir::{DType, Graph, Op, Origin, Region, Shape, TensorType};

fn gemm(m: usize, n: usize, k: usize) -> GemmShape {
    let dtype = DType::BF16;
    GemmShape { dtype, out: dtype, batch: 1, m, n, k, trans: [false, false] }
}

#[test]
fn large_gemms_reach_the_sustained_rate_and_small_ones_do_not() {
    for device in [Device::a100(), Device::h100()] {
        let rate = |p: GemmShape| p.flops() as f64 / device.gemm_seconds(&p);
        let sustained = 1e12 * device.half_tflops * device.matmul_efficiency;
        assert!(rate(gemm(16384, 16384, 16384)) > 0.9 * sustained, "{}", device.name);
        assert!(rate(gemm(128, 128, 4096)) < 0.3 * sustained, "{}", device.name);
        // One tile more than a whole wave costs nearly another wave.
        assert!(rate(gemm(8192, 8192, 64)) < 0.5 * sustained, "{}", device.name);
    }
}

#[test]
fn unaligned_rows_are_slower_than_padded_ones() {
    let device = Device::h100();
    let time = |n: usize| device.gemm_seconds(&gemm(8192, n, 768));
    assert!(time(50257) > 1.5 * time(50304));
}

#[test]
fn rows_decide_the_efficiency() {
    let efficiency = |n: usize, k: usize| gemm(512, n, k).alignment_efficiency();
    assert_eq!(efficiency(768, 768), 1.0);
    assert_eq!(efficiency(50264, 768), 0.9);
    assert_eq!(efficiency(50257, 768), 1.0 / 3.0);
    assert_eq!(efficiency(768, 254), 0.5);
    // Rows of a transposed operand run along its other axis.
    let transposed = GemmShape { trans: [true, false], ..gemm(64, 128, 7) };
    assert_eq!(transposed.alignment_efficiency(), 1.0);
}

#[test]
fn packed_operands_need_no_alignment() {
    let cpu = Device::cpu("+avx512f,+avx512bf16");
    let seconds = |n: usize| cpu.matmul_seconds(&gemm(512, n, 768));
    assert!(seconds(50257) < seconds(50304));
}

#[test]
fn low_precision_is_faster() {
    let amd = Device::cpu("+sse4a,+avx512f,+avx512bf16");
    let amx = Device::cpu("+avx512f,+avx512bf16,+amx-tile,+amx-bf16");
    for device in [Device::a100(), Device::h100(), amd, amx] {
        let low = gemm(4096, 4096, 4096);
        let wide = GemmShape { dtype: DType::F32, out: DType::F32, ..low };
        assert!(
            device.matmul_seconds(&low) < 0.6 * device.matmul_seconds(&wide),
            "{}",
            device.name
        );
    }
}

#[test]
fn low_precision_is_no_faster_where_kernels_widen_it() {
    let low = gemm(4096, 4096, 4096);
    let wide = GemmShape { dtype: DType::F32, out: DType::F32, ..low };
    for features in ["+avx512f,+avx512bf16", "+avx512f", "+avx2"] {
        let cpu = Device::cpu(features);
        let [low, wide] = [low, wide].map(|shape| cpu.matmul_seconds(&shape));
        assert!(low > 0.9 * wide && low <= wide, "{features}: {low} {wide}");
    }
}

#[test]
fn a_large_gemm_that_rounds_its_operands_is_faster_and_pays_for_the_rounding() {
    let body = |n: usize, rounds: bool| {
        let square = format!(r#"bf16[{n}, {n}]"#);
        let leaf = format!(r#"{{"dtype":"bf16","shape":[{n},{n}]}}"#);
        let (operand, rounding) = match rounds {
            true => (
                "%q",
                format!(r#"%q: {square}, %m: f32[] = quantize %a {{index = 0, to = "f8e4m3"}}"#),
            ),
            false => ("%a", String::new()),
        };
        let text = format!(
            "graph @g world=1 {{\n%a: {square} = input {{name = \"a\", ty = {leaf}}}\n{rounding}\n\
             %y: {square} = matmul {operand}, {operand}\nreturn %y as \"y\"\n}}"
        );
        frit_ir::text::parse(&text).expect("the text is a graph")
    };
    let (device, bytes) = (Device::h100(), |n: usize| 4 * (n * n) as u64);
    let seconds = |n, rounds| device.kernel_seconds(&body(n, rounds), bytes(n));
    assert!(seconds(8192, true) < 0.7 * seconds(8192, false));
    assert!(seconds(256, true) > seconds(256, false), "launches are not free");
}

/// The seconds of a graph's only kernel, whose operand is `%x` of a type and a shape.
fn seconds_of(device: &Device, (dtype, shape): (&str, &str), kernel: &str) -> f64 {
    let leaf = format!("{{\"dtype\": \"{dtype}\", \"shape\": [{shape}]}}");
    let text = format!(
        "graph @g world=1 {{\n%x: {dtype}[{shape}] = input {{name = \"x\", ty = {leaf}}}\n\
         {kernel}\nreturn %y as \"y\"\n}}"
    );
    let graph = frit_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"));
    device.kernel_seconds(&graph, 0)
}

#[test]
fn softmax_takes_a_processor_as_long_in_bf16() {
    let ratio = |device: &Device| {
        let [low, wide] = ["bf16", "f32"].map(|dtype| {
            let attention = format!(
                "%y: {dtype}[8, 12, 512, 64], %l: f32[8, 12, 512] = attention %x, %x, %x {{scale = 0.125}}"
            );
            seconds_of(device, (dtype, "8, 12, 512, 64"), &attention)
        });
        low / wide
    };
    let amx = Device::cpu("+avx512f,+avx512bf16,+amx-tile,+amx-bf16");
    assert!((0.5..0.7).contains(&ratio(&amx)), "{}", ratio(&amx));
    assert!(ratio(&Device::h100()) < 0.1);
}

#[test]
fn functions_without_an_instruction_cost_a_processor_more_than_others() {
    let cpu = Device::cpu("+avx512f");
    let seconds = |device: &Device, f: &str| {
        seconds_of(device, ("f32", "1000, 1000"), &format!("%y: f32[1000, 1000] = {f} %x"))
    };
    assert!(seconds(&cpu, "tanh") > 50.0 * seconds(&cpu, "relu"));
    assert_eq!(seconds(&Device::h100(), "tanh"), seconds(&Device::h100(), "relu"));
}

/// A kernel of one operation, whose operands are `%x` and `%s`, f32 numbers of some shapes.
fn kernel_of(x: &str, s: &str, kernel: &str) -> Graph {
    let input = |name: &str, shape: &str| {
        let leaf = format!("{{\"dtype\": \"f32\", \"shape\": [{shape}]}}");
        format!("%{name}: f32[{shape}] = input {{name = \"{name}\", ty = {leaf}}}\n")
    };
    let (x, s) = (input("x", x), input("s", s));
    let text = format!("graph @g world=1 {{\n{x}{s}{kernel}\nreturn %y as \"y\"\n}}");
    frit_ir::text::parse(&text).unwrap_or_else(|e| panic!("{e:?}\n{text}"))
}

#[test]
fn a_processor_waits_for_memory_before_it_normalizes_a_channel() {
    let shape = "8, 64, 28, 28";
    let norm = format!(
        "%y: f32[{shape}], %m: f32[64], %v: f32[64] = batch_norm %x, %s, %s {{eps = 1e-5}}"
    );
    let body = kernel_of(shape, "64", &norm);
    let (cpu, gpu) = (Device::cpu("+avx512f"), Device::h100());
    let bytes = 2 * 4 * 8 * 64 * 28 * 28;
    let traffic = bytes as f64 / cpu.bytes_per_second();
    let added = cpu.kernel_seconds(&body, bytes) - cpu.kernel_seconds(&body, 0);
    assert!((added / traffic - 1.0).abs() < 1e-9, "{added} {traffic}");
    // Which reads images twice.
    let on_gpu = 1.5 * bytes as f64 / gpu.bytes_per_second();
    assert!(gpu.kernel_seconds(&body, bytes) < 1.01 * on_gpu + 1e-6 * gpu.launch_us);
}

#[test]
fn a_processor_updates_in_place_faster_than_it_copies() {
    let update = kernel_of("1000", "", "%y: f32[1000] = ema_step %x, %x, %s, %s, %s");
    let copy = kernel_of("1000", "", "%y: f32[1000] = relu %x");
    let seconds = |device: &Device, body| device.kernel_seconds(body, 1 << 30);
    let cpu = Device::cpu("+avx512f");
    assert!(seconds(&cpu, &update) < 0.7 * seconds(&cpu, &copy));
    let gpu = Device::h100();
    assert_eq!(seconds(&gpu, &update), seconds(&gpu, &copy));
}

#[test]
fn a_processor_takes_longer_for_windows_of_more_taps() {
    let pool = |taps: usize| {
        let side = 56 - taps + 1;
        let window = r#"{"strides": [1, 1], "dilations": [1, 1], "low": [0, 0], "high": [0, 0]}"#;
        let text = format!(
            "%y: f32[8, 64, {side}, {side}] = max_pool %x {{window = {window}, taps = [{taps}, {taps}]}}"
        );
        kernel_of("8, 64, 56, 56", "", &text)
    };
    let seconds = |device: &Device, taps| device.kernel_seconds(&pool(taps), 0);
    let cpu = Device::cpu("+avx512f");
    assert!(seconds(&cpu, 3) > 1.8 * seconds(&cpu, 2));
    assert_eq!(seconds(&Device::h100(), 3), seconds(&Device::h100(), 2));
}

/// Seconds of the arithmetic of a convolution, for each operation.
fn convolution_seconds(device: &Device, dtype: DType, stride: usize, taps: usize) -> f64 {
    let mut graph = Graph::new("conv");
    let mut input = |name: &str, shape: [usize; 4]| {
        let ty = TensorType::new(dtype, Shape::from(shape));
        let op = Op::Input(Input { name: name.into(), ty });
        graph.add1(op, &[], Origin::none(), Region::Forward).expect("an input")
    };
    let operands = [input("x", [8, 64, 56, 56]), input("w", [64, 64, taps, taps])];
    let window = Window { strides: vec![stride; 2], ..Window::plain(2) };
    let op = Op::Conv(Conv { window, groups: 1, out: None });
    let y = graph.add1(op, &operands, Origin::none(), Region::Forward).expect("they fit");
    let node = graph.def(y);
    device.arithmetic_seconds(&graph, node, false) / kernel::node_flops(&graph, node) as f64
}

#[test]
fn a_processor_computes_convolutions_of_three_by_three_taps_in_tiles() {
    let seconds = convolution_seconds;
    let cpu = Device::cpu("+avx512f,+avx512bf16");
    let in_tiles = seconds(&cpu, DType::F32, 1, 3);
    assert!(in_tiles < 0.7 * seconds(&cpu, DType::F32, 2, 3));
    assert!(in_tiles < 0.7 * seconds(&cpu, DType::F32, 1, 5));
    assert_eq!(seconds(&cpu, DType::BF16, 1, 3), seconds(&cpu, DType::BF16, 2, 3));
    let gpu = Device::h100();
    assert_eq!(seconds(&gpu, DType::F32, 1, 3), seconds(&gpu, DType::F32, 2, 3));
}

fn measured() -> Convolutions {
    Convolutions {
        single_tflops: Curve::flat(0.4),
        tiles_tflops: Curve::flat(0.6),
        half_tflops: Curve(vec![(16, 0.4), (256, 1.2)]),
        channels_last_tflops: None,
        strided: 0.5,
        depthwise_tflops: None,
    }
}

#[test]
fn measured_convolutions_take_the_rate_of_their_kind() {
    let cpu = Device { convolutions: Some(measured()), ..Device::cpu("+avx512f") };
    for (dtype, stride, taps, tflops) in [
        (DType::F32, 1, 1, 0.4),
        (DType::F32, 1, 3, 0.6),
        (DType::F32, 2, 3, 0.2),
        (DType::BF16, 1, 1, 0.8),
        (DType::BF16, 1, 3, 0.8),
    ] {
        let rate = 1e-12 / convolution_seconds(&cpu, dtype, stride, taps);
        assert!((rate / tflops - 1.0).abs() < 1e-9, "{dtype:?} {taps}: {rate}");
    }
    for wrong in [Curve::flat(0.0), Curve(vec![]), Curve(vec![(64, 1.0), (64, 2.0)])] {
        let convolutions = Convolutions { tiles_tflops: wrong, ..measured() };
        let device = Device { convolutions: Some(convolutions), ..cpu.clone() };
        let cluster = Cluster { device, ..Cluster::threads("") };
        let defect = cluster.defect().expect("a rate that is none");
        assert!(defect.contains("device.convolutions.tiles_tflops"), "{defect}");
    }
}

/// A body with images `[8, 64, 56, 56]` in bf16, which channels lie last of.
fn last_body(nodes: &str) -> Graph {
    let image = r#"ty = {"dtype":"bf16","shape":[8,56,56,64]}"#;
    let vector = |name: &str| {
        let ty = r#"ty = {"dtype":"f32","shape":[64]}"#;
        format!("%{name}: f32[64] = input {{name = \"{name}\", {ty}}}")
    };
    let vectors = ["s", "m", "v"].map(vector).join("\n");
    frit_ir::text::parse(&format!(
        r#"graph @g world=1 {{
        %x: bf16[8, 56, 56, 64] = input {{name = "x", {image}}}
        %d: bf16[8, 56, 56, 64] = input {{name = "d", {image}}}
        %k: bf16[64, 64, 1, 1] = input {{name = "k", ty = {{"dtype":"bf16","shape":[64,64,1,1]}}}}
        {vectors}
        %f: bf16[8, 64, 56, 56] = transpose %x {{perm = [0,3,1,2]}}
        {nodes}
        }}"#
    ))
    .expect("the text is a graph")
}

#[test]
fn convolutions_of_images_that_lie_channels_last_have_a_rate_of_their_own() {
    let convolutions = Convolutions { channels_last_tflops: Some(Curve::flat(2.4)), ..measured() };
    let device = Device { convolutions: Some(convolutions), ..Device::h100() };
    let conv = r#"conv %f, %k {window = {"strides":[1,1],"dilations":[1,1],"low":[0,0],"high":[0,0]}, groups = 1}"#;
    let seconds = |behind: &str| {
        let body = last_body(&format!("%y: bf16[8, 64, 56, 56] = {conv}\n{behind}"));
        device.kernel_seconds(&body, 0) - 1e-6 * device.launch_us
    };
    let last =
        seconds("%z: bf16[8, 56, 56, 64] = transpose %y {perm = [0,2,3,1]}\nreturn %z as \"z\"");
    let flops = 2.0 * (8 * 56 * 56 * 64 * 64) as f64;
    assert!((flops / last / 2.4e12 - 1.0).abs() < 1e-6, "{last}");
}

#[test]
fn batch_normalizations_on_a_gpu_read_images_twice() {
    let bytes = (8 * 56 * 56 * 64 * 2) as f64;
    let gpu = Device::h100();
    let more = |nodes: &str| {
        let traffic = gpu.kernel_seconds(&last_body(nodes), 1 << 40) - 1e-6 * gpu.launch_us;
        (traffic * gpu.bytes_per_second() - (1u64 << 40) as f64) / bytes
    };
    let forward = more(
        "%y: bf16[8, 64, 56, 56], %a: f32[64], %b: f32[64] = batch_norm %f, %s, %m {eps = 1e-5}
         return %y as \"y\"",
    );
    assert!((forward - 1.0).abs() < 0.01, "{forward}");
    let gradient = |result: &str| {
        more(&format!(
            "%p: bf16[8, 56, 56, 64] = relu_grad %d, %x
             %g: bf16[8, 64, 56, 56] = transpose %p {{perm = [0,3,1,2]}}
             %y: bf16[8, 64, 56, 56], %a: f32[64], %b: f32[64] = batch_norm_grad %g, %f, %s, %m, %v {{eps = 1e-5}}
             return %y as \"y\"{result}"
        ))
    };
    let (inside, result) = (gradient(""), gradient("\nreturn %p as \"p\""));
    assert!((inside - 3.0).abs() < 0.01 && (result - 2.0).abs() < 0.01, "{inside} {result}");
}

#[test]
fn curves_are_interpolated_and_end_flat() {
    let curve = Curve(vec![(16, 1.0), (64, 3.0), (128, 2.0)]);
    for (size, value) in [(1, 1.0), (16, 1.0), (32, 2.0), (64, 3.0), (128, 2.0), (4096, 2.0)] {
        assert!((curve.at(size) - value).abs() < 1e-12, "{size}: {}", curve.at(size));
    }
}

#[test]
fn curves_are_written_as_numbers_or_pairs() {
    let text = |curve: &Curve| serde_json::to_string(curve).unwrap();
    let read = |text: &str| serde_json::from_str::<Curve>(text);
    for curve in [Curve::flat(0.5), Curve(vec![(16, 1.0), (64, 3.0)])] {
        assert_eq!(read(&text(&curve)).unwrap(), curve);
    }
    assert_eq!(text(&Curve::flat(0.5)), "0.5");
    assert_eq!(read("2").unwrap(), Curve::flat(2.0));
    let error = read("[1, 2]").unwrap_err().to_string();
    assert!(error.contains("a list of pairs of a size and a number"), "{error}");
}

#[test]
fn narrow_matmuls_take_the_measured_fraction() {
    let curve = Curve(vec![(32, 0.25), (512, 1.0)]);
    let narrow = Narrow { single: curve.clone(), half: curve };
    let wide = Device { narrow: None, ..Device::cpu("+avx512f") };
    let device = Device { narrow: Some(narrow), ..wide.clone() };
    let shape = |m, n, k| GemmShape {
        dtype: DType::F32,
        out: DType::F32,
        batch: 1,
        m,
        n,
        k,
        trans: [false; 2],
    };
    let ratio = |p: &GemmShape| {
        let packing = |d: &Device| d.gemm_seconds(p) - p.flops() as f64 / d.peak_flops(p.dtype);
        let arithmetic = |d: &Device| d.gemm_seconds(p) - packing(&wide);
        arithmetic(&device) / arithmetic(&wide)
    };
    assert!((ratio(&shape(4096, 4096, 512)) - 1.0).abs() < 1e-9);
    assert!((ratio(&shape(32, 4096, 4096)) - 1.0).abs() < 1e-9);
    for narrow in [shape(32, 64, 4096), shape(4096, 32, 4096), shape(4096, 4096, 32)] {
        assert!((ratio(&narrow) - 4.0).abs() < 1e-9, "{narrow:?}");
    }
}

#[test]
fn collectives_agree_with_published_calibrations() {
    // Latency and algorithm bandwidth of all-gathers on 8 H100 per node with 400 Gb/s each
    // (autoparallel, h100_nvswitch_roce_400g.py): nodes, microseconds, GB/s.
    let h100 = Cluster::named("h100").unwrap();
    for (nodes, latency_us, gb_per_s) in [(1, 163.0, 386.0), (2, 210.0, 323.0), (8, 362.0, 305.0)] {
        for bytes in [256e6, 1e9] {
            let published = 1e-6 * latency_us + bytes / (1e9 * gb_per_s);
            let members = Members::all(8 * nodes);
            let ours = h100.exchange(Exchange::AllGather, bytes as u64, members).seconds;
            let ratio = ours / published;
            assert!((0.8..1.2).contains(&ratio), "{nodes} nodes, {bytes} bytes: {ratio}");
        }
    }
}

#[test]
fn one_rank_exchanges_nothing_and_strided_groups_cross_nodes() {
    let h100 = Cluster::named("h100").unwrap();
    let time = |n, stride| h100.exchange(Exchange::AllReduce, 1 << 30, Members { n, stride });
    assert!(time(1, 1).seconds < 1e-5);
    assert!(!time(8, 1).inter && time(8, 8).inter && time(16, 1).inter);
    assert!(time(8, 8).seconds > time(8, 1).seconds);
    // A tree keeps the latency of a small all-reduce from growing with the number of ranks.
    let small = |n| h100.exchange(Exchange::AllReduce, 16, Members::all(n)).seconds;
    assert!(small(1024) < 3.0 * small(64));
}

#[test]
fn defects_of_a_cluster_are_named() {
    let mut cluster = Cluster::named("a100-80g").unwrap();
    assert_eq!(cluster.defect(), None);
    cluster.inter.gb_per_s = 0.0;
    assert_eq!(cluster.defect().unwrap(), "`inter.gb_per_s` must be positive, not 0");
    cluster.inter.gb_per_s = 5.0;
    cluster.contention = 1.5;
    assert_eq!(cluster.defect().unwrap(), "`contention` must be a fraction, not 1.5");
}
