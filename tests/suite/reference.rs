//! The reference plan that PyTorch is emulated on: what it has and what not, and that nothing which Frit saves is in it. And the traffic of
//! a model, which does not depend on how its step is compiled either.

use crate::pairs;
use crate::simulate::{frit, predict_model, reference_model, request};
use crate::support::{file, plan};
use frit::compilation::{Request, compile};
use frit_ir::Op;
use frit_ir::ops::{BinaryFn, UnaryFn};
use frit_ir::plan::{Action, PhaseName, Plan};
use frit_passes::cost::Cluster;
use frit_passes::simulate::emulate::{
    AdamW, Attention, Checkpointing, Emulation, Inductor, System, emulate,
};
use frit_passes::simulate::roofline::roofline;
use frit_passes::simulate::{Simulation, simulate};
use serde_json::Value;

const GPT2: &str = "examples/gpu/gpt2_1558m.json";
/// Two blocks of GPT-2, on 8 × 512 tokens.
const SIZES: &str = "batch=8 layers=2 width=768 heads=12 vocab=3000 seq=512";
const CUDA: &str = "target.device=cuda";

fn emulated(plan: &Plan, system: System, checkpointing: Checkpointing) -> Simulation {
    let cluster = Cluster::named("h200").expect("it is built in");
    emulate(plan, &cluster, Emulation::of(system, checkpointing))
}

/// Proves the reference plan of these settings.
fn prove(settings: &[&str]) {
    let (request, config) = request(GPT2, SIZES, settings);
    let request = Request { reference: true, without_code: true, ..request };
    compile(&request, &config, &mut ()).unwrap_or_else(|e| panic!("{settings:?}: {e}"));
}

/// Whether an operation is of a kind.
type Kind = fn(&Op) -> bool;

/// Whether a kernel of the plan has an operation of each of these kinds.
fn has(plan: &Plan, kinds: &[Kind]) -> bool {
    let in_kernel =
        |k: &frit_ir::plan::Kernel| kinds.iter().all(|is| k.body.nodes().any(|(_, n)| is(&n.op)));
    plan.kernels.iter().any(in_kernel)
}

fn is_matmul(op: &Op) -> bool {
    matches!(op, Op::MatMul(_))
}

#[test]
fn the_reference_plan_has_pytorchs_kernels() {
    let settings = [CUDA, "precision.compute=bf16", "memory.loss_chunks=3"];
    let (own, reference) =
        (predict_model(GPT2, SIZES, &settings), reference_model(GPT2, SIZES, &settings));
    // What Frit's kernels do at once and PyTorch's do not.
    let apart: [(&str, Vec<Kind>); 6] = [
        ("GELU", vec![is_matmul, |op| matches!(op, Op::Unary(UnaryFn::GeluTanh))]),
        ("its gradient", vec![is_matmul, |op| matches!(op, Op::Binary(BinaryFn::GeluTanhGrad))]),
        ("the gradient of a bias", vec![is_matmul, |op| matches!(op, Op::SumTo(_))]),
        (
            "the gradients of a norm and a bias",
            vec![|op| matches!(op, Op::LayerNormGradInput(_)), |op| matches!(op, Op::SumTo(_))],
        ),
        (
            "the gradient of the loss",
            vec![|op| matches!(op, Op::CrossEntropy(_)), |op| {
                matches!(op, Op::CrossEntropyGrad(_))
            }],
        ),
        (
            "the gradients of query, key and value",
            vec![|op| matches!(op, Op::AttentionGrad(_)), |op| matches!(op, Op::Concat(_))],
        ),
    ];
    for (what, kinds) in apart {
        assert!(has(&own, &kinds), "{what}");
        assert!(!has(&reference, &kinds), "{what}");
    }
    // What both do at once.
    let norm: [Kind; 2] = [
        |op| matches!(op, Op::LayerNormGradInput(_)),
        |op| matches!(op, Op::LayerNormGradAffine(_)),
    ];
    assert!(has(&own, &norm) && has(&reference, &norm));
    let bias: [Kind; 2] = [is_matmul, |op| matches!(op, Op::Binary(BinaryFn::Add))];
    assert!(has(&reference, &bias));
    // Parameters are cast in every step, and the logits are whole.
    assert!(own.groups.iter().any(|g| !g.copies.is_empty()));
    assert!(reference.groups.iter().all(|g| g.copies.is_empty()));
    let losses = |plan: &Plan| {
        let is_loss = |t: &&frit_ir::plan::Task| match &t.action {
            Action::Kernel { kernel, .. } => {
                let body = &plan.kernels[*kernel].body;
                body.nodes().any(|(_, n)| matches!(n.op, Op::CrossEntropy(_)))
            }
            _ => false,
        };
        plan.tasks.iter().filter(is_loss).count()
    };
    assert_eq!((losses(&own), losses(&reference)), (3, 1));
    // The arithmetic is the same.
    let h200 = Cluster::named("h200").expect("it is built in");
    assert_eq!(simulate(&own, &h200).model_flops, simulate(&reference, &h200).model_flops);
}

#[test]
fn the_reference_plan_does_not_depend_on_what_the_plan_saves() {
    let factors: [&[&str]; 8] = [
        &["sharding.ranks=1", "sharding.ranks=8"],
        &["sharding.strategy=full_shard", "sharding.strategy=shard_grad_op"],
        &["precision.compute=bf16", "precision.compute=fp16", "precision.compute=fp32"],
        &["precision.residual=fp32", "precision.residual=compute"],
        &["run.accumulation=1", "run.accumulation=2"],
        &["memory.recompute=none", "memory.recompute=unit", "memory.recompute=selective"],
        &["memory.offload=none", "memory.offload=optimizer"],
        &["memory.loss_chunks=1", "memory.loss_chunks=3", "sharding.prefetch=auto"],
    ];
    // The first five are of the model and its training, the others of how Frit computes them.
    let own = 5;
    for row in pairs::rows(&factors, |_| true) {
        let settings: Vec<&str> = row.iter().zip(factors).map(|(at, f)| f[*at]).collect();
        let given = [&[CUDA], &settings[..]].concat();
        let reference = reference_model(GPT2, SIZES, &given);
        let plain = [&[CUDA, "memory.loss_chunks=1"], &settings[..own]].concat();
        prove(&plain);
        let plain = reference_model(GPT2, SIZES, &plain);
        for checkpointing in [
            Checkpointing::None,
            Checkpointing::SelectiveOp,
            Checkpointing::SelectiveLayer,
            Checkpointing::Full,
        ] {
            let of = |system| emulated(&reference, system, checkpointing);
            let [all, blocks, eager] = [System::CompileAll, System::Compile, System::Eager].map(of);
            let same = emulated(&plain, System::Compile, checkpointing);
            assert_eq!(
                (blocks.step_seconds, blocks.peak_bytes),
                (same.step_seconds, same.peak_bytes),
                "{settings:?}"
            );
            assert!(all.step_seconds < blocks.step_seconds, "{settings:?}");
            assert!(blocks.step_seconds < eager.step_seconds, "{settings:?}");
            assert!(all.peak_bytes <= blocks.peak_bytes, "{settings:?}");
        }
        let [none, full] = [Checkpointing::None, Checkpointing::Full]
            .map(|checkpointing| emulated(&reference, System::Compile, checkpointing));
        assert!(none.step_seconds < full.step_seconds, "{settings:?}");
    }
}

#[test]
fn clipping_is_two_passes_over_the_gradients_and_f16_is_unscaled_in_one_more() {
    let h200 = Cluster::named("h200").expect("it is built in");
    let update = |settings: &[&str]| {
        let settings = [&[CUDA], settings].concat();
        let plan = reference_model(GPT2, SIZES, &settings);
        let found = emulated(&plan, System::Compile, Checkpointing::None);
        let update = found.phases.iter().find(|p| p.name == PhaseName::Update);
        let gradients: usize = plan.groups.iter().map(|g| 4 * g.numel).sum();
        (update.expect("an update").timeline.end, gradients as u64)
    };
    // The loss scale is not adjusted, which would be tasks of its own.
    let (scale, off) = ("precision.loss_scale=none", "optimizer.clip_grad_norm=0");
    let [bf16, fp16] = ["precision.compute=bf16", "precision.compute=fp16"].map(|compute| {
        let ((with, bytes), (without, _)) =
            (update(&[compute, scale]), update(&[compute, scale, off]));
        let passes = h200.device.copy_seconds(bytes) + h200.device.copy_seconds(2 * bytes);
        assert!((with - without - passes).abs() < 1e-9, "{compute}: {with} {without} {passes}");
        (without, h200.device.copy_seconds(2 * bytes))
    });
    assert!((fp16.0 - bf16.0 - fp16.1).abs() < 1e-9, "{fp16:?} {bf16:?}");
}

/// Blocks of Llama with two query heads for each key, on 512 tokens.
const LLAMA: &str = "batch=1 layers=2 width=512 heads=4 kv_heads=2 ffn=1024 vocab=3000 seq=512";

#[test]
fn a_run_of_its_time_takes_longer_by_what_its_kernels_move() {
    let h200 = Cluster::named("h200").expect("it is built in");
    let plan = reference_model("examples/llama/model.json", LLAMA, &["precision.compute=bf16"]);
    let now = Emulation::of(System::Compile, Checkpointing::None);
    let seconds = |emulation| emulate(&plan, &h200, emulation).step_seconds;
    let more = |emulation| seconds(emulation) - seconds(now);
    let copy = |bytes: usize| h200.device.copy_seconds(bytes as u64);
    // Query and key have heads of 128. Each takes two kernels more and 16 bytes an element more; the key is written twice instead of
    // once, the value is read once and written twice. Backward is the same in reverse.
    let (query, key) = (512 * 4 * 128, 512 * 2 * 128);
    let of_a_block = 2.0 * (2.0 * copy(8 * query) + 2.0 * copy(8 * key) + copy((1 + 3) * 2 * key));
    let complex = more(Emulation { attention: Attention::Complex, ..now });
    assert!((complex - 2.0 * of_a_block).abs() < 1e-9, "{complex} {of_a_block}");
    // Two norms a block and one behind them: a kernel each that reads the gradient and the f32 stream.
    let columns = more(Emulation { inductor: Inductor::Before210, ..now });
    let least = 5.0 * copy(512 * 512 * (2 + 4));
    assert!((least..1.1 * least).contains(&columns), "{columns} {least}");
    // Thirteen passes over the parameters more.
    let adamw = more(Emulation { adamw: AdamW::Foreach, ..now });
    let numel: usize = plan.groups.iter().map(|g| g.numel).sum();
    let passes = (13 * 4 * numel) as f64 / h200.device.bytes_per_second();
    assert!((passes..passes + 20e-6 * h200.device.launch_us).contains(&adamw), "{adamw} {passes}");
    // In eager mode only the optimizer differs; what is computed again is rotated again.
    let eager = Emulation::of(System::Eager, Checkpointing::None);
    let old = Emulation { attention: Attention::Complex, inductor: Inductor::Before210, ..eager };
    assert_eq!(seconds(old), seconds(eager));
    let again = |attention| {
        let checkpointing = Checkpointing::SelectiveOp;
        seconds(Emulation { attention, checkpointing, ..now })
    };
    let twice = again(Attention::Complex) - again(Attention::Fused);
    assert!((twice - 1.5 * complex).abs() < 1e-9, "{twice} {complex}");
}

#[test]
fn the_command_emulates_from_what_the_plan_directory_stores() {
    let step = |settings: &[&str], moved: bool| {
        let planned = plan("tests/models/gpt2/model.onnx", 2, settings);
        let (path, other) = (planned.path(), planned.dir.path().join("moved.onnx"));
        let mut args = vec!["simulate", path.to_str().expect("unicode"), "--cluster", "h100"];
        args.extend(["--emulate", "fsdp2-compile", "--json"]);
        if moved {
            std::fs::copy(file("tests/models/gpt2/model.onnx"), &other).expect("copied");
            args.extend(["--model", other.to_str().expect("unicode")]);
        }
        let json: Value = serde_json::from_str(&frit(&args).expect("a prediction")).expect("JSON");
        json["step_seconds"].as_f64().expect("a number")
    };
    let plain = step(&["sharding.ranks=2"], false);
    assert_eq!(plain, step(&["sharding.ranks=2", "memory.recompute=unit"], true));
    let planned = plan("tests/models/gpt2/model.onnx", 2, &[]);
    let path = planned.path();
    let other = file("tests/models/mlp/model.onnx");
    let args = ["simulate", path.to_str().expect("unicode"), "--cluster", "h100"];
    let more = ["--emulate", "fsdp2-eager", "--model", other.to_str().expect("unicode")];
    let refused = frit(&[&args[..], &more].concat()).expect_err("another model");
    assert!(refused.contains("is not the model that the plan was compiled from"), "{refused}");
}

/// Elements of the parameters of the test model `mlp`.
const MLP: u64 = 256 * 784 + 256 + 253 * 256 + 253 + 10 * 253 + 10;

#[test]
fn the_traffic_of_a_small_model_is_what_is_counted_by_hand() {
    let model = |settings: &[&str]| {
        let settings = [&["precision.compute=fp32"], settings].concat();
        predict_model("tests/models/mlp/model.onnx", "batch=4", &settings).model_bytes
    };
    // Of each row, twice 4 bytes: results of three matmuls, of two ReLUs and the logits, and the gradients of all of these but
    // one: that of the last matmul is that of the logits.
    let columns = (256 + 253 + 10) + (256 + 253 + 10) + (256 + 253 + 10) + (256 + 253);
    let activations = 4 * 8 * columns;
    // Pixels and labels are read; both results of the loss and the mask that counts labels are written and read.
    let inputs = 4 * (784 * 4 + 8) + 3 * 4 * 8;
    // A parameter and two moments are read and written, its gradient written and read.
    let counted = |held: u64| 24 * MLP / held + 8 * MLP + activations + inputs;
    // Beside it are the scalars of the update.
    let scalars = |bytes: u64, counted: u64| (0..400).contains(&bytes.saturating_sub(counted));
    for (settings, held) in [
        (&[][..], 1),
        (&["sharding.ranks=2"], 2),
        (&["sharding.ranks=2", "sharding.strategy=no_shard"], 1),
        (&["memory.recompute=unit", "sharding.wrap=fc*"], 1),
    ] {
        let bytes = model(settings);
        assert!(bytes >= counted(held), "{settings:?}: {bytes} {}", counted(held));
        assert!(scalars(bytes, counted(held)), "{settings:?}: {bytes} {}", counted(held));
    }
    // Everything but the update is done in each micro-step.
    let two = model(&["run.accumulation=2"]);
    assert!(two > model(&[]) + activations + inputs, "{two}");
}

#[test]
fn gpt2_moves_less_than_each_of_its_values_twice() {
    let h200 = Cluster::named("h200").expect("it is built in");
    let of = |settings: &[&str]| {
        let settings = [&[CUDA, "precision.compute=bf16"], settings].concat();
        roofline(&predict_model("examples/gpu/gpt2_124m.json", "batch=32", &settings), &h200)
    };
    let found = of(&[]);
    assert_eq!(found.bytes, found.rows.iter().map(|row| row.bytes).sum::<u64>());
    let [least, all] = found.ratios();
    assert!((0.5..1.0).contains(&all), "{all}");
    // 76.0 GiB over 55.6, as counted by hand: the gradients of query, key and value count once, joined.
    assert!((1.36..1.375).contains(&least), "{least}");
    // The number is the model's: a plan that moves more has a larger ratio.
    let whole = of(&["memory.loss_chunks=1"]);
    let again = of(&["memory.recompute=unit"]);
    assert_eq!([whole.model_bytes, again.model_bytes], [found.model_bytes; 2]);
    assert_eq!([whole.least_bytes, again.least_bytes], [found.least_bytes; 2]);
    assert!(again.bytes > found.bytes);
}
