//! Reproducible plans for GPUs: the same kernels compute a piece on any number of ranks, and on the software GPU the same bits
//! come of it, whatever the library's order of sums.

use crate::stand_ins::{Ended, Gpu};
use crate::support::{Planned, file, plan_to_evaluate};
use frit_ir::Op;
use frit_ir::ops::ReduceKind;
use frit_ir::plan::{Action, Entry, Launch, PhaseName, Plan};
use frit_passes::verify_plan::verify_plan;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const STEPS: usize = 3;
const CUDA: [&str; 2] = ["target.device=cuda", "target.arch=sm_90"];
const STRATEGIES: [&str; 5] =
    ["full_shard", "shard_grad_op", "shard_optimizer", "hybrid_shard", "no_shard"];

fn files_of(model: &str) -> [String; 2] {
    ["model.onnx", "data.safetensors"].map(|f| format!("tests/models/{model}/{f}"))
}

fn planned(model: &str, strategy: &str, ranks: usize, settings: &[&str]) -> Planned {
    // A replica is two ranks.
    let strategy = if strategy == "hybrid_shard" && ranks < 2 { "full_shard" } else { strategy };
    let keys = [format!("sharding.ranks={ranks}"), format!("sharding.strategy={strategy}")];
    let mut all: Vec<&str> = CUDA.iter().chain(settings).copied().collect();
    all.extend(keys.iter().map(String::as_str));
    if strategy == "hybrid_shard" {
        all.push("sharding.shard_group=2");
    }
    if model == "resnet" {
        all.push("model.batch_norm=train");
    }
    plan_to_evaluate(&files_of(model)[0], 2, &all)
}

/// What the micro-steps launch but for sums over pieces: GEMMs, operations and hand-written kernels with all that they are
/// made of and given, and the bodies of generated reductions. Generated kernels without a reduction compute every element
/// by itself, and rows of tables are only moved: these are cast before on some ranks, and behind on others.
fn chosen(plan: &Plan) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for task in &plan.tasks[plan.tasks_of(PhaseName::MicroStep)] {
        let Action::Kernel { kernel, .. } = &task.action else { continue };
        let kernel = &plan.kernels[*kernel];
        let has = |is: fn(&Op) -> bool| kernel.body.nodes().any(|(_, n)| is(&n.op));
        match &kernel.entry {
            Entry::Launches(_) if has(|op| matches!(op, Op::TreeSum | Op::Embedding(_))) => {}
            Entry::Launches(selected) => {
                for launch in selected.every_launch() {
                    // A generated one is named by its number.
                    if !matches!(launch, Launch::Generated(_) | Launch::Choice(_)) {
                        all.insert(format!("{launch:?}"));
                    }
                }
            }
            Entry::Cuda { .. } if has(|op| matches!(op, Op::Reduce(_) | Op::SumTo(_))) => {
                all.insert(kernel.body.to_string());
            }
            _ => {}
        }
    }
    all
}

/// The generated code of a plan.
fn ptx(planned: &Planned) -> String {
    let file = &planned.compiled.plan.object.as_ref().expect("generated code").file;
    let text = std::fs::read_to_string(planned.path().join(file)).expect("PTX");
    assert!(text.contains("add.rn.f32"));
    text
}

#[test]
fn a_piece_is_computed_by_the_same_kernels_on_any_number_of_ranks() {
    let mut wrong = Vec::new();
    for model in ["gpt2", "resnet"] {
        for precision in ["fp32", "bf16", "fp16", "bf16-pure"] {
            let precision = format!("precision.compute={precision}");
            let mut expected = BTreeSet::new();
            for strategy in STRATEGIES {
                for ranks in [1, 2, 4] {
                    let settings = ["run.reproducible=4", &precision];
                    let planned = planned(model, strategy, ranks, &settings);
                    let what = format!("{model} {precision} {strategy} on {ranks} ranks");
                    let plan = &planned.compiled.plan;
                    verify_plan(plan).unwrap_or_else(|found| panic!("{what}: {found:?}"));
                    // What an assembler may merge, it merges in some kernels and in others not.
                    for part in ["add.f32", "sub.f32", "mul.f32"] {
                        assert!(!ptx(&planned).contains(part), "{what}: {part}");
                    }
                    let found = chosen(plan);
                    assert!(found.len() > 10, "{what}: {found:?}");
                    if expected.is_empty() {
                        expected = found;
                        continue;
                    }
                    let differences: Vec<_> = expected.symmetric_difference(&found).collect();
                    if !differences.is_empty() {
                        wrong.push(format!("{what}: {differences:#?}"));
                    }
                }
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of them\n{}",
        wrong.len(),
        wrong[..wrong.len().min(3)].join("\n")
    );
}

/// What a run on the software GPU gives.
#[derive(Clone, PartialEq)]
struct Found {
    /// Without what is of one run alone.
    metrics: Vec<serde_json::Value>,
    saved: Vec<u8>,
}

/// Runs so many steps from the checkpoints of a folder on.
fn run(gpu: &Gpu, planned: &Planned, model: &str, steps: usize, folder: &Path) -> Vec<Ended> {
    let text = |path: &Path| path.to_str().expect("a path in Unicode").to_string();
    let (path, data) = (text(&planned.path()), text(&file(&files_of(model)[1])));
    let steps = steps.to_string();
    let [lines, saved, checkpoints] =
        ["metrics.jsonl", "saved.safetensors", "checkpoints"].map(|name| text(&folder.join(name)));
    let arguments = [
        "run",
        &path,
        "--data",
        &data,
        "--steps",
        &steps,
        "--metrics",
        &lines,
        "--save",
        &saved,
        "--validation",
        &data,
        "--validate-every",
        "1",
        "--checkpoint",
        &checkpoints,
        "--resume",
    ];
    let ended = match planned.compiled.plan.world_size {
        1 => vec![gpu.run(&arguments)],
        ranks => gpu.run_ranks(&arguments, ranks, &[]),
    };
    ended.iter().for_each(Ended::expect_success);
    ended
}

fn found(folder: &Path) -> Found {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    let of_this_run =
        ["step_seconds", "tokens_or_examples_per_s", "memory_bytes", "run", "plan", "wall_time"];
    let line = |line: &str| {
        let mut metrics: serde_json::Value = serde_json::from_str(line).expect("an object");
        let object = metrics.as_object_mut().expect("an object");
        object.retain(|key, _| !of_this_run.contains(&key.as_str()));
        metrics
    };
    let saved = std::fs::read(folder.join("saved.safetensors")).expect("parameters");
    Found { metrics: text.lines().map(line).collect(), saved }
}

/// What is chosen of every GEMM and every choice of a plan that has run.
fn choices(planned: &Planned) -> BTreeMap<String, serde_json::Value> {
    let text = std::fs::read_to_string(planned.path().join("tuning.json")).expect("a file");
    let all: BTreeMap<String, BTreeMap<String, serde_json::Value>> =
        serde_json::from_str(&text).expect("choices");
    let of = |(key, measured): (String, serde_json::Value)| (key, measured["chosen"].clone());
    all.into_values().flatten().map(of).collect()
}

/// What plans give that run one after the other, each up to some step.
fn trained(plans: &[(&Planned, usize)], model: &str) -> Found {
    let gpu = Gpu::new();
    for (planned, steps) in plans {
        for rank in run(&gpu, planned, model, *steps, gpu.dir.path()) {
            // No sum over ranks is NCCL's.
            assert!(rank.count("nccl reduce_scatter") + rank.count("nccl all_reduce") == 0);
            let plan = &planned.compiled.plan;
            let mut sums = plan.tasks.iter().filter_map(|task| plan.rank_sum(&task.action));
            assert_eq!(rank.count("nccl group") > 0, sums.any(|sum| sum.share > 0));
        }
    }
    found(gpu.dir.path())
}

#[test]
fn bits_do_not_depend_on_the_number_of_ranks_on_the_software_gpu() {
    let mut wrong = Vec::new();
    for (model, strategy, settings) in [
        ("gpt2", "no_shard", &["precision.compute=bf16", "memory.offload=optimizer"][..]),
        ("dropout", "hybrid_shard", &["precision.compute=fp16", "memory.recompute=unit"]),
        ("resnet", "shard_grad_op", &["precision.compute=fp32", "optimizer.kind=nesterov"]),
        ("mlp", "full_shard", &["precision.compute=fp32", "optimizer.clip_grad_norm=0.05"]),
    ] {
        let settings = [settings, &["run.reproducible=4", "optimizer.lr=0.01"]].concat();
        let [one, two, four] = [1, 2, 4].map(|ranks| planned(model, strategy, ranks, &settings));
        let expected = trained(&[(&one, STEPS)], model);
        assert!(expected.metrics.len() >= STEPS, "{model}");
        for (plans, what) in [
            (&[(&four, STEPS)][..], "on 4 ranks"),
            (&[(&two, 2), (&one, STEPS)], "on 2 ranks and then on 1"),
        ] {
            let found = trained(plans, model);
            if found != expected {
                let same = [found.metrics == expected.metrics, found.saved == expected.saved];
                wrong.push(format!("{model} {strategy} {what}: metrics, parameters {same:?}"));
            }
        }
        // What libraries are asked for is the same too, and what is chosen of it.
        let expected = choices(&one);
        assert!(expected.len() > 3, "{expected:?}");
        for many in [&two, &four] {
            assert_eq!(choices(many), expected, "{model} {strategy}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_one_plan_measured_is_carried_to_others_by_its_file() {
    let settings = ["run.reproducible=2", "precision.compute=fp32"];
    let [one, two] = [1, 2].map(|ranks| planned("mlp", "full_shard", ranks, &settings));
    let gpu = Gpu::new();
    let path = one.path().display().to_string();
    let data = file(&files_of("mlp")[1]).display().to_string();
    let arguments = ["run", &path, "--data", &data, "--steps", "1", "--tuning-seconds", "60"];
    let ended = gpu.run(&arguments);
    ended.expect_success();
    assert!(!ended.said.contains("libraries' first ones"), "{}", ended.said);
    let [from, to] = [&one, &two].map(|planned| planned.path().join("tuning.json"));
    std::fs::copy(&from, &to).expect("copied");
    let [a, b] = [&one, &two].map(|planned| trained(&[(planned, STEPS)], "mlp"));
    assert!(a == b);
    let [a, b] = [from, to].map(|file| std::fs::read(file).expect("a file"));
    assert!(a == b, "nothing else was chosen");
}

/// Rank 0 has what a validation gathers, and tells the others its sums, before these are done with the gather.
#[test]
fn training_goes_on_after_the_last_gather_of_a_validation_where_ranks_are_late() {
    let settings = ["run.reproducible=2", "precision.compute=fp32"];
    let planned = planned("mlp", "full_shard", 2, &settings);
    let gpu = Gpu::new().with("FRIT_NCCL_LATE", 20);
    run(&gpu, &planned, "mlp", STEPS, gpu.dir.path());
}

/// Without the option, the library's order of sums shows.
#[test]
fn without_the_option_bits_depend_on_the_number_of_ranks_on_the_software_gpu() {
    let found = [1, 4].map(|ranks| {
        let accumulation = format!("run.accumulation={}", 4 / ranks);
        let planned =
            planned("mlp", "full_shard", ranks, &[&accumulation, "precision.compute=fp32"]);
        let gpu = Gpu::new();
        run(&gpu, &planned, "mlp", STEPS, gpu.dir.path());
        found(gpu.dir.path()).saved
    });
    assert!(found[0] != found[1]);
}

/// The collectives of a plan that add, and the memory in which their kernels do.
#[test]
fn sums_over_ranks_have_memory_of_their_own() {
    for strategy in ["full_shard", "no_shard"] {
        let planned = planned("gpt2", strategy, 4, &["run.reproducible=4"]);
        let plan = &planned.compiled.plan;
        let needs = plan.needs();
        let mut n = 0;
        for task in &plan.tasks {
            let adds = match &task.action {
                Action::ReduceScatter { reduce, .. } | Action::AllReduce { reduce, .. } => {
                    *reduce != ReduceKind::Max
                }
                _ => false,
            };
            let sum = plan.rank_sum(&task.action);
            assert_eq!(sum.is_some(), adds, "{}", task.name);
            let Some(sum) = sum else { continue };
            n += usize::from(sum.share > 0);
            assert!(sum.ranks == 4 && sum.bytes() > 0);
            assert!(needs[task.stream.index()].scratch_bytes >= sum.bytes(), "{}", task.name);
        }
        assert!(n > 1, "{strategy}: shares");
    }
}
