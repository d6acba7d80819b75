//! The simulator, emulating PyTorch's FSDP2, against published runs. `docs/simulator.md` has the table;
//! `UPDATE_EXPECT=1` writes it.

use crate::figures;
use crate::simulate::reference_model;
use crate::support::file;
use expect_test::expect_file;
use frit_ir::plan::Plan;
use frit_passes::cost::{Cluster, Device};
use frit_passes::simulate::emulate::{
    AdamW, Attention, Checkpointing, Emulation, Inductor, System, emulate,
};
use std::collections::BTreeMap;
use std::fmt::Write;

const LLAMA: &str = "examples/llama/model.json";
const GPT2: &str = "examples/gpu/gpt2_1558m.json";

/// Sizes of a model, as binds of the example's Llama or GPT-2.
const LLAMA3_8B: &str = "layers=32 width=4096 heads=32 kv_heads=8 ffn=14336 vocab=128256 seq=8192";
const LLAMA3_70B: &str = "layers=80 width=8192 heads=64 kv_heads=8 ffn=28672 vocab=128256 seq=8192";
const LLAMA2_7B: &str = "layers=32 width=4096 heads=32 kv_heads=32 ffn=11008 vocab=32000 seq=2048";
const LLAMA2_13B: &str = "layers=40 width=5120 heads=40 kv_heads=40 ffn=13824 vocab=32000 seq=4096";
const LLAMA2_34B: &str = "layers=48 width=8192 heads=64 kv_heads=8 ffn=22016 vocab=32000 seq=4096";
const LLAMA2_70B: &str = "layers=80 width=8192 heads=64 kv_heads=8 ffn=28672 vocab=32000 seq=4096";
const GPT_175B: &str = "layers=96 width=12288 heads=96 vocab=50000 seq=2048";

/// Floating-point operations per token of GPT 175B with activations computed again, as its source counts
/// them: 96·l·h²·(1 + s/6h + V/16lh) of Narayanan et al. 2021 (arXiv 2104.04473, equation 3).
const GPT_175B_FLOPS: f64 = 1.434e12;

/// Where rows were published.
const SOURCES: &[&str] = &[
    "torchtitan, docs/performance.md (2024): 64 A100",
    "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 with 2.4 TB/s and 500 W",
    "torchtitan, pull request 165 (2024): 8 H100, as above",
    "fms-fsdp, README.md (2024): 128 A100 with 400 Gb/s, 96 H100 with 800 Gb/s per node",
    "Zhao et al., \"PyTorch FSDP\" (arXiv 2304.11277, section 5.4): 512 A100 with 2 Tb/s per node, minGPT, \"more than\" 173 and 186 \
     TFLOP/s per GPU",
];

/// A published run.
struct Row {
    source: usize,
    name: &'static str,
    model: &'static str,
    sizes: &'static str,
    ranks: usize,
    batch: usize,
    system: System,
    attention: Attention,
    checkpointing: Checkpointing,
    /// Tokens per second and GPU.
    rate: f64,
    /// GiB that the caching allocator reserved.
    memory: Option<f64>,
}

#[rustfmt::skip]
fn rows() -> Vec<Row> {
    use Checkpointing::{Full, None as Without, SelectiveLayer, SelectiveOp};
    use System::{Compile, Eager};
    let row = |source, name, sizes, ranks, batch, system, checkpointing, rate, memory: f64| {
        let memory = Some(memory).filter(|m| *m > 0.0);
        // That of torchtitan's Llama rotates complex numbers, and that of minGPT is written out.
        let (model, attention) = match source {
            4 => (GPT2, Attention::Written),
            3 => (LLAMA, Attention::Fused),
            _ => (LLAMA, Attention::Complex),
        };
        Row { source, name, model, sizes, ranks, batch, system, attention, checkpointing, rate, memory }
    };
    vec![
        row(0, "Llama 3 8B", LLAMA3_8B, 64, 1, Eager, SelectiveLayer, 2904.0, 0.0),
        row(0, "Llama 3 8B", LLAMA3_8B, 64, 1, Eager, SelectiveOp, 2973.0, 0.0),
        row(0, "Llama 3 70B", LLAMA3_70B, 64, 1, Eager, Full, 331.0, 0.0),
        row(0, "Llama 2 13B", LLAMA2_13B, 64, 2, Eager, Without, 2162.0, 0.0),
        row(0, "Llama 2 13B", LLAMA2_13B, 64, 2, Eager, SelectiveLayer, 1914.0, 0.0),
        row(0, "Llama 2 13B", LLAMA2_13B, 64, 2, Eager, SelectiveOp, 1904.0, 0.0),
        row(0, "Llama 2 70B", LLAMA2_70B, 64, 1, Eager, SelectiveOp, 355.0, 0.0),
        row(0, "Llama 2 70B", LLAMA2_70B, 64, 2, Eager, Full, 353.0, 0.0),
        row(1, "Llama 3.1 8B", LLAMA3_8B, 8, 2, Eager, SelectiveOp, 5762.0, 82.4),
        row(1, "Llama 3.1 8B", LLAMA3_8B, 8, 2, Compile, SelectiveOp, 6667.0, 77.0),
        row(1, "Llama 3.1 8B", LLAMA3_8B, 128, 2, Eager, SelectiveOp, 5605.0, 67.0),
        row(1, "Llama 3.1 8B", LLAMA3_8B, 128, 2, Compile, SelectiveOp, 6514.0, 62.0),
        row(2, "Llama 7B", LLAMA2_7B, 8, 8, Eager, Full, 6200.0, 31.0),
        row(2, "Llama 7B", LLAMA2_7B, 8, 8, Eager, SelectiveOp, 6700.0, 59.4),
        row(2, "Llama 7B", LLAMA2_7B, 8, 8, Compile, Full, 7350.0, 28.9),
        row(2, "Llama 7B", LLAMA2_7B, 8, 8, Compile, SelectiveOp, 8250.0, 53.8),
        row(2, "Llama 7B", LLAMA2_7B, 8, 8, Compile, Without, 9200.0, 90.3),
        row(3, "Llama 2 34B", LLAMA2_34B, 128, 2, Eager, Full, 700.0, 0.0),
        row(3, "Llama 2 34B", LLAMA2_34B, 96, 2, Eager, Full, 1550.0, 0.0),
        row(3, "Llama 2 34B", LLAMA2_34B, 128, 8, Eager, Full, 772.0, 0.0),
        row(3, "Llama 2 70B", LLAMA2_70B, 128, 6, Eager, Full, 380.0, 0.0),
        row(4, "GPT 175B", GPT_175B, 512, 1, Eager, Full, 173e12 / GPT_175B_FLOPS, 0.0),
        row(4, "GPT 175B", GPT_175B, 512, 2, Eager, Full, 186e12 / GPT_175B_FLOPS, 0.0),
    ]
}

/// The cluster of a row: what its source states, else the built-in one.
fn cluster(row: &Row) -> Cluster {
    let h100 = Cluster::named("h100").expect("it is built in");
    let a100 = Cluster::named("a100-80g").expect("it is built in");
    match (row.source, row.ranks) {
        // 2 Tb/s per node; the first source does not state it.
        (0 | 4, _) => {
            let mut cluster = a100;
            cluster.inter.gb_per_s = 25.0;
            cluster
        }
        (1 | 2, _) => Cluster {
            device: Device { memory_gib: 95.0, memory_gb_per_s: 2400.0, ..h100.device.clone() },
            ..h100
        },
        (_, 96) => {
            let mut cluster = h100;
            // 800 Gb/s per node, shared by 8.
            cluster.inter.gb_per_s = 11.0;
            cluster
        }
        _ => a100,
    }
}

/// The settings of a row's reference plan. FSDP's mixed precision rounds the residual stream, too. Gradients are reduced in f32 by
/// torchtitan, in bf16 by fms-fsdp and where FSDP's `reduce_dtype` is left at that of the parameters.
fn settings(row: &Row) -> [String; 3] {
    let reduce = if row.source < 3 { "fp32" } else { "bf16" };
    [
        format!("sharding.ranks={}", row.ranks),
        format!("sharding.reduce_dtype={reduce}"),
        "precision.residual=compute".into(),
    ]
}

struct Predicted {
    row: Row,
    plan: usize,
    rate: f64,
    memory: f64,
}

fn predict(plan: &Plan, row: &Row, cluster: &Cluster) -> (f64, f64) {
    let Row { system, attention, checkpointing, .. } = *row;
    // All of them are older than 2.10, and none asked for the fused optimizer.
    let (inductor, adamw) = (Inductor::Before210, AdamW::Foreach);
    let emulation = Emulation { system, attention, checkpointing, inductor, adamw };
    let simulation = emulate(plan, cluster, emulation);
    let rate = simulation.tokens_or_examples_per_s / row.ranks as f64;
    (rate, simulation.peak_bytes as f64 / (1_u64 << 30) as f64)
}

fn off(predicted: f64, published: f64) -> f64 {
    100.0 * (predicted / published - 1.0)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// The median error on the rows of one source with the efficiency that fits the other sources of its type
/// of GPU best; `None` if there are no others.
fn left_out(source: usize, all: &[Predicted], plans: &[Plan]) -> Option<(f64, usize)> {
    let of_type = |row: &Row| cluster(row).device.half_tflops;
    let mut errors = Vec::new();
    for gpu in [312.0, 989.0] {
        let here: Vec<&Predicted> = all.iter().filter(|p| of_type(&p.row) == gpu).collect();
        let (mine, others): (Vec<_>, Vec<_>) =
            here.into_iter().partition(|p| p.row.source == source);
        if mine.is_empty() || others.is_empty() {
            continue;
        }
        let errors_at = |efficiency: f64, rows: &[&Predicted]| -> Vec<f64> {
            let error = |p: &&Predicted| {
                let mut cluster = cluster(&p.row);
                cluster.device.matmul_efficiency = efficiency;
                off(predict(&plans[p.plan], &p.row, &cluster).0, p.row.rate).abs()
            };
            rows.iter().map(error).collect()
        };
        let grid = (8..=19).map(|i| f64::from(i) * 0.05);
        let fit = |e: f64| median(errors_at(e, &others));
        let best = grid.min_by(|a, b| fit(*a).total_cmp(&fit(*b))).expect("the grid is not empty");
        errors.extend(errors_at(best, &mine));
    }
    let n = errors.len();
    (n > 0).then(|| (median(errors), n))
}

#[test]
fn emulated_runs_agree_with_published_ones() {
    let mut plans: Vec<Plan> = Vec::new();
    let mut known: BTreeMap<(&str, usize, usize), usize> = BTreeMap::new();
    let mut all = Vec::new();
    for row in rows() {
        let plan = *known.entry((row.sizes, row.ranks, row.batch)).or_insert_with(|| {
            let binds = format!("batch={} {}", row.batch, row.sizes);
            let settings = settings(&row);
            plans.push(reference_model(
                row.model,
                &binds,
                &settings.each_ref().map(String::as_str),
            ));
            plans.len() - 1
        });
        let (rate, memory) = predict(&plans[plan], &row, &cluster(&row));
        all.push(Predicted { row, plan, rate, memory });
    }
    let mut text = String::from(
        "| source | model | GPUs | batch | system | checkpointing | tokens/s/GPU published | predicted | error | GiB \
         published | predicted | error |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for p in &all {
        let r = &p.row;
        let memory = match r.memory {
            Some(m) => format!("{m:.1} | {:.1} | {:+.1} %", p.memory, off(p.memory, m)),
            None => format!("– | {:.1} | –", p.memory),
        };
        let (system, ac) = (format!("{:?}", r.system), format!("{:?}", r.checkpointing));
        writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {:.0} | {:.0} | {:+.1} % | {memory} |",
            r.source + 1,
            r.name,
            r.ranks,
            r.batch,
            system.to_lowercase(),
            ac.to_lowercase(),
            r.rate,
            p.rate,
            off(p.rate, r.rate),
        )
        .expect("writing to a string");
    }
    let row = |p: &Predicted| {
        let name = format!("{}, {} GPUs, batch {}", p.row.name, p.row.ranks, p.row.batch);
        (name, off(p.rate, p.row.rate))
    };
    let drawn: Vec<(String, f64)> = all.iter().map(row).collect();
    let label = "throughput: predicted above or below published";
    figures::keep("published.svg", &figures::predictions(label, &drawn));
    let errors: Vec<f64> = all.iter().map(|p| off(p.rate, p.row.rate).abs()).collect();
    let worst = errors.iter().fold(0.0_f64, |a, b| a.max(*b));
    let throughput = median(errors);
    writeln!(text, "\nThroughput: median error {throughput:.1} %, largest {worst:.1} %.").unwrap();
    let of_memory = |p: &Predicted| p.row.memory.map(|published| off(p.memory, published).abs());
    let memory = all.iter().filter_map(of_memory).fold(0.0_f64, f64::max);
    writeln!(text, "Memory: largest error {memory:.1} %.\n").unwrap();
    for (i, source) in SOURCES.iter().enumerate() {
        let error = match left_out(i, &all, &plans) {
            Some((error, n)) => {
                format!("median error {error:.1} % on its {n} rows if calibrated without it")
            }
            None => "the only one of its type of GPU".to_string(),
        };
        writeln!(text, "{}. {source}; {error}", i + 1).unwrap();
    }
    let path = file("docs/simulator.md");
    let page = std::fs::read_to_string(&path).expect("docs/simulator.md");
    let (begin, end) = ("<!-- published -->\n", "<!-- /published -->");
    let (head, rest) = page.split_once(begin).expect("the marker");
    let (_, tail) = rest.split_once(end).expect("the marker");
    expect_file![&path].assert_eq(&format!("{head}{begin}{text}{end}{tail}"));
    assert!(throughput <= 10.0, "median error of the throughput is {throughput:.1} %");
    assert!(memory <= 10.0, "largest error of the memory is {memory:.1} %");
}
